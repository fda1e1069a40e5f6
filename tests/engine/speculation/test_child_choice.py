"""What a draft head proposes at a node: with the target's own logits it is what the target chooses, whatever the noise
and the filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import turnkeep.engine.speculation.child_choice as child_choice
from turnkeep.engine.speculation.child_choice import ChildChoice
from turnkeep.kernels.sampling import SamplingBatch, SamplingRow, sample
from turnkeep.scheduler.drafts import TreeGrant
from turnkeep.scheduler.request import SamplingParams

VOCAB = 200


def choice_of(samplings: list[SamplingParams], num_children: int, roots: list[int]) -> ChildChoice:
    return ChildChoice(samplings, np.array(roots), TreeGrant(9, 9, 3, num_children))


def logits_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3.0


def chosen(logits: torch.Tensor, sampling: SamplingParams, position: int) -> list[int]:
    row = SamplingRow(
        position=position,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    tokens: list[int] = sample(logits, SamplingBatch([row] * len(logits))).tolist()
    return tokens


def test_greedy_children_are_the_likeliest_with_their_probabilities() -> None:
    logits = logits_of(1, 2, 3)
    token_ids, edges = choice_of([SamplingParams(max_new_tokens=1)] * 2, 4, [5, 9]).children(logits, 1)
    expected = logits.softmax(-1)
    assert token_ids.shape == edges.shape == (2, 3, 4)
    torch.testing.assert_close(torch.from_numpy(edges).exp(), expected.gather(2, torch.from_numpy(token_ids)))
    assert np.array_equal(token_ids[..., 0], logits.argmax(-1).numpy())


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.7, "min_p": 0.01}]
)
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_with_the_targets_logits_the_first_child_is_what_the_target_draws(
    temperature: float, filters: dict[str, float]
) -> None:
    misses = 0
    for seed in (3, 2**63 + 12345):
        sampling = SamplingParams(max_new_tokens=1, temperature=temperature, seed=seed, **filters)  # type: ignore[arg-type]
        logits = logits_of(seed % 1000, 1, 300)
        token_ids, _ = choice_of([sampling], 2, [75]).children(logits, 2)
        misses += int((token_ids[0, :, 0] != np.array(chosen(logits[0], sampling, 77))).sum())
    # Noise is drawn for the likeliest tokens alone: with nothing dropped, another one wins now and then.
    assert misses <= (0 if filters else 18)


def test_greedy_and_drawn_requests_of_a_batch_do_not_touch_each_other() -> None:
    greedy = SamplingParams(max_new_tokens=1)
    drawn = SamplingParams(max_new_tokens=1, temperature=0.8, top_k=9, seed=4)
    logits = logits_of(8, 3, 2)
    together = choice_of([greedy, drawn, greedy], 3, [10, 20, 30]).children(logits, 2)
    for r, sampling in enumerate((greedy, drawn, greedy)):
        alone = choice_of([sampling], 3, [10 * r + 10]).children(logits[r : r + 1], 2)
        assert np.array_equal(together[0][r], alone[0][0])
        np.testing.assert_allclose(together[1][r], alone[1][0], rtol=1e-5, atol=1e-6)


def test_the_noise_is_that_of_the_childs_position() -> None:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.9, seed=6)
    logits = logits_of(2, 1, 1).expand(2, 1, VOCAB)
    choice = choice_of([sampling, sampling], 1, [39, 40])
    for depth in (1, 2, 3):
        token_ids, _ = choice.children(logits, depth)
        expected = [chosen(logits[0], sampling, root + depth)[0] for root in (39, 40)]
        assert token_ids[:, 0, 0].tolist() == expected


def test_noise_drawn_at_once_is_that_drawn_for_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.9, seed=2**64 - 5)
    logits = logits_of(2, 2, 4)
    at_once = choice_of([sampling, sampling], 3, [7, 2**33]).children(logits, 3)
    monkeypatch.setattr(child_choice, "MAX_DRAWN_AT_ONCE", VOCAB - 1)
    by_candidate = choice_of([sampling, sampling], 3, [7, 2**33]).children(logits, 3)
    assert np.array_equal(at_once[0], by_candidate[0])
    assert np.array_equal(at_once[1], by_candidate[1])


def test_probabilities_of_children_add_up_to_one_at_most() -> None:
    for temperature in (0.0, 0.7):
        sampling = SamplingParams(max_new_tokens=1, temperature=temperature, top_p=0.9)
        _, edges = choice_of([sampling], 8, [3]).children(logits_of(5, 1, 50), 1)
        assert (np.exp(edges).sum(-1) <= 1.0 + 1e-5).all()
        assert (np.diff(np.exp(edges), axis=-1) <= 0.0).all()


def test_a_vocabulary_smaller_than_the_number_of_children_is_proposed_whole() -> None:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.7)
    token_ids, _ = choice_of([sampling], 8, [3]).children(torch.zeros(1, 1, 3), 1)
    assert sorted(token_ids[0, 0].tolist()) == [0, 1, 2]
