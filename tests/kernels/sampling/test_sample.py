"""Chosen tokens: law, filters, penalties, ties, independence of the batch, and refusal of broken logits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import turnkeep.kernels.sampling.reference as reference
from turnkeep.kernels.sampling import (
    GREEDY,
    InvalidLogitsError,
    SamplingBatch,
    SamplingRow,
    change_logits,
    sample,
    top_logprobs,
)


def draw(logits: torch.Tensor, *rows: SamplingRow) -> list[int]:
    return sample(logits, SamplingBatch(rows)).tolist()


def draw_many(logits: torch.Tensor, num_draws: int, **options: Any) -> torch.Tensor:
    """Tokens of one row of logits at positions 0 .. num_draws - 1."""
    rows = tuple(SamplingRow(position=position, seed=11, **options) for position in range(num_draws))
    return sample(logits.expand(num_draws, -1), SamplingBatch(rows))


def expected_kept(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters by their definitions, token by token in float64."""
    probs = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-float(logits[token]), token))
    order = [token for token in order if probs[token] >= min_p * probs[order[0]]]
    order = order[:top_k] if top_k > 0 else order
    total, mass, kept = math.fsum(probs[token] for token in order), 0.0, set()
    for token in order:
        if top_p < 1.0 and mass >= top_p * total and kept:
            break
        kept.add(token)
        mass += probs[token]
    return kept


def test_greedy_takes_the_largest_and_the_lowest_id_among_equal_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 5.0, 5.0, 5.0], [-3.0, -2.0, -9.0, -2.0]])
    assert draw(logits, GREEDY, SamplingRow(), SamplingRow(position=7, seed=9)) == [1, 0, 1]
    wide = torch.zeros(3, 5000)
    wide[:, [77, 4321]] = 2.0
    assert draw(wide, GREEDY, GREEDY, GREEDY) == [77, 77, 77]
    assert draw(wide, GREEDY, SamplingRow(top_k=1, temperature=1.0), SamplingRow(logit_bias={3: 0.5}))[:2] == [77, 77]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_sampled_tokens_follow_the_target_distribution(options: dict[str, Any]) -> None:
    vocab_size, num_draws = 12, 20_000
    logits = torch.randn(vocab_size) * 1.5
    counts = draw_many(logits, num_draws, **options).bincount(minlength=vocab_size).double()
    kept = expected_kept(
        logits, options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0)
    )
    target = (logits.double() / options["temperature"]).exp()
    target[[token for token in range(vocab_size) if token not in kept]] = 0.0
    expected = target / target.sum() * num_draws
    assert counts[expected == 0].sum() == 0
    inside = expected > 0
    statistic = float(((counts - expected)[inside] ** 2 / expected[inside]).sum())
    freedom = int(inside.sum()) - 1
    # Wilson-Hilferty: the cube root is close to normal; 4 deviations. Draws are fixed by their seed.
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert abs(deviation) < 4


@pytest.mark.parametrize("vocab_size", [40, 3000])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 300},
        {"top_k": 10_000},
        {"top_p": 0.3},
        {"top_p": 0.999},
        {"top_p": 1e-9},
        {"min_p": 0.2},
        {"min_p": 1e-6},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.5, "min_p": 0.01},
        {"top_k": 500, "top_p": 0.95},
    ],
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_filters_keep_exactly_the_defined_tokens(vocab_size: int, options: dict[str, Any], temperature: float) -> None:
    logits = torch.randn(2, vocab_size) * 2
    logits[1] = (logits[1] * 4).round() / 4  # many equal values
    rows = [SamplingRow(temperature=temperature, **options)] * 2
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    ids, valid = reference._kept(scaled, rows)
    for row in range(2):
        expected = expected_kept(
            scaled[row], 1.0, options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0)
        )
        assert set(ids[row][valid[row]].tolist()) == expected


