"""The gated delta net: projection, causal convolution, gated delta rule, norm of every head, gate, projection.

Owns the weights; the state lives in the rows it is given. Prefill, decode and the verification of trees share all but
the operations that walk over time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnkeep.kernels.causal_conv1d import causal_conv1d, causal_conv1d_tree, causal_conv1d_update
from turnkeep.kernels.forward_batch import CacheTensors
from turnkeep.kernels.gated_delta_scan import gated_delta_grid_scan, gated_delta_scan, gated_delta_update
from turnkeep.kernels.gated_delta_tree import DeltaTerms, gated_delta_fold, gated_delta_tree
from turnkeep.kernels.grid_cells import GridStates
from turnkeep.kernels.norm import rms_norm
from turnkeep.kernels.replay_history import HistoryFolds, HistorySpans
from turnkeep.models.config import GatedDeltaConfig
from turnkeep.models.decoder_step import DecoderStep, RecurrentStep
from turnkeep.models.mixers.parameters import empty_parameter

CHUNK_SIZE = 64


class GatedDeltaMixer(nn.Module):
    """out_proj(norm(delta_rule(conv(q, k, v))) * silu(z)); state in place in `conv` and `delta` of its state index."""

    def __init__(
        self, config: GatedDeltaConfig, hidden_size: int, norm_eps: float, index: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.norm_eps = norm_eps
        inner, heads, keys = config.inner_size, config.num_value_heads, config.num_key_heads * config.key_dim
        # Rows of the projection: what passes through the convolution, the gate z, then the logits of beta and the
        # input of the decay, one of each a value head.
        self.projected_sizes = [config.conv_dim, inner, heads, heads]
        self.conv_sizes = [keys, keys, inner]
        self.in_proj_weight = empty_parameter(sum(self.projected_sizes), hidden_size, dtype=dtype)
        # Small parameters stay in float32, where they are used.
        self.conv_weight = empty_parameter(config.conv_dim, config.conv_width, dtype=torch.float32)
        self.dt_bias = empty_parameter(heads, dtype=torch.float32)
        self.A = empty_parameter(heads, dtype=torch.float32)
        self.norm_weight = empty_parameter(config.value_dim, dtype=torch.float32)
        self.out_proj_weight = empty_parameter(hidden_size, inner, dtype=dtype)

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; reads and writes the state rows of the step."""
        recurrent = step.recurrent
        assert recurrent is not None
        windows, states = step.cache.states["conv"][self.index], step.cache.states["delta"][self.index]
        projected = functional.linear(x, self.in_proj_weight)
        conv_input, gate, strength, decay = torch.split_with_sizes(projected, self.projected_sizes, dim=-1)
        beta = strength.float().sigmoid()  # [T, Hv]
        g = self.A * functional.softplus(decay + self.dt_bias)  # [T, Hv] float32, <= 0
        cut, end, pieces = recurrent.num_decodes, recurrent.first_prefill, []
        if cut:
            pieces.append(self._update(conv_input[:cut], g[:cut], beta[:cut], windows, states, recurrent))
        if end > cut:
            pieces.append(self._verify(conv_input[cut:end], g[cut:end], beta[cut:end], step))
        if recurrent.num_prefills:
            pieces.append(self._scan(conv_input[end:], g[end:], beta[end:], step.cache, recurrent))
        mixed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)  # [T, Hv, V]
        normed = rms_norm(mixed, self.norm_weight, self.norm_eps).reshape(x.shape[0], -1)
        gated = (normed * functional.silu(gate.float())).to(x.dtype)
        return functional.linear(gated, self.out_proj_weight)

    def fold(self, folds: HistoryFolds, cache: CacheTensors) -> None:
        """Move states on by accepted tokens; their windows are not looked at."""
        terms = self._history(folds.spans, cache)
        gated_delta_fold(terms, cache.states["delta"][self.index], folds.sources, folds.targets)

    def _history(self, spans: HistorySpans, cache: CacheTensors) -> DeltaTerms:
        k, u, g = (cache.histories[name][self.index] for name in ("k", "u", "g"))
        return DeltaTerms(spans.terms(k), spans.terms(u), spans.terms(g))

    def _verify(self, conv_input: Tensor, g: Tensor, beta: Tensor, step: DecoderStep) -> Tensor:
        trees, recurrent, cache = step.batch.trees, step.recurrent, step.cache
        assert trees is not None
        assert trees.history is not None
        assert recurrent is not None
        raw = cache.histories["conv"][self.index]
        windows = trees.history.windows(raw)
        convolved = causal_conv1d_tree(conv_input, self.conv_weight, None, windows, trees.trees, "silu")
        q, k, v = self._split_heads(convolved)
        states, rows = cache.states["delta"][self.index], recurrent.tree_rows
        history = self._history(trees.history, cache)
        mixed, u = gated_delta_tree(q, k, v, g, beta, states, rows, history, trees.trees)
        for name, own in (("conv", conv_input), ("k", k), ("u", u), ("g", g)):
            trees.terms.keep(cache.histories[name][self.index], own)
        return mixed

    def _split_heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, length = self.config, convolved.shape[0]
        q, k, v = torch.split_with_sizes(convolved, self.conv_sizes, dim=-1)
        return (
            q.view(length, config.num_key_heads, config.key_dim),
            k.view(length, config.num_key_heads, config.key_dim),
            v.view(length, config.num_value_heads, config.value_dim),
        )

    def _update(
        self, conv_input: Tensor, g: Tensor, beta: Tensor, windows: Tensor, states: Tensor, step: RecurrentStep
    ) -> Tensor:
        rows = step.decode_rows
        convolved = causal_conv1d_update(conv_input, self.conv_weight, None, windows, rows, "silu")
        mixed = gated_delta_update(*self._split_heads(convolved), g, beta, states, rows)
        if step.decode_exports is not None:
            sources, targets = step.decode_exports
            windows.index_copy_(0, targets, windows.index_select(0, sources))
            states.index_copy_(0, targets, states.index_select(0, sources))
        return mixed

    def _scan(self, conv_input: Tensor, g: Tensor, beta: Tensor, cache: CacheTensors, step: RecurrentStep) -> Tensor:
        windows, states = cache.states["conv"][self.index], cache.states["delta"][self.index]
        rows, seq_lens, context_lens = step.prefill_rows, step.prefill_seq_lens, step.prefill_context_lens
        exports = step.prefill_exports
        convolved = causal_conv1d(
            conv_input, self.conv_weight, None, windows, rows, seq_lens, context_lens, "silu", exports
        )
        q, k, v = self._split_heads(convolved)
        grid = GridStates.of(cache.states, "delta", self.index)
        if grid is not None:
            return gated_delta_grid_scan(q, k, v, g, beta, grid, rows, seq_lens, context_lens, exports)
        return gated_delta_scan(q, k, v, g, beta, states, rows, seq_lens, context_lens, CHUNK_SIZE, exports)
