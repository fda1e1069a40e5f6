"""Recurrent states in 16 bits: near those in float32, and the same however a prompt is cut, resumed or packed."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.rounding_grid import GRID
from turnkeep.models.config import ModelConfig
from turnkeep.models.tiny import TinyKind, tiny_config
from turnkeep.models.weights import random_model

KINDS: tuple[TinyKind, ...] = ("hybrid", "short_conv", "parallel", "gated_delta")
ON_GRID: tuple[TinyKind, ...] = ("attention_free", "hybrid", "parallel", "gated_delta")
DTYPES = ("bfloat16", "float16")
LENGTH = 2 * GRID + 27
TOLERANCE = 1e-4  # rounding itself moves logits by five to a thousand times as much
MAX_OTHER_ELEMENTS = 0.05  # with rounding at other positions it is 0.7


def prompt(kind: str) -> list[int]:
    return random.Random(kind).choices(range(97), k=LENGTH)


def model_of(kind: TinyKind, dtype: str = "float32") -> Any:
    return random_model(ModelConfig.from_dict(tiny_config(kind)), 1, dtype=dtype)


def in_pieces(driver: Any, sequence: int, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    pieces = [tokens[start:end] for start, end in pairwise([0, *cuts, len(tokens)])]
    return torch.cat([driver.step([(sequence, piece)])[0] for piece in pieces])


def share_of_other_elements(driver: Any, first: int, second: int) -> float:
    """How many elements of the states in two rows differ. Products of another size give other last bits, and each of
    these changes the rounding of its element with a small probability; rounding elsewhere changes most elements."""
    pools = [pool for name in ("ssm", "delta") for pool in driver.cache.states.get(name, ())]
    return max(float((pool[first] != pool[second]).float().mean()) for pool in pools)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_states_in_16_bits_stay_near_those_in_float32(kind: TinyKind, dtype: str, make_driver: Any) -> None:
    model, tokens = model_of(kind), prompt(kind)
    rounded = make_driver(model, state_dtype=dtype)
    states = [pool.dtype for name in ("ssm", "delta") for pool in rounded.cache.states.get(name, ())]
    assert set(states) <= {getattr(torch, dtype)}
    expected = make_driver(model).step([(0, tokens)])[0]
    ours = rounded.step([(0, tokens)])[0]
    torch.testing.assert_close(ours[:GRID], expected[:GRID], atol=1e-5, rtol=0)  # nothing was rounded yet
    difference = (ours - expected).abs().max()
    assert (difference > 1e-6) == (kind in ON_GRID)  # windows are kept exactly
    assert difference < 0.05 * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ON_GRID)
def test_however_a_prompt_is_cut_its_states_are_rounded_alike(kind: TinyKind, dtype: str, make_driver: Any) -> None:
    """Whole, in chunks that end before, on and behind grid lines, and token by token."""
    model, tokens = model_of(kind), prompt(kind)
    driver = make_driver(model, state_dtype=dtype)
    expected = in_pieces(driver, 0, tokens, [])
    cuts = ([GRID], [1, 7, GRID - 1, GRID + 1, 2 * GRID], [40, 41, 42], [*range(1, LENGTH)])
    for sequence, places in enumerate(cuts, 1):
        logits = in_pieces(driver, sequence, tokens, places)
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        assert share_of_other_elements(driver, 1, sequence + 1) < MAX_OTHER_ELEMENTS


@pytest.mark.parametrize("kind", ON_GRID)
def test_a_row_resumed_at_any_position_goes_on_as_if_nothing_had_been(kind: TinyKind, make_driver: Any) -> None:
    model, tokens = model_of(kind), prompt(kind)
    driver = make_driver(model, state_dtype="float16")
    spare, positions = driver.num_sequences + 1, range(1, 70)
    exports = [StateExport(0, position, spare + position) for position in positions]
    (expected,) = driver.step([(0, tokens)], exports)
    for position in positions:
        driver.resume(0, 1, position, spare + position)
        (logits,) = driver.step([(1, tokens[position:])])
        torch.testing.assert_close(logits, expected[position:], atol=TOLERANCE, rtol=0)
        assert share_of_other_elements(driver, 1, 2) < MAX_OTHER_ELEMENTS


@pytest.mark.parametrize("kind", ON_GRID)
def test_packed_requests_get_what_each_gets_alone(kind: TinyKind, make_driver: Any) -> None:
    model, tokens = model_of(kind), prompt(kind)
    driver = make_driver(model, state_dtype="float16")
    alone = in_pieces(driver, 0, tokens, [])
    parts: list[list[torch.Tensor]] = [[], [], []]
    for step in ([(1, 40), (2, 9), (3, 1)], [(2, 1), (1, 1), (3, 30)], [(3, 2), (2, 60)], [(1, 1), (3, 1), (2, 1)]):
        work = [(s, tokens[driver.lengths[s] : driver.lengths[s] + count]) for s, count in step]
        for (sequence, _), logits in zip(work, driver.step(work), strict=True):
            parts[sequence - 1].append(logits)
    for pieces in parts:
        ours = torch.cat(pieces)
        torch.testing.assert_close(ours, alone[: ours.shape[0]], atol=TOLERANCE, rtol=0)


def test_weights_in_bfloat16_keep_the_tokens_since_the_line_exactly(make_driver: Any) -> None:
    model, tokens = model_of("attention_free", "bfloat16"), prompt("attention_free")
    driver = make_driver(model, state_dtype="float16")
    assert driver.cache.states["ssm_x"][0].dtype == driver.cache.states["conv"][0].dtype == torch.bfloat16
    whole = in_pieces(driver, 0, tokens, [])
    cut = in_pieces(driver, 1, tokens, [13, GRID + 3])
    torch.testing.assert_close(cut, whole, atol=0.05 * float(whole.abs().max()), rtol=0)
    assert torch.isfinite(cut).all()


def test_a_row_in_16_bits_is_smaller_where_states_are_large() -> None:
    values = tiny_config("hybrid") | {"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128}
    config = ModelConfig.from_dict(values)
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}

    def num_bytes(state_dtype: str) -> int:
        parts = config.state_parts(state_dtype, "bfloat16")
        return sum(part.num_layers * sizes[part.dtype] * torch.Size(part.shape).numel() for part in parts)

    assert num_bytes("float16") == num_bytes("bfloat16") < 0.7 * num_bytes("float32")


def test_draft_trees_are_refused_on_states_in_16_bits(make_driver: Any) -> None:
    driver = make_driver(model_of("hybrid"), state_dtype="float16")
    driver.step([(0, [5, 6, 7])])
    batch = driver.batch([(0, [1, 2])], ())
    trees = SimpleNamespace(trees=SimpleNamespace(num_trees=1))
    fields = {name: getattr(batch, name) for name in batch.__slots__} | {"trees": trees}
    with pytest.raises(ValueError, match="16 bits"):
        driver.model(type(batch)(**fields), driver.cache)
