"""What is expected of promotion, replay and trees where states are replayed instead of stored for each node.

R41 the nodes that were accepted, and no others; R42 nothing else is touched; R43 when a history is folded; R44 many
steps of replay against stepping in place; R45 widths and slots; R46 folds come first, alone or together; R47 trees
against a plain walk. R48 (ranks of a tensor-parallel group build the same trees) has no ranks here: equal inputs give
equal trees.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from engine_builders import VOCAB_SIZE, LoopBench, make_drafting_loop, make_loop, submit
from stepped_engine import SteppedEngine

from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.spec import CacheSpec, HistorySpec, StatePart, StateSpec
from turnkeep.engine.messages import Tokens
from turnkeep.engine.speculation.drafter import DraftRequest
from turnkeep.models.tiny import TinyKind
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.speculation_config import SpeculationConfig
from turnkeep.scheduler.step_plan import StepItem

KINDS: tuple[TinyKind, ...] = ("hybrid", "gated_delta")
WIDE = SpeculationConfig(7, 31, 31)
# Nodes of the tree that every step proposes: two chains below the root, one of them forked.
PARENTS = (-1, 0, -1, 1, 2, 4, 3, 4)
NUM_TOKENS = 40


def prompts() -> dict[str, list[int]]:
    chance = random.Random(8)
    return {name: [chance.randrange(3, VOCAB_SIZE) for _ in range(length)] for name, length in (("a", 12), ("b", 19))}


@cache
def truth(kind: TinyKind, num_tokens: int = NUM_TOKENS) -> dict[str, list[int]]:
    bench = make_loop(kind, prefix_caching=False)
    for name, prompt in prompts().items():
        bench.loop.receive(submit(name, prompt, num_tokens))
    bench.run()
    return {name: [*prompt, *bench.tokens(name)] for name, prompt in prompts().items()}


class LeafDrafter:
    """Proposes the same tree at every step, with the truth along the path to a leaf of the request's own."""

    needs_hidden = False

    def __init__(self, known: dict[str, list[int]], leaves: dict[str, int | None]) -> None:
        self._known = known
        self._leaves = leaves

    def propose(self, requests: list[DraftRequest], grant: TreeGrant) -> list[DraftTree | None]:
        return [self._tree(request) if grant.num_nodes else None for request in requests]

    def put_off(self, items: list[StepItem], normed: torch.Tensor) -> bool:
        return False

    def settle(self, going_on: Sequence[StepItem] | None = None) -> bool:
        return False

    def _tree(self, request: DraftRequest) -> DraftTree | None:
        if request.next_token is None:
            return None
        root, tokens = request.start + len(request.token_ids), [0] * len(PARENTS)  # 0 is never said
        path = path_to(self._leaves[request.request_id])
        for depth, node in enumerate(path, start=1):
            known = self._known[request.request_id]
            tokens[node] = known[root + depth] if root + depth < len(known) else 0
        return DraftTree(tuple(tokens), PARENTS, tuple(0.5 for _ in PARENTS))


def path_to(leaf: int | None) -> list[int]:
    path: list[int] = []
    node = -1 if leaf is None else leaf
    while node >= 0:
        path.insert(0, node)
        node = PARENTS[node]
    return path


def drafting(kind: TinyKind, leaves: dict[str, int | None], **settings: Any) -> tuple[LoopBench, list[Any]]:
    """A bench, and the plans with their outputs."""
    bench = make_drafting_loop(kind, LeafDrafter(truth(kind), leaves), WIDE, **settings)
    steps: list[Any] = []
    runner: Any = bench.loop._runner
    run = runner.run

    def recording_run(plan: Any) -> Any:
        output = run(plan)
        steps.append((plan, output))
        return output

    runner.run = recording_run
    return bench, steps


def run_both(bench: LoopBench, num_tokens: int = NUM_TOKENS, **options: Any) -> None:
    for name, prompt in prompts().items():
        bench.loop.receive(submit(name, prompt, num_tokens, **options))
    bench.run()


