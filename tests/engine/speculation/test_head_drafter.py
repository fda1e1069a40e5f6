"""Trees of a draft head against the head run plainly along each of their paths. Pages start as NaN: whatever a step
computed, alone or in a batch, the same is proposed, and nothing else is left behind."""

from __future__ import annotations

import random

import pytest
import torch
from head_bench import MODELS, NOTHING, PAGE_SIZE, Bench, assert_same_entries

from turnkeep.engine.speculation.head_drafter import MAX_PENDING, HeadDrafter
from turnkeep.scheduler.drafts import TreeGrant
from turnkeep.scheduler.request import SamplingParams


@pytest.mark.parametrize("model", MODELS)
def test_nodes_are_what_the_head_says_along_their_paths(model: str) -> None:
    bench = Bench(model)
    grant = TreeGrant(num_nodes=16, max_nodes_per_request=7, max_depth=4, max_children=3)
    bench.drafter.propose([bench.request(0, 0, 9), bench.request(1, 0, 30), bench.request(2, 0, 5, None)], NOTHING)
    # One token, five, a prompt that ends now, and one that begins and ends.
    steps = [(0, 9, 10), (1, 30, 35), (2, 5, 6 + MAX_PENDING), (3, 0, 1)]
    trees = bench.drafter.propose([bench.request(*step) for step in steps], grant)
    assert 0 < sum(tree.num_nodes for tree in trees if tree) <= 16
    for (sequence, _, end), tree in zip(steps, trees, strict=True):
        if tree is not None:
            bench.check(sequence, end, tree, 3)
        assert_same_entries(bench.entries(sequence, end), bench.plain_entries(sequence, end))
    assert max(depth for tree in trees if tree for depth in tree.depths()) == 4


