"""Recurrent states in bfloat16: half the bytes, the same answers within its rounding, wherever a prompt is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.models.config import ModelConfig
from turnkeep.models.tiny import TinyKind, tiny_config
from turnkeep.models.weights import random_model

KINDS: tuple[TinyKind, ...] = ("hybrid", "short_conv", "parallel", "gated_delta")


@pytest.mark.parametrize("kind", KINDS)
def test_states_in_bfloat16_stay_near_those_in_float32(kind: TinyKind, make_driver: Any) -> None:
    model = random_model(ModelConfig.from_dict(tiny_config(kind)), 1)
    tokens = random.Random(kind).choices(range(97), k=48)
    exact, rounded = make_driver(model), make_driver(model, state_dtype="bfloat16")
    assert {pool.dtype for pools in rounded.cache.states.values() for pool in pools} == {torch.bfloat16}

    # A chunk, single tokens, and another chunk from the rounded state.
    def run(driver: Any) -> torch.Tensor:
        pieces = [tokens[:20], *([token] for token in tokens[20:30]), tokens[30:]]
        return torch.cat([driver.step([(0, piece)])[0] for piece in pieces])

    expected, ours = run(exact), run(rounded)
    assert torch.equal(ours[:20], expected[:20])  # nothing was read back yet
    assert 0 < (ours - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_state_in_bfloat16_is_the_live_one(kind: TinyKind, make_driver: Any) -> None:
    model = random_model(ModelConfig.from_dict(tiny_config(kind)), 1)
    tokens = random.Random(kind).choices(range(97), k=40)
    driver = make_driver(model, state_dtype="bfloat16")
    spare = driver.num_sequences + 1
    driver.step([(0, tokens[:30])])
    driver.step([(0, [tokens[30]])], [StateExport(0, 1, spare)])
    driver.resume(0, 1, 31, spare)
    assert torch.equal(driver.step([(1, tokens[31:])])[0], driver.step([(0, tokens[31:])])[0])
