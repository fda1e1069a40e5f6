"""Definition of the rotary embedding, in plain PyTorch for any device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def rotary_frequencies(
    rotary_dim: int, theta: float, scaling: Mapping[str, Any] | None = None, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Angle per position of each channel pair: float32 [rotary_dim / 2].

    scaling is a checkpoint's `rope_scaling` entry: None, or rope_type "default", "linear" or "llama3". Raises
    ValueError for an odd rotary_dim or another type.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be even and positive, not {rotary_dim}")
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64, device=device).to(torch.float32) / rotary_dim
    frequencies = 1.0 / theta**exponents
    kind = scaling.get("rope_type", scaling.get("type", "default")) if scaling else "default"
    if scaling is None or kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind == "llama3":
        return _llama3_frequencies(frequencies, scaling)
    raise ValueError(f"rope_type {kind!r} is not supported (supported: default, linear, llama3)")


def _llama3_frequencies(frequencies: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Slow channels are divided by the factor, fast ones kept, those between blended by their wavelength."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    turns = original / (2 * math.pi / frequencies)  # full turns within the original context
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / factor + kept * frequencies


def rotary_cos_sin(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [T, F] each, for positions [T] and frequencies [F]."""
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def apply_rotary_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """See `turnkeep.kernels.rotary.apply_rotary`."""
    num_angles = cos.shape[1]
    cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, F]
    rotated = x[..., : 2 * num_angles].to(torch.float32)
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        result = pairs.flatten(-2)
    else:
        first, second = rotated[..., :num_angles], rotated[..., num_angles:]
        result = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    if 2 * num_angles == x.shape[-1]:
        return result.to(x.dtype)
    return torch.cat((result.to(x.dtype), x[..., 2 * num_angles :]), dim=-1)
