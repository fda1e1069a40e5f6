"""A tree step computes what the model says along the path of every node, and accepted nodes become the sequence."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from draft_trees import make_parents, path
from model_families import FAMILIES

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.forward_batch import TreeBatch
from turnkeep.kernels.replay_history import HistoryFolds, HistorySpans, TreeTerms, load_windows
from turnkeep.models.config import ModelConfig
from turnkeep.models.decoder import Decoder
from turnkeep.models.tiny import TinyKind, tiny_config
from turnkeep.models.weights import random_model

TOLERANCE = 1e-4
CAPACITY = 16
KINDS: tuple[TinyKind, ...] = (
    "hybrid", "attention_only", "attention_free", "sliding", "short_conv", "parallel", "experts", "gated_delta",
)  # fmt: skip


@dataclass
class Tree:
    token_ids: list[int]
    parents: list[int]

    @staticmethod
    def of(shape: str, num_nodes: int, rng: random.Random) -> Tree:
        return Tree([rng.randrange(3, 80) for _ in range(num_nodes)], make_parents(shape, num_nodes))


class TreeSteps:
    """Sequences of a StepDriver that go on by trees: sequence i has history slot i + 1, its row stays behind."""

    def __init__(self, driver: Any, prompts: list[list[int]]) -> None:
        self.driver = driver
        self.tokens = [list(prompt) for prompt in prompts]
        config: ModelConfig = driver.model.config
        for part in config.history_parts(CAPACITY, "float32"):
            shape = (driver.num_sequences + 1, *part.shape)
            # Whatever is read must have been written: what is not zero is poison.
            pools = [torch.full(shape, torch.nan) for _ in range(part.num_layers)]
            driver.cache.histories[part.name] = pools
        self.num_folded = [len(prompt) for prompt in prompts]
        driver.step([(sequence, prompt) for sequence, prompt in enumerate(prompts)])

    def history_len(self, sequence: int) -> int:
        return len(self.tokens[sequence]) - self.num_folded[sequence]

    def verify(
        self,
        trees: dict[int, Tree],
        decodes: dict[int, int] | None = None,
        prefills: dict[int, list[int]] | None = None,
    ) -> tuple[dict[int, torch.Tensor], TreeTerms]:
        """Logits of the nodes by sequence, beside plain decodes and prefill chunks of other sequences."""
        decodes, prefills = decodes or {}, prefills or {}
        driver = self.driver
        fresh = [sequence for sequence in trees if self.history_len(sequence) == 0]
        if fresh and driver.cache.states:
            rows = torch.tensor(fresh) + 1
            load_windows(driver.cache.states, driver.cache.histories, rows, rows, CAPACITY)
        work = [
            *((sequence, [token]) for sequence, token in decodes.items()),
            *((sequence, tree.token_ids) for sequence, tree in trees.items()),
            *prefills.items(),
        ]
        packed = DraftTrees(
            [len(tree.token_ids) for tree in trees.values()],
            [parent for tree in trees.values() for parent in tree.parents],
        )
        spans = None
        if driver.cache.states:
            slots = [sequence + 1 for sequence in trees]
            spans = HistorySpans(slots, [self.history_len(sequence) for sequence in trees], CAPACITY)
        batch = driver.batch(work, ())
        first, last = len(decodes), len(decodes) + len(packed.parents)
        positions, slots = batch.positions.clone(), batch.slot_mapping.clone()
        roots = [len(self.tokens[sequence]) for sequence, tree in trees.items() for _ in tree.parents]
        positions[first:last] = torch.tensor(roots) + torch.tensor(packed.depths)
        slots[first:last] = 0
        terms = TreeTerms()
        batch = replace(
            batch,
            positions=positions,
            slot_mapping=slots,
            num_decodes=len(decodes),
            trees=TreeBatch(packed, spans, terms),
        )
        logits = driver.model(batch, driver.cache)
        for sequence, tokens in (*((s, [t]) for s, t in decodes.items()), *prefills.items()):
            driver.lengths[sequence] += len(tokens)
            self.tokens[sequence] += tokens
        parts = logits.split([len(tokens) for _, tokens in work])
        return {sequence: part for (sequence, _), part in zip(work, parts, strict=True)}, terms

    def accept(self, trees: dict[int, Tree], terms: TreeTerms, last_nodes: dict[int, int]) -> None:
        """Go on along the path to a node of each tree."""
        nodes, page_slots, slots, offsets, start = [], [], [], [], 0
        for sequence, tree in trees.items():
            for node in path(tree.parents, last_nodes[sequence]):
                nodes.append(start + node)
                page_slots.append(self.driver.first_page(sequence) * 8 + len(self.tokens[sequence]))
                slots.append(sequence + 1)
                offsets.append(self.history_len(sequence))
                self.tokens[sequence].append(tree.token_ids[node])
                self.driver.lengths[sequence] += 1
            start += len(tree.parents)
        terms.write(nodes, page_slots, slots, offsets, CAPACITY)

    def fold(self, spans: list[tuple[int, int, int]]) -> None:
        """(sequence, tokens of its history, target row); into its own row the whole history."""
        sequences, lens, targets = zip(*spans, strict=True)
        history = HistorySpans([sequence + 1 for sequence in sequences], lens, CAPACITY)
        rows = torch.tensor(sequences) + 1
        self.driver.model.fold(HistoryFolds(history, rows, torch.tensor(targets)), self.driver.cache)
        for sequence, length, target in spans:
            if target == sequence + 1:
                assert length == self.history_len(sequence)
                self.num_folded[sequence] += length


def expected(model: Decoder, make_driver: Callable[..., Any], tokens: list[int]) -> torch.Tensor:
    """Logits after the tokens, computed in one chunk."""
    return make_driver(model, num_sequences=1).step([(0, tokens)])[0][-1]


def check(model: Decoder, make_driver: Callable[..., Any], before: list[int], tree: Tree, logits: torch.Tensor) -> None:
    for node in range(len(tree.parents)):
        along = [tree.token_ids[other] for other in path(tree.parents, node)]
        gap = (logits[node] - expected(model, make_driver, before + along)).abs().max()
        assert gap < TOLERANCE, f"node {node}"


def run_trees(model: Decoder, make_driver: Callable[..., Any], seed: int) -> None:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 80) for _ in range(length)] for length in (13, 4, 22)]
    steps = TreeSteps(make_driver(model), prompts)
    for sizes in ((7, 1, 12), (1, 9, 3), (5, 2, 1)):
        trees = {
            sequence: Tree.of(shape, size, rng)
            for sequence, shape, size in zip(range(3), ("random", "chain", "bushy"), sizes, strict=True)
        }
        before = [list(tokens) for tokens in steps.tokens]
        logits, terms = steps.verify(trees)
        for sequence, tree in trees.items():
            check(model, make_driver, before[sequence], tree, logits[sequence])
        steps.accept(trees, terms, {sequence: rng.randrange(len(tree.parents)) for sequence, tree in trees.items()})
    if steps.driver.cache.states:
        # A snapshot of the past, and the rows themselves brought up to the end.
        length = steps.history_len(1)
        assert length > 1
        steps.fold(
            [(1, length - 1, 40), *((sequence, steps.history_len(sequence), sequence + 1) for sequence in range(3))]
        )
        steps.driver.resume(1, 4, len(steps.tokens[1]) - 1, 40)
        (again,) = steps.driver.step([(4, steps.tokens[1][-1:])])
        assert (again[-1] - expected(model, make_driver, steps.tokens[1])).abs().max() < TOLERANCE
    outputs = steps.driver.step([(sequence, [5 + sequence]) for sequence in range(3)])
    for sequence, own in enumerate(outputs):
        assert (own[-1] - expected(model, make_driver, [*steps.tokens[sequence], 5 + sequence])).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_tiny_models_match_the_paths_of_their_nodes(kind: TinyKind, make_driver: Callable[..., Any]) -> None:
    run_trees(random_model(ModelConfig.from_dict(tiny_config(kind)), 3), make_driver, 1)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_trees_of_every_family_match_the_paths_of_their_nodes(family: str, make_driver: Callable[..., Any]) -> None:
    run_trees(random_model(ModelConfig.from_dict(FAMILIES[family][0]), 4), make_driver, 2)


@pytest.mark.parametrize("kind", ["hybrid", "gated_delta", "sliding", "short_conv"])
def test_trees_share_a_step_with_decodes_and_prefill_chunks(kind: TinyKind, make_driver: Callable[..., Any]) -> None:
    rng = random.Random(7)
    model = random_model(ModelConfig.from_dict(tiny_config(kind)), 5)
    prompts = [[rng.randrange(3, 80) for _ in range(length)] for length in (9, 14, 6)]
    steps = TreeSteps(make_driver(model), prompts)
    steps.tokens += [[], [], []]
    steps.num_folded += [0, 0, 0]
    before = [list(tokens) for tokens in steps.tokens]
    trees = {1: Tree.of("random", 8, rng)}
    chunk = [rng.randrange(3, 80) for _ in range(11)]
    logits, _ = steps.verify(trees, {0: 33}, {2: chunk[:4], 3: chunk})
    check(model, make_driver, before[1], trees[1], logits[1])
    for sequence, tokens in ((0, [33]), (2, chunk[:4]), (3, chunk)):
        assert (logits[sequence][-1] - expected(model, make_driver, before[sequence] + tokens)).abs().max() < TOLERANCE
