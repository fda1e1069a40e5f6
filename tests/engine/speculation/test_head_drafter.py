"""Trees of a draft head against the head run plainly along each of their paths. Pages start as NaN: whatever a step
computed, alone or in a batch, the same is proposed, and nothing else is left behind."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES

from turnkeep.engine.speculation.drafter import DraftRequest
from turnkeep.engine.speculation.head_drafter import MAX_PENDING, HeadDrafter
from turnkeep.models.config import ModelConfig
from turnkeep.models.draft_heads.loading import random_draft_head
from turnkeep.models.draft_heads.paged_entries import PagedEntries
from turnkeep.models.tiny import tiny_config
from turnkeep.models.weights import random_model
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.request import SamplingParams

PAGE_SIZE = 4
PAGES_EACH = 16
GREEDY = SamplingParams(max_new_tokens=9)
NOTHING = TreeGrant(0, 0, 0, 0)
MODELS: dict[str, dict[str, Any]] = {
    "nemotron_h": tiny_config("hybrid")
    | {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "mlp", "attention"]},
    "qwen3_next": FAMILIES["qwen3_next"][0],
    "qwen3_5": FAMILIES["qwen3_5_text"][0] | {"mtp_num_hidden_layers": 1},
}


class Bench:
    """A drafter over pools, and sequences of random tokens and hidden states that stand for what a target computed."""

    def __init__(self, model: str, num_sequences: int = 4) -> None:
        config = ModelConfig.from_dict(MODELS[model])
        self.decoder, self.head = random_model(config, 1), random_draft_head(config, 2)
        # Random weights find everything equally likely: sharper logits make deeper trees.
        (self.decoder.embedding if self.decoder.lm_head is None else self.decoder.lm_head).mul_(4.0)
        self.size = config.hidden_size
        generator = torch.Generator().manual_seed(3)
        length = PAGES_EACH * PAGE_SIZE - 1
        self.tokens = torch.randint(config.vocab_size, (num_sequences, length), generator=generator).tolist()
        self.hidden = torch.randn(num_sequences, length, self.size, generator=generator)
        shape = (2, 1 + num_sequences * PAGES_EACH, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.kv = [torch.full(shape, torch.nan) for _ in range(config.num_draft_kv_layers)]
        for pool in self.kv:
            pool[:, 0] = 0
        ids = np.random.default_rng(4).permutation(num_sequences * PAGES_EACH) + 1
        self.pages = ids.reshape(num_sequences, PAGES_EACH).astype(np.int32)
        self.drafter = HeadDrafter(self.decoder, self.head, self.kv, PAGE_SIZE)

    def request(self, sequence: int, start: int, end: int, sampling: SamplingParams | None = GREEDY) -> DraftRequest:
        """A step that computed the tokens [start, end); without sampling the prompt goes on."""
        hidden = self.hidden[sequence]
        return DraftRequest(
            request_id=str(sequence),
            token_ids=self.tokens[sequence][start:end],
            start=start,
            next_token=None if sampling is None else self.tokens[sequence][end],
            hidden=hidden[start:end],
            previous_hidden=hidden[start - 1] if start else torch.zeros(self.size),
            page_ids=self.pages[sequence, : end // PAGE_SIZE + 1],
            sampling=sampling,
        )

    def entries(self, sequence: int, end: int) -> list[torch.Tensor]:
        """Keys and values at the positions [1, end)."""
        return [pool[:, self.pages[sequence]].flatten(1, 2)[:, 1:end] for pool in self.kv]

    def plain_entries(self, sequence: int, end: int) -> list[torch.Tensor]:
        """The same from one pass over pools of their own."""
        return [pool.flatten(1, 2)[:, 1:end] for pool in self._plain_pools(sequence, end)]

    def _plain_pools(self, sequence: int, end: int) -> list[torch.Tensor]:
        pools = [torch.full((2, 2 * PAGES_EACH, *pool.shape[2:]), torch.nan) for pool in self.kv]
        if end == 1:
            return pools
        positions = torch.arange(1, end)
        table = torch.arange(2 * PAGES_EACH)[None]
        attention = PagedEntries(pools, table, [end - 1], [1], 0, positions)
        embedded = self.decoder.embed(torch.tensor(self.tokens[sequence][1:end]))
        self.head(embedded, self.hidden[sequence, : end - 1], positions, attention)
        return pools

    def probabilities(self, sequence: int, end: int, path: list[int]) -> torch.Tensor:
        """What the head thinks follows the root at `end` and then `path`, one token after another."""
        pools = self._plain_pools(sequence, end)
        hidden = self.hidden[sequence, end - 1][None]
        for place, token in enumerate([self.tokens[sequence][end], *path], start=end):
            table = torch.arange(2 * PAGES_EACH)[None]
            attention = PagedEntries(pools, table, [1], [place], 1, torch.tensor([place]))
            hidden = self.head(self.decoder.embed(torch.tensor([token])), hidden, torch.tensor([place]), attention)
        return self.decoder.logits(hidden)[0].softmax(-1)

    def check(self, sequence: int, end: int, tree: DraftTree | None, max_children: int) -> None:
        """Every node is among its parent's likeliest children and has the probability of its path."""
        assert tree is not None
        paths: list[list[int]] = []
        for token, parent, probability in zip(tree.token_ids, tree.parents, tree.probabilities, strict=True):
            before = paths[parent] if parent >= 0 else []
            of_parent = tree.probabilities[parent] if parent >= 0 else 1.0
            expected = self.probabilities(sequence, end, before)
            assert token in expected.topk(max_children).indices.tolist()
            assert probability == pytest.approx(of_parent * float(expected[token]), rel=2e-3)
            paths.append([*before, token])
        assert len({tuple(path) for path in paths}) == len(paths)


def assert_same_entries(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, plain in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("model", MODELS)
def test_a_request_is_proposed_the_same_alone_and_in_a_batch(model: str) -> None:
    grant = TreeGrant(num_nodes=60, max_nodes_per_request=6, max_depth=3, max_children=2)
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