@pytest.mark.parametrize("options", [{"top_k": 30}, {"top_p": 0.7}, {"top_p": 0.99}, {"min_p": 0.05}])
def test_noise_for_kept_tokens_alone_and_for_the_whole_row_choose_the_same(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    logits = torch.randn(2000) * 3
    chosen = []
    for share in (0.0, 1.0):
        monkeypatch.setattr(reference, "MAX_KEPT_SHARE", share)
        chosen.append(draw_many(logits, 300, temperature=1.0, **options))
    assert torch.equal(chosen[0], chosen[1])
    assert chosen[0].unique().numel() > 5


@pytest.mark.parametrize("options", [{"top_k": 30}, {"top_k": 300}, {"top_p": 0.7}, {"top_p": 0.99}, {"min_p": 0.05}])
def test_the_number_of_candidates_looked_at_first_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    logits = (torch.randn(2000) * 12).round() / 4
    chosen = []
    for candidates in (3, 64, 2000):
        monkeypatch.setattr(reference, "NUM_CANDIDATES", candidates)
        chosen.append(draw_many(logits, 50, temperature=1.0, **options))
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])


def mixed_rows() -> tuple[SamplingRow, ...]:
    return (
        GREEDY,
        SamplingRow(position=4, seed=1, temperature=1.0),
        SamplingRow(position=4, seed=1, temperature=0.7, top_p=0.9),
        SamplingRow(position=9, seed=2**64 - 1, temperature=1.3, top_k=40, min_p=0.01),
        SamplingRow(logit_bias={5: 3.0, 6: -100.0}),
        SamplingRow(position=4, temperature=1.0, repetition_penalty=1.3, prompt_ids=[1, 2, 3], output_ids=[4, 4]),
        SamplingRow(frequency_penalty=0.5, presence_penalty=0.2, output_ids=[7, 7, 8], forbidden_ids=(0, 1)),
    )


@pytest.mark.parametrize("vocab_size", [50, 1501])
def test_a_row_gets_the_same_token_alone_and_in_any_batch(vocab_size: int) -> None:
    rows = mixed_rows()
    logits = torch.randn(len(rows), vocab_size) * 2
    before = logits.clone()
    together = draw(logits, *rows)
    assert torch.equal(logits, before)
    assert together == [draw(logits[i : i + 1], row)[0] for i, row in enumerate(rows)]
    order = torch.randperm(len(rows)).tolist()
    assert [together[i] for i in order] == draw(logits[order], *(rows[i] for i in order))


def test_seed_and_position_decide_and_nothing_else_does() -> None:
    logits = torch.zeros(400)
    first = draw_many(logits, 50, temperature=1.0)
    assert torch.equal(first, draw_many(logits, 50, temperature=1.0))
    assert first.unique().numel() > 30
    assert torch.equal(first, draw_many(logits + 5.0, 50, temperature=0.5))
    other = sample(
        logits.expand(50, -1), SamplingBatch([SamplingRow(position=p, seed=12, temperature=1.0) for p in range(50)])
    )
    assert not torch.equal(first, other)


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = torch.tensor([[1.0, 80.0, 79.0, -3e38]])
    assert draw(logits, SamplingRow(temperature=1e-38, seed=5)) == [1]
    assert draw(logits, SamplingRow(temperature=1e-38, seed=5, top_p=0.5)) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forbidden_tokens_are_never_chosen(temperature: float) -> None:
    logits = torch.zeros(6)
    logits[2] = 50.0
    chosen = draw_many(logits, 40, temperature=temperature, forbidden_ids=(2, 3), logit_bias={2: 100.0})
    assert not set(chosen.tolist()) & {2, 3}


def test_penalties_and_biases_follow_their_formulas() -> None:
    logits = torch.randn(1, 10)
    row = SamplingRow(
        frequency_penalty=0.5,
        presence_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={0: 2.0, 9: -1.0},
        prompt_ids=[1, 1, 4],
        output_ids=[2, 2, 2, 9],
    )
    expected = logits[0].clone()
    expected[0] += 2.0
    expected[9] -= 1.0
    for token in (1, 4, 2, 9):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[2] -= 3 * 0.5 + 0.25
    expected[9] -= 1 * 0.5 + 0.25
    torch.testing.assert_close(change_logits(logits, [row])[0], expected)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_each_penalty_alone_turns_greedy_away_from_repeating(name: str) -> None:
    logits = torch.tensor([[1.0, 1.1, 0.0]])
    assert draw(logits, SamplingRow(output_ids=[1])) == [1]
    assert draw(logits, dataclasses.replace(SamplingRow(output_ids=[1]), **{name: 1.5})) == [0]
    assert draw(logits, dataclasses.replace(SamplingRow(), **{name: 1.5})) == [1]


