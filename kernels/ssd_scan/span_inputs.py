"""The matrix products of one span of chunks: states at chunk bounds, states at any token, outputs.

Letters: c chunks, Q tokens of a chunk, H heads in G groups of Hg = H / G heads that share B and C, P head dimension,
N state dimension. Padding tokens are zero in every tensor: decay 1, no term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from turnkeep.kernels.chunk_layout import Span
from turnkeep.kernels.decay import MIN_LOG_DECAY, decay_matrix


@dataclass(slots=True, frozen=True)
class SpanInputs:
    """What the chunks of a span are computed from; all float32."""

    span: Span
    x: torch.Tensor  # [c, G, Q, Hg, P]
    terms: torch.Tensor  # dt x: [c, G, Q, Hg, P]
    B: torch.Tensor  # [c, G, Q, N]
    C: torch.Tensor  # [c, G, Q, N]
    decay: torch.Tensor  # over (j, i]: [c, G, Hg, Q (i), Q (j)], zero for j > i
    prefix: torch.Tensor  # decay from the chunk's start up to and with i: [c, G, Hg, Q]

    @classmethod
    def of(
        cls, span: Span, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
    ) -> SpanInputs:
        """Arguments as in `ssd_scan`."""
        num_groups = B.shape[1]
        by_group = (span.num_chunks, span.width, num_groups, x.shape[1] // num_groups)  # [c, Q, G, Hg]
        x = span.to_chunks(x).to(torch.float32).view(*by_group, -1).transpose(1, 2)
        dt = span.to_chunks(dt).to(torch.float32)
        log_decay = (dt * A).clamp_(min=MIN_LOG_DECAY).view(by_group).permute(0, 2, 3, 1).contiguous()  # [c, G, Hg, Q]
        return cls(
            span=span,
            x=x,
            terms=x * dt.view(by_group).transpose(1, 2)[..., None],
            B=span.to_chunks(B).to(torch.float32).transpose(1, 2),
            C=span.to_chunks(C).to(torch.float32).transpose(1, 2),
            decay=decay_matrix(log_decay),
            prefix=log_decay.cumsum(-1).exp_(),
        )

    def bound_states(
        self,
        carried: torch.Tensor,
        is_last: bool,
        finish: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """States [carried | after chunk 0 | after chunk 1 | ...], [counts[0] + c, H, P, N].

        carried [>= counts[0], H, P, N] holds the states before the span. When no sequence goes on behind it
        (`is_last`), the states after the last chunks are not needed and left unset. finish(index, states) may change
        the states after the chunks of an index, counted in the span, before anything goes on from them.
        """
        counts = self.span.counts
        bounds = torch.empty(
            (counts[0] + self.span.num_chunks, *carried.shape[1:]), dtype=torch.float32, device=carried.device
        )
        bounds[: counts[0]] = carried[: counts[0]]
        needed = counts[:-1] if is_last else counts
        num_chunks = sum(needed)
        if num_chunks == 0:
            return bounds
        added = bounds[counts[0] : counts[0] + num_chunks]
        left, right = self._weighted_terms(
            self.terms[:num_chunks], self.decay[:num_chunks, ..., -1, :], self.B[:num_chunks]
        )
        torch.bmm(left, right, out=added.view(left.shape[0], -1, added.shape[-1]))
        decay = self.prefix[..., -1].reshape(self.span.num_chunks, -1, 1, 1)
        previous, start = 0, counts[0]
        for index, count in enumerate(needed):  # chunk after chunk, all sequences at once
            first = start - counts[0]
            bounds[start : start + count].addcmul_(bounds[previous : previous + count], decay[first : first + count])
            if finish is not None:
                finish(index, bounds[start : start + count])
            previous, start = start, start + count
        return bounds

    def state_at(self, chunk: int, token: int, bounds: torch.Tensor, out: torch.Tensor) -> None:
        """Write the state after token `token` of a chunk to out [H, P, N] float32, contiguous.

        The token's row of the decay matrix takes the place of the last one. Later tokens have weight zero there, so
        leaving them out changes no bit.
        """
        end = token + 1
        start, prefix = bounds[self.span.starts[chunk]], self.prefix[chunk, :, :, token]
        torch.mul(start, prefix.reshape(-1, 1, 1), out=out)
        left, right = self._weighted_terms(
            self.terms[chunk : chunk + 1, :, :end],
            self.decay[chunk, :, :, token, :end],
            self.B[chunk : chunk + 1, :, :end],
        )
        out.view(left.shape[0], -1, out.shape[-1]).baddbmm_(left, right)

    def outputs(self, bounds: torch.Tensor, D: torch.Tensor | None) -> torch.Tensor:
        """y [c, Q, H, P]. Uses up `decay`: call it last."""
        num_chunks, num_groups, width, group_size, head_dim = self.x.shape
        if self.span.starts == tuple(range(num_chunks)):
            starts = bounds[:num_chunks]
        else:
            starts = bounds[torch.tensor(self.span.starts, dtype=torch.int64, device=bounds.device)]
        starts = starts.view(num_chunks, num_groups, group_size * head_dim, -1)
        scores = self.C @ self.B.transpose(-1, -2)  # [c, G, Q, Q], once for the heads of a group
        weights = self.decay.mul_(scores[:, :, None])
        inner = weights @ self.terms.transpose(2, 3)  # from the chunk's own tokens: [c, G, Hg, Q, P]
        y = (self.C @ starts.transpose(-1, -2)).view(self.x.shape)  # from the state at its start: [c, G, Q, Hg, P]
        y.mul_(self.prefix.transpose(2, 3)[..., None]).add_(inner.transpose(2, 3))
        if D is not None:
            y.addcmul_(self.x, D.to(torch.float32).view(num_groups, 1, group_size, 1))
        return y.transpose(1, 2).reshape(num_chunks, width, num_groups * group_size, head_dim)

    def _weighted_terms(
        self, terms: torch.Tensor, weights: torch.Tensor, B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors whose product is the sum over j of weights[c, G, Hg, j] terms[c, G, j, Hg, P] B[c, G, j, N]:
        [c G, Hg P, Q] and [c G, Q, N]."""
        batch, width = B.shape[0] * B.shape[1], B.shape[2]
        weighted = (terms * weights.transpose(-1, -2)[..., None]).reshape(batch, width, -1)
        return weighted.transpose(1, 2), B.reshape(batch, width, -1)
