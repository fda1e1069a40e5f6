"""The gated short convolution: out(C * conv(B * x)), with B, C and x projected from the input.

Owns the weights. Its only state is the window of the convolution's last inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnkeep.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
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
        windows = step.cache.states["conv"][self.index]
        B, C, inputs = functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        convolved = self._convolve(B * inputs, windows, recurrent)
        return functional.linear(C * convolved, self.out_proj_weight, self.out_proj_bias)

    def _convolve(self, inputs: Tensor, windows: Tensor, step: RecurrentStep) -> Tensor:
        cut, pieces = step.num_decodes, []
        if step.num_decodes:
            rows = step.decode_rows
            pieces.append(causal_conv1d_update(inputs[:cut], self.conv_weight, self.conv_bias, windows, rows))
            if step.decode_exports is not None:
                sources, targets = step.decode_exports
                windows.index_copy_(0, targets, windows.index_select(0, sources))
        if step.num_prefills:
            rows, seq_lens, context_lens = step.prefill_rows, step.prefill_seq_lens, step.prefill_context_lens
            weight, bias, exports = self.conv_weight, self.conv_bias, step.prefill_exports
            pieces.append(
                causal_conv1d(inputs[cut:], weight, bias, windows, rows, seq_lens, context_lens, exports=exports)
            )
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
