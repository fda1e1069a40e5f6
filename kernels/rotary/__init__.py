"""Rotary position embedding: frequencies once a model, cosines and sines once a step, rotation in every layer.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

import torch

from turnkeep.kernels.rotary.reference import apply_rotary_reference, rotary_cos_sin, rotary_frequencies

__all__ = ["apply_rotary", "rotary_cos_sin", "rotary_frequencies"]


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first 2 * F channels of every head of x [T, H, D] by the angles behind cos, sin [T, F] (float32).

    Pairs are (i, i + F) as Hugging Face checkpoints store them, or (2i, 2i + 1) when `interleaved`, as GGUF llama
    files do. Channels past 2 * F pass through. Returns a new tensor in the dtype of x. Raises ValueError for sizes
    that do not fit.
    """
    if cos.shape != sin.shape or cos.dim() != 2 or cos.shape[0] != x.shape[0]:
        raise ValueError(f"apply_rotary: cos {tuple(cos.shape)}, sin {tuple(sin.shape)} do not fit {tuple(x.shape)}")
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(f"apply_rotary: {cos.shape[1]} angles need more than the {x.shape[-1]} channels of a head")
    return apply_rotary_reference(x, cos, sin, interleaved)
