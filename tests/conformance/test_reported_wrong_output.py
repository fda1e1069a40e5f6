"""Faults that users of hybrid models reported of speculation together with prefix caches: wrong output.

27 accuracy lost after cache hits; 28 rejected tokens in a shared state; 29 needles missed, calls leaked or broken;
30 nothing accepted for hours; 31 a proposer that corrupts the state; 33 hit and miss keep different states; 39 a
restored state that cannot be drafted from. 32 (corruption on one backend only) has one backend to look at here: each
kernel is compared with its definition on every device that it runs on, in tests/kernels and tests/gpu.

TURNKEEP_CONFORMANCE_PROMPTS and TURNKEEP_CONFORMANCE_TOKENS set the size of the comparison of 27.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from engine_builders import VOCAB_SIZE, LoopBench, make_drafting_loop, make_loop, submit
from scripted_drafter import ScriptedDrafter
from stepped_engine import SteppedEngine
from tokenizers import Tokenizer

from turnkeep.engine.messages import EndTurn
from turnkeep.engine.speculation.drafter import DraftRequest
from turnkeep.engine.speculation.prompt_lookup import PromptLookup
from turnkeep.engine.speculation.replay import Replay
from turnkeep.models.demo import rendering
from turnkeep.models.tiny import TinyKind
from turnkeep.scheduler.acceptance import WINDOW_STEPS
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.speculation_config import SpeculationConfig
from turnkeep.scheduler.tree_budget import LEARN_EVERY

NUM_PROMPTS = int(os.environ.get("TURNKEEP_CONFORMANCE_PROMPTS", "3"))
NUM_TOKENS = int(os.environ.get("TURNKEEP_CONFORMANCE_TOKENS", "16"))
KINDS: tuple[TinyKind, ...] = ("hybrid", "gated_delta")
LIMITS = SpeculationConfig(5, 8, 16)
DEMO_VOCAB_SIZE = 1280
SHARED = 21  # tokens that the prompts of a comparison begin with


def demo_prompts() -> list[list[int]]:
    chance = random.Random(9)
    trunk = [chance.randrange(20, DEMO_VOCAB_SIZE) for _ in range(SHARED)]
    return [
        [*trunk, *(chance.randrange(20, DEMO_VOCAB_SIZE) for _ in range(8 + number % 17))]
        for number in range(NUM_PROMPTS)
    ]


def generated(engine: SteppedEngine, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    outcomes = engine.run(prompts, max_new_tokens=num_tokens, boundaries=(SHARED,))
    return [outcome.token_ids for outcome in outcomes]


def verify_everything(engine: SteppedEngine) -> None:
    """Whatever it costs: how much pays depends on the machine."""
    engine.loop._scheduler._drafting._budget = None


@cache
def plain_demo() -> list[list[int]]:
    return generated(SteppedEngine(prefix_caching=False), demo_prompts(), NUM_TOKENS)


@pytest.mark.parametrize("max_step_tokens", [512, 16], ids=["whole", "split"])
@pytest.mark.parametrize("num_levels", [1, 3, 7])
def test_27_drafts_hits_and_chunks_do_not_change_greedy_tokens(num_levels: int, max_step_tokens: int) -> None:
    engine = SteppedEngine(speculation="mtp", max_draft_len=num_levels, max_step_tokens=max_step_tokens)
    verify_everything(engine)
    cold = generated(engine, demo_prompts(), NUM_TOKENS)
    cached = engine.run(demo_prompts(), max_new_tokens=NUM_TOKENS, boundaries=(SHARED,))
    assert cold == plain_demo()
    assert [outcome.token_ids for outcome in cached] == plain_demo()
    assert all(outcome.num_cached_tokens >= SHARED for outcome in cached)
    accepted = [outcome.finished.num_draft_nodes for outcome in cached if outcome.finished is not None]
    assert sum(accepted) > 0


def tiny_prompts(count: int, length: int = 19) -> list[list[int]]:
    chance = random.Random(3)
    return [[chance.randrange(3, VOCAB_SIZE) for _ in range(length + 3 * number)] for number in range(count)]


def run_all(
    bench: LoopBench, prompts: Sequence[Sequence[int]], num_tokens: int = 40, **options: Any
) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        bench.loop.receive(submit(f"r{number}", prompt, num_tokens, **options))
    bench.run()
    return [bench.tokens(f"r{number}") for number in range(len(prompts))]


@cache
def plain_tiny(kind: TinyKind, num_tokens: int = 40) -> list[list[int]]:
    return run_all(make_loop(kind, prefix_caching=False), tiny_prompts(3), num_tokens)


def truth(kind: TinyKind, num_tokens: int = 40) -> dict[str, list[int]]:
    outputs = plain_tiny(kind, num_tokens)
    return {f"r{number}": [*tiny_prompts(3)[number], *output] for number, output in enumerate(outputs)}


def drafting(kind: TinyKind, right: float, **settings: Any) -> LoopBench:
    drafter = ScriptedDrafter(truth(kind), VOCAB_SIZE, right=right)
    return make_drafting_loop(kind, drafter, LIMITS, **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_28_a_state_that_takes_in_rejected_tokens_is_noticed(kind: TinyKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps rejected nodes out is one argument: without it the comparisons of this file fail."""
    accept = Replay.accept

    def careless(self: Replay, items: Any, batch: Any, accepted: Any) -> None:
        accept(self, items, batch, {name: tuple(range(len(path))) for name, path in accepted.items()})

    assert run_all(drafting(kind, 0.8), tiny_prompts(3)) == plain_tiny(kind)
    monkeypatch.setattr(Replay, "accept", careless)
    bench = make_drafting_loop(kind, LooseDrafter(truth(kind)), LIMITS)
    assert run_all(bench, tiny_prompts(3)) != plain_tiny(kind)


