"""The matrix products of one span of chunks: what every token writes, outputs, states at any token.

A token writes k u^T, where u is its value corrected by what the decayed state already answers to k. All u of a chunk
solve one unit lower triangular system; its inverse does not depend on the state, so only products are left for the
walk from chunk to chunk. A u never depends on later tokens, hence any state inside a chunk is one more product.

Letters: c chunks, Q tokens of a chunk, Hv value heads, of which Hv / Hk share a key head, K key and V value dimension.
Padding tokens are zero in every tensor: decay 1, nothing written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnkeep.kernels.chunk_layout import Span
from turnkeep.kernels.decay import MIN_LOG_DECAY, decay_matrix
from turnkeep.kernels.gated_delta_scan.unit_length import unit_length
from turnkeep.kernels.unit_triangular import unit_lower_inverse


@dataclass(slots=True, frozen=True)
class SpanDeltas:
    """What the chunks of a span are computed from; all float32. `u` and `read` are filled chunk by chunk."""

    keys_queries: torch.Tensor  # normalised keys, then scaled queries: [c, Hv, 2 Q, K]
    values: torch.Tensor  # beta v: [c, Hv, Q, V]
    factors: torch.Tensor  # what a read of the chunk's first state counts: [c, Hv, 2 Q, 1]
    inverse: torch.Tensor  # of the system for u: [c, Hv, Q, Q]
    scores: torch.Tensor  # decayed q . k of tokens not later: [c, Hv, Q, Q]
    decay: torch.Tensor  # over (j, i], zero for j > i: [c, Hv, Q (i), Q (j)]
    prefix: torch.Tensor  # decay from the chunk's start up to and with i: [c, Hv, Q]
    u: torch.Tensor  # [c, Hv, Q, V]
    read: torch.Tensor  # outputs from the chunk's first state: [c, Hv, Q, V]

    @classmethod
    def of(
        cls, span: Span, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> SpanDeltas:
        """Arguments as in `gated_delta_scan`."""
        num_chunks, width, num_heads, num_keys = span.num_chunks, span.width, v.shape[1], k.shape[1]
        per_key = num_heads // num_keys
        both = torch.cat((span.to_chunks(k), span.to_chunks(q)), dim=1).transpose(1, 2)  # [c, Hk, 2 Q, K]
        both = unit_length(both)
        both[:, :, width:].mul_(k.shape[2] ** -0.5)
        products = both @ both[:, :, :width].transpose(-1, -2)  # [c, Hk, 2 Q, Q], once for the heads of a key
        log_decay, strength = (span.to_chunks(t).to(torch.float32).transpose(1, 2) for t in (g, beta))  # [c, Hv, Q]
        log_decay = log_decay.clamp(min=MIN_LOG_DECAY).contiguous()
        decay = decay_matrix(log_decay)
        prefix = log_decay.cumsum(-1).exp_()
        by_key = decay.view(num_chunks, num_keys, per_key, width, width)
        system = (by_key * products[:, :, None, :width]).view(decay.shape).mul_(strength[..., None]).tril_(-1)
        values = span.to_chunks(v).to(torch.float32).transpose(1, 2) * strength[..., None]
        return cls(
            keys_queries=both[:, :, None].expand(-1, -1, per_key, -1, -1).reshape(num_chunks, num_heads, 2 * width, -1),
            values=values,
            factors=torch.cat((-strength * prefix, prefix), dim=2)[..., None],
            inverse=unit_lower_inverse(system),
            scores=(by_key * products[:, :, None, width:]).view(decay.shape),
            decay=decay,
            prefix=prefix,
            u=torch.empty_like(values),
            read=torch.empty_like(values),
        )

    def solve(self, first: int, starts: torch.Tensor) -> None:
        """Fill `u` and `read` of the chunks from `first` on, whose first states are starts [n, Hv, K, V]."""
        chunks, width = slice(first, first + starts.shape[0]), self.u.shape[2]
        read = (self.keys_queries[chunks] @ starts).mul_(self.factors[chunks])
        self.read[chunks] = read[:, :, width:]
        torch.matmul(self.inverse[chunks], read[:, :, :width].add_(self.values[chunks]), out=self.u[chunks])

    def states_at(self, first: int, token: int, starts: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """States after token `token` of the chunks from `first` on, [n, Hv, K, V]; `starts` are their first states.
        Written to `out`, float32, if there is one.

        Later tokens are left out rather than given the weight zero. A run that stops at this token takes the same
        products of the same sizes here, and so gets the same bits.
        """
        chunks, end = slice(first, first + starts.shape[0]), token + 1
        written = self.u[chunks, :, :end] * self.decay[chunks, :, token, :end, None]
        states = torch.matmul(self.keys_queries[chunks, :, :end].transpose(-1, -2), written, out=out)
        return states.addcmul_(starts, self.prefix[chunks, :, token, None, None])

    def outputs(self) -> torch.Tensor:
        """Outputs of all chunks, once they are solved: [c, Q, Hv, V]."""
        return (self.scores @ self.u).add_(self.read).transpose(1, 2)
