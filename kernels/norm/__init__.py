"""RMS norms of the decoder: plain, and gated by groups (the Mamba-2 output norm).

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

import torch

from turnkeep.kernels.norm.reference import gated_rms_norm_reference, rms_norm_reference

__all__ = ["gated_rms_norm", "rms_norm"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32, returned in the dtype of x.

    x [..., d], weight [d]. Raises ValueError when the sizes differ.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    return rms_norm_reference(x, weight, eps)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor | None, weight: torch.Tensor, eps: float, group_size: int
) -> torch.Tensor:
    """RMS norm of x * silu(gate), each group of `group_size` channels on its own, times weight.

    x, gate [..., d], weight [d]; d is a multiple of group_size. The gate comes before the norm, as in Mamba-2 and
    Nemotron-H. float32 inside, returned in the dtype of x. Raises ValueError for sizes that do not fit.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"gated_rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    if gate is not None and gate.shape != x.shape:
        raise ValueError(f"gated_rms_norm: gate {tuple(gate.shape)} differs from x {tuple(x.shape)}")
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"gated_rms_norm: {x.shape[-1]} channels do not split into groups of {group_size}")
    return gated_rms_norm_reference(x, gate, weight, eps, group_size)
