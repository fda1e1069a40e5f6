"""A head drafter over pools of NaN, and sequences of random tokens and hidden states that stand for what a target
computed; what it leaves behind, and what the head run plainly gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES

from turnkeep.engine.speculation.drafter import DraftRequest
from turnkeep.engine.speculation.head_drafter import HeadDrafter
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
        self.drafter.settle()
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
