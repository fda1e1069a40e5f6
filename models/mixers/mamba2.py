"""The Mamba-2 mixer: projection, causal convolution, state space scan, gate and group norm, projection.

Owns the weights; the state lives in the rows it is given. Prefill, decode and the verification of trees share all but
the operations that walk over time.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnkeep.kernels.causal_conv1d import causal_conv1d, causal_conv1d_tree, causal_conv1d_update
from turnkeep.kernels.forward_batch import CacheTensors
from turnkeep.kernels.grid_cells import GridStates
from turnkeep.kernels.norm import gated_rms_norm
from turnkeep.kernels.replay_history import HistoryFolds, HistorySpans
from turnkeep.kernels.ssd_scan import ssd_grid_scan, ssd_scan, ssd_update
from turnkeep.kernels.ssd_tree import SsdTerms, ssd_fold, ssd_tree
from turnkeep.models.config import Mamba2Config
from turnkeep.models.decoder_step import DecoderStep, RecurrentStep
from turnkeep.models.mixers.parameters import empty_parameter, empty_parameter_or_none


class Mamba2Mixer(nn.Module):
    """out_proj(norm(scan(conv(x)) * silu(gate))), states in place in `ssm` and `conv` of its state index.

    Some families gate after the norm, or have no norm.
    """

    def __init__(self, config: Mamba2Config, hidden_size: int, norm_eps: float, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.index = index
        self.norm_eps = norm_eps
        inner, heads, conv_dim = config.inner_size, config.num_heads, config.conv_dim
        self.group_size = inner // config.num_groups
        self.projected_sizes = [inner, conv_dim, heads]
        self.conv_sizes = [inner, *[config.num_groups * config.state_size] * 2]
        self.clamps_dt = config.dt_limit != (0.0, inf)
        self.in_proj_weight = empty_parameter(sum(self.projected_sizes), hidden_size, dtype=dtype)
        self.in_proj_bias = empty_parameter_or_none(config.has_bias, sum(self.projected_sizes), dtype=dtype)
        # Only the large matrices take the model dtype. The rest is used in float32: converting it in every step
        # costs more than it saves, and A multiplies the state over thousands of tokens.
        self.conv_weight = empty_parameter(conv_dim, config.conv_width, dtype=torch.float32)
        self.conv_bias = empty_parameter_or_none(config.has_conv_bias, conv_dim, dtype=torch.float32)
        self.dt_bias = empty_parameter(heads, dtype=torch.float32)
        self.A = empty_parameter(heads, dtype=torch.float32)
        self.D = empty_parameter(heads, dtype=torch.float32)
        self.norm_weight = empty_parameter_or_none(config.output != "gate", inner, dtype=torch.float32)
        self.out_proj_weight = empty_parameter(hidden_size, inner, dtype=dtype)
        self.out_proj_bias = empty_parameter_or_none(config.has_out_bias, hidden_size, dtype=dtype)

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; reads and writes the state rows of the step."""
        recurrent = step.recurrent
        assert recurrent is not None
        windows, states = step.cache.states["conv"][self.index], step.cache.states["ssm"][self.index]
        projected = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        gate, conv_input, dt = torch.split_with_sizes(projected, self.projected_sizes, dim=-1)
        dt = functional.softplus(dt + self.dt_bias)  # [T, H] float32
        if self.clamps_dt:
            dt = dt.clamp(*self.config.dt_limit)
        cut, end, pieces = recurrent.num_decodes, recurrent.first_prefill, []
        if cut:
            pieces.append(self._update(conv_input[:cut], dt[:cut], windows, states, recurrent))
        if end > cut:
            pieces.append(self._verify(conv_input[cut:end], dt[cut:end], step))
        if recurrent.num_prefills:
            pieces.append(self._scan(conv_input[end:], dt[end:], step.cache, recurrent))
        y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return functional.linear(self._gated(y, gate), self.out_proj_weight, self.out_proj_bias)

    def fold(self, folds: HistoryFolds, cache: CacheTensors) -> None:
        """Move states on by accepted tokens; their windows are not looked at."""
        terms = self._history(folds.spans, cache)
        ssd_fold(terms, self.A, cache.states["ssm"][self.index], folds.sources, folds.targets)

    def _history(self, spans: HistorySpans, cache: CacheTensors) -> SsdTerms:
        x, dt, B = (cache.histories[name][self.index] for name in ("x", "dt", "B"))
        return SsdTerms(spans.terms(x), spans.terms(dt), spans.terms(B))

    def _verify(self, conv_input: Tensor, dt: Tensor, step: DecoderStep) -> Tensor:
        trees, recurrent, cache = step.batch.trees, step.recurrent, step.cache
        assert trees is not None
        assert trees.history is not None
        assert recurrent is not None
        raw = cache.histories["conv"][self.index]
        windows = trees.history.windows(raw)
        convolved = causal_conv1d_tree(conv_input, self.conv_weight, self.conv_bias, windows, trees.trees, "silu")
        x, B, C = self._split_heads(convolved)
        states, rows = cache.states["ssm"][self.index], recurrent.tree_rows
        history = self._history(trees.history, cache)
        y = ssd_tree(x, dt, self.A, B, C, self.D, states, rows, history, trees.trees)
        for name, own in (("conv", conv_input), ("x", x), ("dt", dt), ("B", B)):
            trees.terms.keep(cache.histories[name][self.index], own)
        return y.reshape(conv_input.shape[0], -1)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        weight = self.norm_weight
        if weight is None:
            return y * functional.silu(gate)
        if self.config.output == "gate_then_norm":
            return gated_rms_norm(y, gate, weight, self.norm_eps, self.group_size)
        return gated_rms_norm(y, None, weight, self.norm_eps, self.group_size) * functional.silu(gate)

    def _split_heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, length = self.config, convolved.shape[0]
        x, B, C = torch.split_with_sizes(convolved, self.conv_sizes, dim=-1)
        return (
            x.view(length, config.num_heads, config.head_dim),
            B.view(length, config.num_groups, config.state_size),
            C.view(length, config.num_groups, config.state_size),
        )

    def _update(self, conv_input: Tensor, dt: Tensor, windows: Tensor, states: Tensor, step: RecurrentStep) -> Tensor:
        rows = step.decode_rows
        convolved = causal_conv1d_update(conv_input, self.conv_weight, self.conv_bias, windows, rows, "silu")
        x, B, C = self._split_heads(convolved)
        y = ssd_update(x, dt, self.A, B, C, self.D, states, rows)
        if step.decode_exports is not None:
            sources, targets = step.decode_exports
            windows.index_copy_(0, targets, windows.index_select(0, sources))
            states.index_copy_(0, targets, states.index_select(0, sources))
        return y.reshape(conv_input.shape[0], -1)

    def _scan(self, conv_input: Tensor, dt: Tensor, cache: CacheTensors, step: RecurrentStep) -> Tensor:
        windows, states = cache.states["conv"][self.index], cache.states["ssm"][self.index]
        rows, seq_lens, context_lens = step.prefill_rows, step.prefill_seq_lens, step.prefill_context_lens
        exports = step.prefill_exports
        convolved = causal_conv1d(
            conv_input, self.conv_weight, self.conv_bias, windows, rows, seq_lens, context_lens, "silu", exports
        )
        x, B, C = self._split_heads(convolved)
        grid, chunk_size = GridStates.of(cache.states, "ssm", self.index), self.config.chunk_size
        if grid is not None:
            y = ssd_grid_scan(x, dt, self.A, B, C, self.D, grid, rows, seq_lens, context_lens, exports)
            return y.reshape(conv_input.shape[0], -1)
        y = ssd_scan(x, dt, self.A, B, C, self.D, states, rows, seq_lens, context_lens, chunk_size, exports)
        return y.reshape(conv_input.shape[0], -1)