@pytest.mark.parametrize("kind", KINDS)
def test_r41_the_state_goes_on_from_the_leaf_that_was_accepted(kind: TinyKind) -> None:
    bench, steps = drafting(kind, {"a": 6, "b": 7})
    run_both(bench)
    for name, known in truth(kind).items():
        assert bench.tokens(name) == known[len(prompts()[name]) :]
    both = [(plan, output) for plan, output in steps if len(plan.items) == 2]
    whole = [output for plan, output in both if all(i.draft and i.draft.num_nodes == 8 for i in plan.items)]
    assert len(whole) > 5
    for output in whole:
        assert output.accepted == {"a": tuple(path_to(6)), "b": tuple(path_to(7))}


@pytest.mark.parametrize("kind", KINDS)
def test_r42_rows_pages_and_histories_of_nobody_stay_as_they_are(kind: TinyKind) -> None:
    bench, _ = drafting(kind, {"a": 6, "b": None})
    storage: Any = bench.loop._runner._storage  # type: ignore[attr-defined]
    tensors, mark = storage.tensors, 7.25
    free_rows, free_slots = slice(30, None), slice(4, None)
    pools = [layer[free_rows] for layers in tensors.states.values() for layer in layers]
    pools += [layer[free_slots] for layers in tensors.histories.values() for layer in layers]
    pools += [layer[:, 150:] for layer in tensors.kv]
    padding = [layer[0] for layers in tensors.states.values() for layer in layers] + [p[:, 0] for p in tensors.kv]
    for pool in pools:
        assert pool.numel() > 0
        pool.fill_(mark)
    run_both(bench)
    assert all(bool((pool == mark).all()) for pool in pools)
    assert all(bool((pool == 0).all()) for pool in padding)


def test_r43_a_history_is_folded_before_a_step_that_might_not_fit_and_only_then() -> None:
    parts = (StatePart("ssm", 1, (4, 4), "float32"),)
    spec = CacheSpec(16, None, StateSpec(parts), HistorySpec(16, parts))
    manager = CacheManager(spec, num_pages=0, num_state_rows=4, num_history_slots=1, clock=lambda: 0.0)
    sequence = manager.open(manager.cold_match("", range(5)), range(5))
    assert sequence is not None
    manager.grow(sequence, 99)
    manager.drain_copies()
    manager.advance(sequence, 5)

    def step(path: int, num_accepted: int) -> tuple[int, int, int]:
        """History before the step, folds that it takes, history after it."""
        _, length = manager.history_room(sequence, path)
        folds = manager.drain_folds()
        assert [fold.num_tokens for fold in folds] == [before[-1]] * len(folds)
        manager.advance(sequence, num_accepted, in_history=True)
        before.append(sequence.num_history_tokens)
        return length, len(folds), before[-1]

    before = [0]
    assert step(6, 7 - 1) == (0, 0, 6)
    assert step(6, 1) == (6, 0, 7)
    assert step(6, 3) == (7, 0, 10)
    assert step(6, 3) == (10, 0, 13)
    assert step(6, 3) == (0, 1, 3), "13 and 6 are more than 16"
    assert step(13, 13) == (3, 0, 16), "exactly full"
    assert step(1, 1) == (0, 1, 1)
    with pytest.raises(ValueError, match="a path of 17 tokens in a history of 16"):
        manager.history_room(sequence, 17)
    manager.close(sequence)
    manager.check()


@pytest.mark.parametrize("kind", KINDS)
def test_r44_many_steps_of_replay_stay_with_steps_in_place(kind: TinyKind) -> None:
    """Over 90 tokens, with paths of every length, folds in between and never a look at the rows in place."""
    num_tokens, logprobs = 90, []
    truth(kind, num_tokens)
    for leaves in (None, {"a": 6, "b": 0}, {"a": None, "b": 5}):
        bench = make_loop(kind) if leaves is None else drafting_long(kind, leaves, num_tokens)
        run_both(bench, num_tokens, num_logprobs=0)
        found = [
            entry.logprob
            for name in ("a", "b")
            for event in bench.events
            if isinstance(event, Tokens) and event.request_id == name
            for entry in event.logprobs or ()
        ]
        logprobs.append(torch.tensor(found))
        assert [bench.tokens(name) for name in ("a", "b")] == [
            known[len(prompts()[name]) :] for name, known in truth(kind, num_tokens).items()
        ]
    for own in logprobs[1:]:
        torch.testing.assert_close(own, logprobs[0], rtol=0, atol=2e-4)