class LooseDrafter(ScriptedDrafter):
    """Does not mind when the model says something else than the truth."""

    def __init__(self, known: dict[str, list[int]]) -> None:
        super().__init__(known, VOCAB_SIZE, right=0.8)

    def _tree(self, request: Any, grant: Any) -> Any:
        try:
            return super()._tree(request, grant)
        except AssertionError:
            return None


ORDER_SCHEMA = {
    "type": "object",
    "properties": {"order": {"type": "string", "maxLength": 9}, "count": {"enum": [1, 25, 700]}},
    "required": ["order", "count"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_29_calls_stay_valid_and_distant_text_found_with_drafts_and_a_cached_prefix(temperature: float) -> None:
    tokenizer = Tokenizer.from_str((rendering.DIRECTORY / "tokenizer.json").read_text())
    needle = "order B-4711 has 25 boards. "
    text = needle + "The desk answers questions about orders. " * 30
    prompt = tokenizer.encode(text + needle[:8], add_special_tokens=False).ids
    grammar = {"grammars": [{"name": "top", "lark_grammar": "start: @answer"}]}
    grammar["grammars"].append({"name": "answer", "json_schema": ORDER_SCHEMA})  # type: ignore[dict-item]
    sampling = SamplingParams(max_new_tokens=90, temperature=temperature, seed=5, stop_token_ids=(2,))
    structured = SamplingParams(
        max_new_tokens=90, temperature=temperature, seed=5, stop_token_ids=(2,), grammar=json.dumps(grammar)
    )
    found = []
    for options in ({"prefix_caching": False}, {"speculation": "mtp", "max_draft_len": 3}):
        engine = SteppedEngine(**options)
        verify_everything(engine)
        for _ in range(2):  # the second time from the cache, where there is one
            for own in (sampling, structured):
                (outcome,) = engine.run([prompt], sampling=own, boundaries=(len(prompt) - 3,))
                found.append(outcome.token_ids)
        assert outcome.num_cached_tokens == (0 if "prefix_caching" in options else len(prompt) - 3)
    free, calls = found[::2], found[1::2]
    assert all(tokens == free[0] for tokens in free), "the same continuation of a text whose begin is far away"
    assert all(tokens == calls[0] for tokens in calls)
    assert json.loads(tokenizer.decode([token for token in calls[0] if token != 2]))["count"] in (1, 25, 700)


def test_30_drafts_that_are_never_accepted_are_reset_and_tokens_stay_right() -> None:
    engine = SteppedEngine(speculation="mtp", max_draft_len=2, dynamic_tree_max_topk=1, max_total_draft_tokens=2)
    runner: Any = engine.loop._runner
    runner._drafter.propose = lambda requests, grant: [_certain(request, grant) for request in requests]
    drafting: Any = engine.loop._scheduler._drafting
    budget, grant = drafting._budget, drafting._fixed_grant
    # Everything is verified, as a planner that believes the drafter would have it.
    budget.select = lambda request_ids, drafts, num_decodes, num_tokens: [
        None if budget.acceptance.rests(request_id) else draft
        for request_id, draft in zip(request_ids, drafts, strict=True)
    ]
    budget.grant = lambda num_requests, num_tokens, *, has_new: grant
    prompt = demo_prompts()[0]
    plain = generated(SteppedEngine(prefix_caching=False), [prompt], 60)
    assert generated(engine, [prompt], 60) == plain
    assert budget.counter_values()["draft_num_resets"] == 1
    counts = budget.acceptance.counts
    assert counts.num_nodes[1] == counts.num_nodes[2]
    assert WINDOW_STEPS <= counts.num_nodes[1] < WINDOW_STEPS + LEARN_EVERY, "nothing was verified after the reset"
    assert counts.num_accepted == {}


def _certain(request: DraftRequest, grant: TreeGrant) -> DraftTree | None:
    if request.next_token is None or grant.num_nodes == 0:
        return None
    return DraftTree((0, 0), (-1, 0), (0.95, 0.9))  # padding is never what a model says


@pytest.mark.parametrize("proposer", ["right", "mixed", "wrong", "copies"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_31_no_proposer_changes_tokens(kind: TinyKind, proposer: str, temperature: float) -> None:
    """The draft heads are compared in 27. Four tokens alone are likely, so that there is something to copy."""
    prompts = tiny_prompts(3)
    options = {"temperature": temperature, "seed": 3, "top_k": 4, "logit_bias": dict.fromkeys((5, 6, 7, 8), 30.0)}
    plain = run_all(make_loop(kind, prefix_caching=False), prompts, 24, **options)
    known = {f"r{number}": [*prompts[number], *output] for number, output in enumerate(plain)}
    shares = {"right": 1.0, "mixed": 0.5, "wrong": 0.0}
    drafter: Any = PromptLookup()
    if proposer != "copies":
        drafter = ScriptedDrafter(known, VOCAB_SIZE, right=shares[proposer])
    bench = make_drafting_loop(kind, drafter, LIMITS)
    assert run_all(bench, prompts, 24, **options) == plain
    ended = [bench.finished(f"r{number}") for number in range(3)]
    assert sum(one.num_draft_nodes for one in ended) > 0
    if proposer == "right":
        assert sum(one.num_accepted_nodes for one in ended) > 36


def snapshot_rows(bench: LoopBench) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Position and contents of every snapshot."""
    loop: Any = bench.loop
    loop._runner.settle(loop._scheduler._cache.drain_folds())
    for snapshot in loop._scheduler._cache._reclaimer.snapshots:
        parts = loop._runner._storage.tensors.states
        yield snapshot.num_tokens, [layer[snapshot.row].clone() for name in sorted(parts) for layer in parts[name]]


@pytest.mark.parametrize("kind", KINDS)
def test_33_a_hit_and_a_miss_keep_the_same_states(kind: TinyKind) -> None:
    prompt, output = tiny_prompts(1)[0], plain_tiny(kind)[0]
    again = [*prompt, *output[:20]]
    kept = []
    for right in (None, 0.0, 0.7, 1.0):
        known = {name: [*prompt, *output] for name in ("first", "next")}
        if right is None:
            bench = make_loop(kind)
        else:
            bench = make_drafting_loop(kind, ScriptedDrafter(known, VOCAB_SIZE, right=right), LIMITS)
        if right != 0.7:  # the one that computes the second prompt as a whole
            bench.loop.receive(submit("first", prompt, 20, boundaries=[(9, "trunk")], conversation_id="c"))
            bench.run()
            bench.loop.receive(EndTurn("first", 1 << 30))
        bench.loop.receive(submit("next", again, 12, boundaries=[(9, "trunk")], conversation_id="c"))
        bench.run()
        assert (bench.finished("next").num_cached_tokens > 0) == (right != 0.7)
        assert bench.tokens("next") == output[20:32]
        kept.append(dict(snapshot_rows(bench)))
    end = len(again) + 11
    for position in (9, end):
        for own in kept[1:]:
            for left, right_one in zip(own[position], kept[0][position], strict=True):
                torch.testing.assert_close(left, right_one, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for own in kept[1:] for a, b in zip(own[9], kept[0][9], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_39_a_restored_state_is_drafted_from_like_a_fresh_one(kind: TinyKind) -> None:
    prompt, output = tiny_prompts(1)[0], plain_tiny(kind)[0]
    known = {name: [*prompt, *output] for name in ("first", "next", "retry")}
    bench = make_drafting_loop(kind, ScriptedDrafter(known, VOCAB_SIZE, right=1.0), LIMITS)
    requests = (("first", prompt), ("next", [*prompt, *output[:13]]), ("retry", [*prompt, *output[:13]]))
    for name, known_ids in requests:
        bench.loop.receive(submit(name, known_ids, 13, boundaries=[(len(prompt), "turn_start")], conversation_id="c"))
        bench.run()
        assert bench.tokens(name) == output[len(known_ids) - len(prompt) :][:13]
        assert bench.finished(name).num_accepted_nodes > 4, name
        bench.loop.receive(EndTurn(name, 1 << 30))
    assert bench.finished("next").num_cached_tokens == len(prompt) + 12
    assert bench.finished("retry").num_cached_tokens == len(prompt) + 12
