"""Definition of the RMS norms, in plain PyTorch for any device."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `turnkeep.kernels.norm.rms_norm`."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def gated_rms_norm_reference(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float, group_size: int
) -> torch.Tensor:
    """See `turnkeep.kernels.norm.gated_rms_norm`."""
    wide = x.to(torch.float32)
    if gate is not None:
        wide = wide * functional.silu(gate.to(torch.float32))
    groups = wide.reshape(*x.shape[:-1], -1, group_size)  # [..., d / group_size, group_size]
    scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    return ((groups * scale).view(x.shape) * weight).to(x.dtype)