def drafting_long(kind: TinyKind, leaves: dict[str, int | None], num_tokens: int) -> LoopBench:
    return make_drafting_loop(kind, LeafDrafter(truth(kind, num_tokens), leaves), WIDE)


def test_r45_a_tree_of_31_nodes_is_a_step_of_32_tokens_and_needs_one_slot_for_each_that_runs() -> None:
    assert WIDE.max_step_width == 32
    bench, steps = drafting("hybrid", {"a": 6, "b": 7}, max_running=3)
    run_both(bench)
    tensors: Any = bench.loop._runner._storage.tensors  # type: ignore[attr-defined]
    assert {layer.shape[0] for layers in tensors.histories.values() for layer in layers} == {3}
    trees = [item for plan, _ in steps for item in plan.items if item.replay is not None]
    assert trees, "trees are replayed"
    assert {item.replay.slot for item in trees} <= {0, 1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_r46_folds_come_first_and_are_the_same_alone_and_together(kind: TinyKind) -> None:
    outcomes = []
    for together in (True, False):
        bench, steps = drafting(kind, {"a": 6, "b": 6})
        runner: Any = bench.loop._runner
        fold = runner._replay.fold
        if not together:
            runner._replay.fold = lambda folds, fold=fold: [fold([one]) for one in folds]
        run_both(bench)
        assert sum(len(plan.folds) > 1 for plan, _ in steps) > 0
        tensors = runner._storage.tensors
        runner.settle(bench.loop._scheduler._cache.drain_folds())
        outcomes.append([layer.clone() for name in sorted(tensors.states) for layer in tensors.states[name]])
        outcomes[-1].append(torch.tensor([bench.tokens("a"), bench.tokens("b")]))
    assert all(torch.equal(left, right) for left, right in zip(*outcomes, strict=True))


def test_r46_a_row_is_read_after_its_fold_within_a_step() -> None:
    bench, _ = drafting("hybrid", {"a": 6, "b": 6})
    runner: Any = bench.loop._runner
    order: list[str] = []
    for owner, name in ((runner._replay, "fold"), (runner._storage, "apply_copies"), (runner._model, "hidden")):
        original = getattr(owner, name)

        def noting(*arguments: Any, name: str = name, original: Any = original, **options: Any) -> Any:
            order.append(name)
            return original(*arguments, **options)

        object.__setattr__(owner, name, noting)
    try:
        run_both(bench, 12)
    finally:
        object.__delattr__(runner._model, "hidden")
    steps = "".join(name[0] for name in order).split("h")[:-1]
    assert steps
    assert set(steps) == {"fa"}


@pytest.mark.parametrize("leaf", [None, *range(len(PARENTS))])
def test_r47_every_accepted_path_is_the_plain_walk_and_without_a_tree_one_token_comes(leaf: int | None) -> None:
    bench, steps = drafting("hybrid", {"a": leaf, "b": None})
    run_both(bench)
    for name, known in truth("hybrid").items():
        assert bench.tokens(name) == known[len(prompts()[name]) :]
    for plan, output in steps:
        for item in plan.items:
            if item.sampling is None:
                continue
            if item.draft is None:
                assert len(output.tokens[item.request_id]) == 1
            elif item.draft.num_nodes == len(PARENTS):
                assert output.accepted[item.request_id] == tuple(path_to(leaf if item.request_id == "a" else None))


def test_r48_equal_inputs_give_equal_trees() -> None:
    runs = []
    for _ in range(2):
        engine = SteppedEngine(speculation="mtp", max_draft_len=4)
        engine.loop._scheduler._drafting._budget = None  # what pays depends on the machine
        runner: Any = engine.loop._runner
        run, drafts = runner.run, []

        def recording_run(plan: Any, run: Any = run, drafts: list[Any] = drafts) -> Any:
            output = run(plan)
            drafts.append(output.drafts)
            return output

        runner.run = recording_run
        engine.run([list(range(40, 70)), list(range(300, 340))], max_new_tokens=16)
        runs.append(drafts)
    assert runs[0] == runs[1]
    assert sum(map(len, runs[0])) > 10
