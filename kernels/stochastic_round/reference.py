"""Definition of stochastic rounding to bfloat16 and float16, with Philox bits (Croci et al., "Stochastic rounding").

Key: a constant. Counter: (element >> 2, position, layer, 0), word element & 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from turnkeep.kernels.sampling.philox import philox4x32
from turnkeep.kernels.sampling.philox_numpy import random_words

KEY = 0x7475726E6B656570  # any constant will do: the noise is independent across elements, layers and positions
MAX_BFLOAT16 = torch.finfo(torch.bfloat16).max
MAX_FLOAT16 = torch.finfo(torch.float16).max
MIN_POWER, SPACING = 2.0**-14, 2.0**-10  # of float16: the least power of two that is normal; within [1, 2)
EXPONENT_BITS = 0x7F800000
BLOCK = 1 << 16  # elements whose bits and steps stay in the processor's cache


def stochastic_round_reference(
    values: torch.Tensor, dtype: torch.dtype, positions: Sequence[int], layer: int, first_element: int = 0
) -> torch.Tensor:
    """See `turnkeep.kernels.stochastic_round.stochastic_round`."""
    rounded = torch.empty(values.shape, dtype=dtype, device=values.device)
    for row, position in enumerate(positions):
        flat, target = values[row].reshape(-1), rounded[row].view(-1)
        for start in range(0, flat.numel(), BLOCK):
            block = flat[start : start + BLOCK]
            bits = _random_bits(block.numel(), position, layer, first_element + start, values.device)
            found = _to_bfloat16(block, bits) if dtype == torch.bfloat16 else _to_float16(block, bits)
            target[start : start + BLOCK] = torch.where(block.isfinite(), found, block)
    return rounded


def _random_bits(count: int, position: int, layer: int, first: int, device: torch.device) -> torch.Tensor:
    """32 random bits for each of the elements from `first` on: int64 [count]."""
    start, end = first // 4, -(-(first + count) // 4)
    if device.type == "cpu":
        key, where = np.array(KEY), np.array(position | layer << 32)
        words = torch.from_numpy(random_words(key, where, np.arange(start, end)))
    else:
        blocks = torch.arange(start, end, dtype=torch.int64, device=device)
        own = torch.zeros_like(blocks)
        key_halves = (own + (KEY & 0xFFFFFFFF), own + (KEY >> 32))
        words = torch.stack(philox4x32((blocks, own + position, own + layer, own), key_halves), dim=-1)
    return words.view(-1)[:count]


def _to_bfloat16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Add 16 random bits below the last one that is kept, and cut. The pattern's order is that of the magnitudes."""
    pattern = values.view(torch.int32) + (bits >> 16).to(torch.int32)
    return (pattern & -0x10000).view(torch.float32).clamp_(-MAX_BFLOAT16, MAX_BFLOAT16)


def _to_float16(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Up to the next multiple of the spacing with the probability of the part above the last one. All steps but the
    draw are exact in float32."""
    magnitude = values.abs()
    power = (values.view(torch.int32) & EXPONENT_BITS).view(torch.float32)  # of the leading bit
    spacing = power.clamp_(min=MIN_POWER).mul_(SPACING)
    scaled = magnitude.div_(spacing)
    below = scaled.floor()
    draw = (bits >> 8).to(torch.float32).mul_(2.0**-24)
    below += draw < scaled.sub_(below)
    return below.mul_(spacing).clamp_(max=MAX_FLOAT16).copysign_(values)
