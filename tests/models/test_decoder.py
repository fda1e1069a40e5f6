"""The decoder against transformers in float32: every way to cut, pack and resume a prompt gives the same logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import expm1, log
from typing import Any

import pytest
import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.models.checkpoint_files import TensorsInMemory
from turnkeep.models.config import ModelConfig
from turnkeep.models.tiny import tiny_config
from turnkeep.models.weights import fill_decoder, random_model, random_tensors

TOLERANCE = 1e-4
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("hybrid", {}),
    "hybrid-one-group-tied": (
        "hybrid",
        {"n_groups": 1, "tie_word_embeddings": True, "hybrid_override_pattern": "*M-M*", "residual_in_fp32": True},
    ),
    "hybrid-biases": (
        "hybrid",
        {
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "num_key_value_heads": 6,
            "n_groups": 3,
            "chunk_size": 7,
        },
    ),
    "hybrid-bounded-step": ("hybrid", {"time_step_limit": [0.13, None], "num_key_value_heads": 1}),
    "attention-free": ("attention_free", {}),
    "llama-tied": ("attention_only", {}),
    "llama-biases-untied": (
        "attention_only",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "head_dim": 10},
    ),
    "llama-scaled-rope": ("attention_only", {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "llama-many-kv-heads": ("attention_only", {"num_key_value_heads": 6, "vocab_size": 31, "num_hidden_layers": 3}),
}


def prompt(seed: int, length: int, vocab_size: int = 97) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)


@pytest.fixture(params=CASES)
def pair(request: pytest.FixtureRequest, make_pair: Callable[..., Any]) -> Any:
    kind, changes = CASES[request.param]
    return make_pair(kind, len(request.param), **changes)


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, reference, atol=TOLERANCE, rtol=0)


def test_whole_prefill_equals_the_reference(pair: Any, make_driver: Any, reference_logits: Any) -> None:
    model, reference = pair
    tokens = prompt(1, 70, model.config.vocab_size)
    (logits,) = make_driver(model).step([(0, tokens)])
    assert_close(logits, reference_logits(reference, tokens))


def test_token_by_token_decode_equals_the_reference(pair: Any, make_driver: Any, reference_logits: Any) -> None:
    model, reference = pair
    tokens = prompt(2, 40, model.config.vocab_size)
    driver = make_driver(model)
    logits = [driver.step([(0, [token])])[0] for token in tokens]
    assert_close(torch.cat(logits), reference_logits(reference, tokens))


@pytest.mark.parametrize("chunk", [3, 13, 31])
def test_chunked_prefill_equals_the_reference(pair: Any, make_driver: Any, reference_logits: Any, chunk: int) -> None:
    model, reference = pair
    tokens = prompt(3, 70, model.config.vocab_size)
    driver = make_driver(model)
    logits = [driver.step([(0, tokens[start : start + chunk])])[0] for start in range(0, 70, chunk)]
    assert_close(torch.cat(logits), reference_logits(reference, tokens))


def test_prefill_resumed_at_every_position_equals_the_reference(
    pair: Any, make_driver: Any, reference_logits: Any
) -> None:
    model, reference = pair
    tokens = prompt(4, 70, model.config.vocab_size)
    expected = reference_logits(reference, tokens)
    driver = make_driver(model)
    spare = driver.num_sequences + 1
    positions = range(1, 70)
    exports = [StateExport(0, position, spare + position) for position in positions]
    driver.step([(0, tokens)], exports if driver.cache.states else [])
    for position in positions:
        driver.resume(0, 1, position, spare + position)
        (logits,) = driver.step([(1, tokens[position:])])
        assert_close(logits, expected[position:])


def test_packed_steps_of_decodes_and_prefills_equal_the_reference(
    pair: Any, make_driver: Any, reference_logits: Any
) -> None:
    model, reference = pair
    vocab_size = model.config.vocab_size
    prompts = [prompt(10 + index, 24 + 9 * index, vocab_size) for index in range(5)]
    driver = make_driver(model)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]

    def step(*work: tuple[int, int]) -> None:
        items = [(s, prompts[s][driver.lengths[s] : driver.lengths[s] + count]) for s, count in work]
        for (sequence, _), logits in zip(work, driver.step(items), strict=True):
            parts[sequence].append(logits)

    step((0, 20), (1, 1), (2, 30))
    step((0, 1), (1, 1), (2, 5), (3, 17), (4, 1))
    step((4, 1), (0, 1), (1, 11), (2, 1), (3, 9))
    step((2, 1), (1, 1), (0, 1), (4, 1), (3, 1))
    while any(driver.lengths[s] < len(prompts[s]) for s in range(5)):
        step(*((s, 1) for s in (3, 1, 4, 0, 2) if driver.lengths[s] < len(prompts[s])))
    for tokens, pieces in zip(prompts, parts, strict=True):
        assert_close(torch.cat(pieces), reference_logits(reference, tokens))


@pytest.mark.parametrize("kind", ["hybrid", "attention_free"])
def test_a_decode_step_exports_the_state_after_its_token(kind: Any, make_driver: Any) -> None:
    model = random_model(ModelConfig.from_dict(tiny_config(kind)), 5)
    driver = make_driver(model)
    spare = driver.num_sequences + 1
    first, second = prompt(20, 33), prompt(21, 12)
    driver.step([(0, first[:30]), (1, second[:10])])
    work = [(0, first[30:31]), (1, second[10:11]), (2, prompt(22, 9))]
    driver.step(work, [StateExport(1, 1, spare), StateExport(2, 4, spare + 1)])
    driver.resume(1, 3, 11, spare)
    expected = driver.step([(1, second[11:])])[0]
    assert torch.equal(driver.step([(3, second[11:])])[0], expected)
    driver.resume(2, 4, 4, spare + 1)
    whole = make_driver(model).step([(0, prompt(22, 9))])[0]
    assert_close(driver.step([(4, prompt(22, 9)[4:])])[0], whole[4:])


def test_only_the_wanted_rows_get_logits(make_driver: Any) -> None:
    model = random_model(ModelConfig.from_dict(tiny_config("hybrid")), 6)
    tokens = prompt(30, 21)
    (everything,) = make_driver(model).step([(0, tokens)])
    driver = make_driver(model)
    batch = driver.batch([(0, tokens)], ())
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    wanted = type(batch)(**fields | {"logit_indices": torch.tensor([20, 4])})
    logits = model(wanted, driver.cache)
    assert logits.shape == (2, model.config.vocab_size)
    assert_close(logits, everything[[20, 4]])


def test_the_step_size_is_bounded_from_above(make_driver: Any) -> None:
    values = tiny_config("attention_free") | {"time_step_limit": [0.0, 0.1]}
    tensors = random_tensors(ModelConfig.from_dict(values), 7)
    huge, constant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("dt_bias"):
            huge[name] = torch.full_like(tensor, 50.0)
            constant[name] = torch.full_like(tensor, log(expm1(0.1)))
        elif name.endswith("in_proj.weight"):
            constant[name] = tensor.clone()
            constant[name][-values["mamba_num_heads"] :] = 0.0
    bounded = fill_decoder(ModelConfig.from_dict(values), TensorsInMemory(huge), dtype="float32")
    fixed = fill_decoder(
        ModelConfig.from_dict(values | {"time_step_limit": None}), TensorsInMemory(constant), dtype="float32"
    )
    from_bounded, from_fixed = (make_driver(model).step([(0, prompt(31, 19))])[0] for model in (bounded, fixed))
    assert_close(from_bounded, from_fixed)


def test_bfloat16_stays_near_float32_and_packs_like_alone(make_driver: Any) -> None:
    config = ModelConfig.from_dict(tiny_config("hybrid"))
    exact, rounded = (random_model(config, 8, dtype=dtype) for dtype in ("float32", "bfloat16"))
    tokens = prompt(32, 40)
    expected = make_driver(exact).step([(0, tokens)])[0]
    driver = make_driver(rounded)
    logits = torch.cat([driver.step([(0, tokens[:30])])[0], *(driver.step([(0, [t])])[0] for t in tokens[30:])])
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_a_batch_without_state_rows_is_refused_by_a_recurrent_model(make_driver: Any) -> None:
    driver = make_driver(random_model(ModelConfig.from_dict(tiny_config("hybrid")), 9))
    batch = driver.batch([(0, [1, 2])], ())
    fields = {name: getattr(batch, name) for name in batch.__slots__}
    with pytest.raises(ValueError, match="state rows"):
        driver.model(type(batch)(**fields | {"state_rows": None}), driver.cache)
