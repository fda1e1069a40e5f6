"""Rounding to 16 bits: the mean is kept everywhere, neighbours only, and the noise is told by the place alone."""

from __future__ import annotations

import os

import pytest
import torch

from turnkeep.kernels.sampling import philox4x32
from turnkeep.kernels.stochastic_round import stochastic_round
from turnkeep.kernels.stochastic_round.reference import KEY

NUM_DRAWS = int(os.environ.get("TURNKEEP_ROUNDING_DRAWS", "100000"))
DTYPES = (torch.bfloat16, torch.float16)
# Normal values of both types, and what decayed states come to: float16 keeps fewer bits below 2^-14 = 6.1e-5.
VALUES = (1.0001, -0.3, 1e-3, 123.456, 6.2e-5, 6.0e-5, 3.3e-5, -1.7e-6, 2e-8, 1e-9, 65503.0)


def grid(dtype: torch.dtype, value: float) -> tuple[float, float]:
    """The neighbours of a value in a type, in float64 arithmetic that shares nothing with the operation."""
    bits, smallest = (8, -126) if dtype == torch.bfloat16 else (11, -14)
    exponent = max(torch.tensor(abs(value), dtype=torch.float64).log2().floor().item(), smallest)
    spacing = 2.0 ** (exponent - bits + 1)
    below = (torch.tensor(value, dtype=torch.float64) / spacing).floor().item() * spacing
    return below, below + spacing


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", VALUES)
def test_the_mean_is_the_value_and_only_its_neighbours_are_drawn(dtype: torch.dtype, value: float) -> None:
    exact = torch.tensor(value, dtype=torch.float32)
    rounded = stochastic_round(exact.expand(1, NUM_DRAWS).contiguous(), dtype, [64], 3)
    assert rounded.dtype == dtype
    below, above = grid(dtype, float(exact))
    assert set(rounded.double().unique().tolist()) <= {below, above}
    up = (float(exact) - below) / (above - below)
    deviation = (up * (1 - up) / NUM_DRAWS) ** 0.5
    share = (rounded.double() == above).double().mean().item()
    assert abs(share - up) <= 4.5 * deviation + 2.0**-16 / 8  # the last term: draws have 16 bits at least


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_type_has_stays_and_what_it_has_not_is_bounded(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    has = torch.tensor([0.0, -0.0, 1.0, -2.5, info.max, info.min, info.tiny, info.smallest_normal / 4, float("inf")])
    kept = stochastic_round(has[None].repeat(1, 50), dtype, [1], 0).float()
    assert torch.equal(kept, has.to(dtype).float()[None].repeat(1, 50))
    assert torch.equal(kept.signbit(), has[None].repeat(1, 50).signbit())
    beyond = torch.tensor([[3.4e38, -3.4e38, float("nan"), float("-inf")]])
    largest, smallest, no_number, infinite = stochastic_round(beyond, dtype, [1], 0)[0].tolist()
    assert (largest, smallest, infinite) == (info.max, info.min, float("-inf"))
    assert no_number != no_number
    assert float(stochastic_round(torch.tensor([[65519.0]]), torch.float16, [1], 0)) == 65504.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_noise_is_a_function_of_layer_position_and_element(dtype: torch.dtype) -> None:
    values = torch.rand(1, 6, 5, 8)
    first = stochastic_round(values, dtype, [32], 1)
    both = stochastic_round(torch.cat((torch.rand(1, 6, 5, 8), values)), dtype, [96, 32], 1)
    assert torch.equal(both[1], first[0])  # not of the row, nor of the batch
    part = stochastic_round(values[:, 2:], dtype, [32], 1, first_element=2 * 5 * 8)
    assert torch.equal(part, first[:, 2:])  # heads keep their own noise where a state is cut
    for other in (stochastic_round(values, dtype, [64], 1), stochastic_round(values, dtype, [32], 2)):
        assert 0.2 < (other != first).double().mean() < 0.8


def test_the_bits_are_those_of_philox_at_the_stated_counter() -> None:
    value = torch.tensor(1.0 + 2.0**-9 + 2.0**-12)  # an eighth of a spacing of bfloat16, and a bit more
    rounded = stochastic_round(value.expand(1, 64).contiguous(), torch.bfloat16, [7], 5)[0]
    zero = torch.zeros(16, dtype=torch.int64)
    key = (zero + (KEY & 0xFFFFFFFF), zero + (KEY >> 32))
    words = torch.stack(philox4x32((torch.arange(16), zero + 7, zero + 5, zero), key), dim=-1).flatten()
    low = int(value.view(torch.int32)) & 0xFFFF
    assert torch.equal(rounded > 1.0, (words >> 16) + low >= 1 << 16)


def test_what_does_not_fit_is_refused() -> None:
    for values, dtype, positions, layer, first in (
        (torch.zeros(1, 4).double(), torch.float16, [1], 0, 0),
        (torch.zeros(1, 4), torch.float32, [1], 0, 0),
        (torch.zeros(2, 4), torch.float16, [1], 0, 0),
        (torch.zeros(1, 4), torch.float16, [1 << 32], 0, 0),
        (torch.zeros(1, 4), torch.float16, [1], -1, 0),
        (torch.zeros(1, 4), torch.float16, [1], 0, 2),
    ):
        with pytest.raises(ValueError, match="stochastic_round"):
            stochastic_round(values, dtype, positions, layer, first)
