"""The channel mixer: down(act(up(x))), or down(act(gate(x)) * up(x)) when gated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnkeep.models.config import MLPConfig
from turnkeep.models.decoder_step import DecoderStep
from turnkeep.models.mixers.parameters import empty_parameter, empty_parameter_or_none


class MLPMixer(nn.Module):
    """A feed-forward layer; gate and up come from one product, gate rows first."""

    def __init__(self, config: MLPConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.is_gated = config.is_gated
        self.activation = config.activation
        rows = config.intermediate_size * (2 if config.is_gated else 1)
        self.up_proj_weight = empty_parameter(rows, hidden_size, dtype=dtype)
        self.up_proj_bias = empty_parameter_or_none(config.has_bias, rows, dtype=dtype)
        self.down_proj_weight = empty_parameter(hidden_size, config.intermediate_size, dtype=dtype)
        self.down_proj_bias = empty_parameter_or_none(config.has_bias, hidden_size, dtype=dtype)

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; the step is not used."""
        wide = functional.linear(x, self.up_proj_weight, self.up_proj_bias)
        if self.is_gated:
            gate, up = wide.chunk(2, dim=-1)
            wide = self._activate(gate).mul_(up)
        else:
            wide = self._activate(wide)
        return functional.linear(wide, self.down_proj_weight, self.down_proj_bias)

    def _activate(self, x: Tensor) -> Tensor:
        if self.activation == "silu":
            return functional.silu(x)
        if self.activation == "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        return functional.relu(x).square_()