def test_only_the_repetition_penalty_looks_at_the_prompt() -> None:
    logits = torch.tensor([[1.0, 1.1, 0.0]])
    assert draw(logits, SamplingRow(prompt_ids=[1], repetition_penalty=1.5)) == [0]
    assert draw(logits, SamplingRow(prompt_ids=[1], frequency_penalty=1.5, presence_penalty=1.5)) == [1]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_raise_and_name_their_rows(broken: float, temperature: float) -> None:
    logits = torch.randn(4, 30)
    logits[1, 17] = broken
    logits[3] = -math.inf
    row = SamplingRow(temperature=temperature)
    with pytest.raises(InvalidLogitsError, match="rows") as caught:
        draw(logits, row, row, row, row)
    assert caught.value.rows == [1, 3]


def test_forbidding_every_token_raises() -> None:
    with pytest.raises(InvalidLogitsError):
        draw(torch.zeros(1, 3), SamplingRow(forbidden_ids=(0, 1, 2)))


@pytest.mark.parametrize(
    "row",
    [
        SamplingRow(logit_bias={30: 1.0}),
        SamplingRow(logit_bias={-1: 1.0}),
        SamplingRow(forbidden_ids=(30,)),
        SamplingRow(presence_penalty=1.0, output_ids=[30]),
        SamplingRow(repetition_penalty=2.0, prompt_ids=[99]),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(row: SamplingRow) -> None:
    with pytest.raises(ValueError, match="vocabulary of 30"):
        draw(torch.zeros(1, 30), row)


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        draw(torch.zeros(1, 30), GREEDY, GREEDY)


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 300])
def test_top_logprobs_are_of_the_raw_logits_with_ties_by_lowest_id(num_logprobs: int) -> None:
    logits = (torch.randn(3, 200) * 4).round()
    chosen, ids, values = top_logprobs(logits, torch.tensor([0, 199, 50]), num_logprobs)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), expected[[0, 1, 2], [0, 199, 50]], rtol=1e-5, atol=1e-5)
    for row in range(3):
        order = sorted(range(200), key=lambda token: (-float(logits[row, token]), token))[:num_logprobs]
        assert ids[row].tolist() == order
        torch.testing.assert_close(values[row].double(), expected[row, order], rtol=1e-5, atol=1e-5)


def test_top_logprobs_refuse_sizes_that_do_not_fit() -> None:
    for ids, count in ((torch.zeros(2, dtype=torch.int64), 1), (torch.zeros(1, dtype=torch.int64), -1)):
        with pytest.raises(ValueError, match="top_logprobs"):
            top_logprobs(torch.zeros(1, 5), ids, count)


def bits_of(allowed: set[int], vocab_size: int) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(-(-vocab_size // 32) * 4, "little")


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "top_k": 3, "top_p": 0.9}]
)
def test_only_allowed_tokens_are_chosen_whatever_their_logits(options: dict[str, Any]) -> None:
    logits = torch.arange(70, dtype=torch.float32)[None]
    allowed = {0, 31, 32, 40}
    bias = {69: 100.0}
    for position in range(20):
        row = SamplingRow(position=position, allowed_bits=bits_of(allowed, 70), logit_bias=bias, **options)
        token = draw(logits, row)[0]
        assert token in allowed
        assert options or token == 40


def test_no_allowed_token_is_an_error_of_its_row_and_too_few_bits_are_a_mistake() -> None:
    logits = torch.zeros(2, 40)
    with pytest.raises(InvalidLogitsError) as error:
        draw(logits, SamplingRow(allowed_bits=bytes(8)), GREEDY)
    assert error.value.rows == [0]
    with pytest.raises(ValueError, match="32 bits"):
        draw(logits, SamplingRow(allowed_bits=bytes(4)), GREEDY)
