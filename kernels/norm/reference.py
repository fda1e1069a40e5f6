"""Definition of the RMS norms, in plain PyTorch for any device.

Lengths come from `vector_norm`, and factors are applied in place: no intermediate result of the size of x is written.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `turnkeep.kernels.norm.rms_norm`."""
    wide = x.to(torch.float32)
    return (wide * _inverse_rms(wide, eps)).mul_(weight).to(x.dtype)


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float, group_size: int
) -> torch.Tensor:
    """See `turnkeep.kernels.norm.gated_rms_norm`."""
    wide = x.to(torch.float32)
    if gate is not None:
        wide = functional.silu(gate.to(torch.float32)).mul_(wide)
    groups = wide.reshape(*x.shape[:-1], -1, group_size)  # [..., d / group_size, group_size]
    return (groups * _inverse_rms(groups, eps)).view(x.shape).mul_(weight).to(x.dtype)


def _inverse_rms(wide: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, kept as one."""
    lengths: torch.Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return lengths.square_().mul_(1.0 / wide.shape[-1]).add_(eps).rsqrt_()
