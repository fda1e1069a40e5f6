"""Every model family against transformers' full forward in float32, however a prompt is cut, packed and resumed."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import FAMILIES, reference_model

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.models.catalog import find_model
from turnkeep.models.config import ModelConfig
from turnkeep.models.registry import MODEL_TYPES
from turnkeep.models.weights import load_model, random_model, random_tensors

TOLERANCE = 1e-4
LENGTH = 70
CASES = [(family, index) for family, configs in FAMILIES.items() for index in range(len(configs))]

Case = tuple[Any, list[int], torch.Tensor]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> Case:
    """A random model, a prompt of 70 tokens, and the reference's logits of it."""
    family, index = request.param
    values, seed = FAMILIES[family][index], 3 + index
    config = ModelConfig.from_dict(values)
    tokens = random.Random(f"{family} {index}").choices(range(config.vocab_size), k=LENGTH)
    reference = reference_model(values, random_tensors(config, seed))
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    return random_model(config, seed), tokens, expected


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_model_type_is_compared_in_three_or_more_configurations(model_type: str) -> None:
    # The text model of a checkpoint with other modalities is the one whose name ends so.
    configs = FAMILIES[model_type if model_type in FAMILIES else f"{model_type}_text"]
    assert len(configs) >= 3
    models = [ModelConfig.from_dict(values) for values in configs]
    assert {model.tie_word_embeddings for model in models} == {True, False}
    sizes = [(m.attention.num_heads, m.attention.num_kv_heads) for m in models if m.attention]
    assert not sizes or any(heads > kv_heads for heads, kv_heads in sizes)


def test_the_reference_tells_prompts_apart(case: Case) -> None:
    _, _, expected = case
    assert expected.std(dim=0).mean() > 100 * TOLERANCE


def test_whole_prefill_equals_the_reference(case: Case, make_driver: Any) -> None:
    model, tokens, expected = case
    assert_close(make_driver(model).step([(0, tokens)])[0], expected)


def test_token_by_token_decode_equals_the_reference(case: Case, make_driver: Any) -> None:
    model, tokens, expected = case
    driver = make_driver(model)
    assert_close(torch.cat([driver.step([(0, [token])])[0] for token in tokens]), expected)


def test_prefill_resumed_at_every_position_equals_the_reference(case: Case, make_driver: Any) -> None:
    model, tokens, expected = case
    driver = make_driver(model)
    spare = driver.num_sequences + 1
    positions = range(1, LENGTH)
    exports = [StateExport(0, position, spare + position) for position in positions]
    driver.step([(0, tokens)], exports if driver.cache.states else [])
    for position in positions:
        driver.resume(0, 1, position, spare + position)
        assert_close(driver.step([(1, tokens[position:])])[0], expected[position:])


def test_packed_with_others_equals_the_reference(case: Case, make_driver: Any) -> None:
    model, tokens, expected = case
    driver = make_driver(model)
    parts: list[list[torch.Tensor]] = [[], [], []]

    # The same prompt in three sequences at different places: each must get the reference's logits of its tokens.
    def step(*work: tuple[int, int]) -> None:
        items = [(s, tokens[driver.lengths[s] : driver.lengths[s] + count]) for s, count in work]
        for (sequence, _), logits in zip(work, driver.step(items), strict=True):
            parts[sequence].append(logits)

    step((0, 20), (1, 1), (2, 33))
    step((0, 1), (2, 1), (1, 17))
    step((1, 1), (0, 9), (2, 36))
    while any(length < 40 for length in driver.lengths[:2]):
        step(*((s, 1) for s in (1, 0) if driver.lengths[s] < 40))
    for sequence, pieces in enumerate(parts):
        assert_close(torch.cat(pieces), expected[: driver.lengths[sequence]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_that_transformers_saved_loads_and_equals_the_reference(
    family: str, tmp_path: Path, make_driver: Any
) -> None:
    values = FAMILIES[family][0]
    config = ModelConfig.from_dict(values)
    reference = reference_model(values, random_tensors(config, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    tokens = random.Random(family).choices(range(config.vocab_size), k=30)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    # The library spells config fields and tensor names in its own way, and puts experts apart again.
    model = load_model(find_model(str(tmp_path)), dtype="float32")
    assert_close(make_driver(model).step([(0, tokens)])[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_stays_near_float32_in_prefill_and_decode(family: str, make_driver: Any) -> None:
    config = ModelConfig.from_dict(FAMILIES[family][-1])
    tokens = random.Random(family).choices(range(config.vocab_size), k=40)
    expected = make_driver(random_model(config, 8)).step([(0, tokens)])[0]
    driver = make_driver(random_model(config, 8, dtype="bfloat16"))
    ours = torch.cat([driver.step([(0, tokens[:30])])[0], *(driver.step([(0, [t])])[0] for t in tokens[30:])])
    assert ours.dtype == torch.float32
    # A token whose experts are chosen otherwise, by a hair, may be far away: the whole must not be.
    both = torch.stack((ours.flatten(), expected.flatten()))
    assert torch.corrcoef(both)[0, 1] > 0.97
