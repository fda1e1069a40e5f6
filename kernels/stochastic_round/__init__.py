"""Stochastic rounding of states to 16 bits: the mean over many draws is the value itself.

What is drawn depends on layer, position and element alone, never on a request, a slot, a row or a step, so that the
same state at the same position is rounded alike for whoever computes it, and snapshots can be shared.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.stochastic_round.reference import stochastic_round_reference

__all__ = ["stochastic_round"]


def stochastic_round(
    values: torch.Tensor, dtype: torch.dtype, positions: Sequence[int], layer: int, first_element: int = 0
) -> torch.Tensor:
    """Round values [R, ...] float32 to `dtype` (bfloat16 or float16), up with the probability that keeps the mean.

    positions [R]: tokens contained in each of the R states, below 2^32. layer: number of the recurrent layer.
    first_element: number of a state's first value here in the whole state of the layer, for states that are cut.

    Values that `dtype` has stay what they are. float16 is rounded on its own spacing, also below 2^-14 where that no
    longer shrinks. Finite values beyond the range become the largest finite one; infinities and NaN stay. Raises
    ValueError for other types or shapes.
    """
    if values.dtype != torch.float32 or dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"stochastic_round: {values.dtype} to {dtype}; it rounds float32 to bfloat16 or float16")
    if values.shape[0] != len(positions):
        raise ValueError(f"stochastic_round: {len(positions)} positions for values {tuple(values.shape)}")
    if min(positions, default=0) < 0 or max(positions, default=0) >= 1 << 32 or layer < 0 or first_element % 4:
        raise ValueError(f"stochastic_round: positions {list(positions)}, layer {layer}, element {first_element}")
    return stochastic_round_reference(values, dtype, positions, layer, first_element)