@pytest.mark.parametrize("max_children", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_a_request_is_proposed_the_same_alone_and_in_a_batch(model: str, max_children: int) -> None:
    grant = TreeGrant(num_nodes=60, max_nodes_per_request=6, max_depth=3, max_children=max_children)
    steps = [(0, 9, 11), (1, 30, 31), (2, 17, 24)]
    together, alone = Bench(model), Bench(model)
    for bench in (together, alone):
        for sequence, start, _ in steps:
            bench.drafter.propose([bench.request(sequence, 0, start, None)], NOTHING)
    trees = together.drafter.propose([together.request(*step) for step in steps], grant)
    for step, tree in zip(steps, trees, strict=True):
        (own,) = alone.drafter.propose([alone.request(*step)], grant)
        assert own is not None
        assert tree is not None
        assert (own.token_ids, own.parents) == (tree.token_ids, tree.parents)
        assert own.probabilities == pytest.approx(tree.probabilities, rel=1e-3)


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_proposed_after_a_token_that_ends_the_request(model: str) -> None:
    bench = Bench(model)
    bench.drafter.propose([bench.request(0, 0, 30)], NOTHING)
    grant = TreeGrant(num_nodes=60, max_nodes_per_request=9, max_depth=4, max_children=2)
    (tree,) = bench.drafter.propose([bench.request(0, 30, 33)], grant)
    bench.check(0, 33, tree, 2)
    assert tree is not None
    end = tree.token_ids[tree.parents.index(-1)]  # the likeliest child of the root, so that a line comes first
    sampling = SamplingParams(max_new_tokens=9, stop_token_ids=(end, bench.decoder.config.vocab_size))
    steps = [bench.request(0, 30, 33, sampling), bench.request(1, 0, 6)]
    for requests in (steps[:1], steps):  # alone and with one that nothing ends
        cut = bench.drafter.propose(requests, grant)[0]
        bench.check(0, 33, cut, 2)
        assert cut is not None
        place = next(node for node, parent in enumerate(cut.parents) if parent < 0 and cut.token_ids[node] == end)
        assert place not in cut.parents
        assert max(cut.depths()) > 1
    unending = SamplingParams(max_new_tokens=9, stop_token_ids=(end,), ignore_eos=True)
    (again,) = bench.drafter.propose([bench.request(0, 30, 33, unending)], grant)
    assert again == tree


@pytest.mark.parametrize("seed", range(4))
def test_entries_do_not_depend_on_how_the_tokens_came(seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench("qwen3_5", num_sequences=3)
    ends = [0, 0, 0]
    while min(ends) < 40:
        chosen = rng.sample(range(3), k=rng.randint(1, 3))
        lens = {sequence: rng.choice((1, 1, 1, 2, 5, 20)) for sequence in chosen}
        steps = [(s, ends[s], ends[s] + lens[s]) for s in chosen if ends[s] + lens[s] < 60]
        grant = rng.choice((NOTHING, TreeGrant(9, 4, 3, 2)))
        if steps:
            bench.drafter.propose([bench.request(*step) for step in steps], grant)
        for sequence, _, end in steps:
            ends[sequence] = end
        if not steps:
            break
    for sequence, end in enumerate(ends):
        assert end > 1
        assert_same_entries(bench.entries(sequence, end), bench.plain_entries(sequence, end))
        behind = [pool[:, bench.pages[sequence]].flatten(1, 2)[:, end:] for pool in bench.kv]
        assert all(bool(rest.isnan().all()) for rest in behind)  # no node of a tree has left anything


def test_noise_makes_head_and_target_choose_alike() -> None:
    bench = Bench("qwen3_5", num_sequences=1)
    bench.drafter.propose([bench.request(0, 0, 20, None)], NOTHING)
    sampling = SamplingParams(max_new_tokens=9, temperature=1.0, seed=11)
    grant = TreeGrant(1, 1, 1, 1)
    agreeing = 0
    for seed in range(40):
        own = SamplingParams(max_new_tokens=9, temperature=1.0, seed=seed)
        (tree,) = bench.drafter.propose([bench.request(0, 20, 21, own)], grant)
        assert tree is not None
        agreeing += tree.token_ids[0] == target_choice(bench, own, 21)
    assert agreeing >= 36  # the noise of a token that the head finds unlikely is not looked at
    (first,) = bench.drafter.propose([bench.request(0, 20, 21, sampling)], grant)
    (again,) = bench.drafter.propose([bench.request(0, 20, 21, sampling)], grant)
    assert first == again


def target_choice(bench: Bench, sampling: SamplingParams, end: int) -> int:
    """What a target whose distribution is the head's would draw after the root at `end`."""
    from turnkeep.kernels.sampling import SamplingBatch, SamplingRow, sample

    logits = bench.probabilities(0, end, []).log()[None]
    row = SamplingRow(position=end + 1, seed=sampling.seed, temperature=sampling.temperature)
    return int(sample(logits, SamplingBatch([row]))[0])


@pytest.mark.parametrize("grant", [NOTHING, TreeGrant(5, 0, 3, 2), TreeGrant(5, 5, 0, 2), TreeGrant(5, 5, 3, 0)])
def test_without_room_nothing_is_proposed_and_everything_taken_over(grant: TreeGrant) -> None:
    bench = Bench("qwen3_5")
    assert bench.drafter.propose([bench.request(0, 0, 9), bench.request(1, 0, 1)], grant) == [None, None]
    assert bench.drafter.propose([bench.request(0, 9, 10), bench.request(1, 1, 2)], grant) == [None, None]
    assert_same_entries(bench.entries(0, 10), bench.plain_entries(0, 10))
    assert bench.drafter.propose([], grant) == []


def test_a_step_without_hidden_states_is_refused() -> None:
    from dataclasses import replace

    bench = Bench("qwen3_5")
    with pytest.raises(ValueError, match="needs the hidden states of the step"):
        bench.drafter.propose([replace(bench.request(0, 0, 9), hidden=None)], NOTHING)
    with pytest.raises(ValueError, match="needs the hidden state before the step"):
        bench.drafter.propose([replace(bench.request(0, 3, 9), previous_hidden=None)], NOTHING)


def test_trees_grow_with_the_threads_of_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench("qwen3_5")
    chosen: list[int] = []
    drafter = HeadDrafter(bench.decoder, bench.head, bench.kv, PAGE_SIZE, num_threads=3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    drafter.propose([bench.request(0, 0, 20, None)], TreeGrant(4, 4, 2, 2))
    assert chosen == []
    drafter.propose([bench.request(0, 20, 21)], TreeGrant(4, 4, 2, 2))
    assert chosen == [3]
