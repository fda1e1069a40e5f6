"""Parameters of mixers: uninitialised tensors without gradients, to be filled by the loader."""

from __future__ import annotations

import torch
from torch import nn


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter for inference."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def empty_parameter_or_none(is_present: bool, *shape: int, dtype: torch.dtype) -> nn.Parameter | None:
    """An optional parameter (a bias)."""
    return empty_parameter(*shape, dtype=dtype) if is_present else None
