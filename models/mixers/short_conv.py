"""The gated short convolution: out(C * conv(B * x)), with B, C and x projected from the input.

Owns the weights. Its only state is the window of the convolution's last inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnkeep.kernels.causal_conv1d import causal_conv1d, causal_conv1d_tree, causal_conv1d_update
from turnkeep.models.config import ShortConvConfig
from turnkeep.models.decoder_step import DecoderStep, RecurrentStep
from turnkeep.models.mixers.parameters import empty_parameter, empty_parameter_or_none


class ShortConvMixer(nn.Module):
    """out_proj(C * conv(B * x)), windows in place in `conv` of its state index."""

    def __init__(self, config: ShortConvConfig, hidden_size: int, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.index = index
        self.in_proj_weight = empty_parameter(3 * hidden_size, hidden_size, dtype=dtype)
        self.in_proj_bias = empty_parameter_or_none(config.has_bias, 3 * hidden_size, dtype=dtype)
        self.conv_weight = empty_parameter(hidden_size, config.width, dtype=torch.float32)
        self.conv_bias = empty_parameter_or_none(config.has_bias, hidden_size, dtype=torch.float32)
        self.out_proj_weight = empty_parameter(hidden_size, hidden_size, dtype=dtype)
        self.out_proj_bias = empty_parameter_or_none(config.has_bias, hidden_size, dtype=dtype)

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; reads and writes the windows of the step's rows."""
        recurrent = step.recurrent
        assert recurrent is not None
        B, C, inputs = functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        convolved = self._convolve(B * inputs, step, recurrent)
        return functional.linear(C * convolved, self.out_proj_weight, self.out_proj_bias)

    def _convolve(self, inputs: Tensor, step: DecoderStep, recurrent: RecurrentStep) -> Tensor:
        windows = step.cache.states["conv"][self.index]
        cut, end, pieces = recurrent.num_decodes, recurrent.first_prefill, []
        if cut:
            rows = recurrent.decode_rows
            pieces.append(causal_conv1d_update(inputs[:cut], self.conv_weight, self.conv_bias, windows, rows))
            if recurrent.decode_exports is not None:
                sources, targets = recurrent.decode_exports
                windows.index_copy_(0, targets, windows.index_select(0, sources))
        if end > cut:
            trees = step.batch.trees
            assert trees is not None
            assert trees.history is not None
            raw = step.cache.histories["conv"][self.index]
            before = trees.history.windows(raw)
            pieces.append(causal_conv1d_tree(inputs[cut:end], self.conv_weight, self.conv_bias, before, trees.trees))
            trees.terms.keep(raw, inputs[cut:end])
        if recurrent.num_prefills:
            lengths = (recurrent.prefill_seq_lens, recurrent.prefill_context_lens)
            weight, bias, exports = self.conv_weight, self.conv_bias, recurrent.prefill_exports
            pieces.append(
                causal_conv1d(inputs[end:], weight, bias, windows, recurrent.prefill_rows, *lengths, exports=exports)
            )
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
