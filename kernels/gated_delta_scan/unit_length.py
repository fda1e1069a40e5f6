"""The normalisation of keys and queries that belongs to the gated delta rule."""

from __future__ import annotations

import torch

# Added to the sum of squares, inside the root: part of the definition, not a guard.
EPS = 1e-6


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum of x^2 + 1e-6) over the last dimension, in float32. Zeros stay zeros."""
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)
