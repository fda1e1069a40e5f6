"""Drafts change the number of steps and nothing else: the same tokens whatever is drafted, accepted, cut or reused."""

from __future__ import annotations

import random
from functools import cache

import pytest
from engine_builders import VOCAB_SIZE, LoopBench, make_drafting_loop, make_loop, submit
from order_desk_prompts import order_desk_prompts
from scripted_drafter import ScriptedDrafter

from turnkeep.engine.config import EngineConfig
from turnkeep.engine.factory import build_engine
from turnkeep.engine.messages import Abort, EndTurn, FromEngine, Stop, Submit, Tokens
from turnkeep.models.tiny import TinyKind
from turnkeep.scheduler.speculation_config import SpeculationConfig

KINDS: tuple[TinyKind, ...] = ("hybrid", "gated_delta")
MORE_KINDS: tuple[TinyKind, ...] = ("attention_only", "attention_free", "sliding", "short_conv", "parallel", "experts")
LIMITS = SpeculationConfig(max_draft_len=7, dynamic_tree_max_topk=31, max_total_draft_tokens=31)
NUM_NEW = 40
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 11, "presence_penalty": 0.3}


def prompts(count: int) -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(3, VOCAB_SIZE) for _ in range(17 + 5 * index)] for index in range(count)]


def requests(count: int, **sampling: object) -> list[Submit]:
    return [
        submit(
            f"r{index}",
            prompt,
            NUM_NEW,
            boundaries=[(9, "trunk"), (len(prompt) - 2, "turn_start")],
            conversation_id=f"c{index}",
            **sampling,
        )
        for index, prompt in enumerate(prompts(count))
    ]


def run_together(bench: LoopBench, messages: list[Submit]) -> list[list[int]]:
    for message in messages:
        bench.loop.receive(message)
    bench.run()
    return [bench.tokens(message.request_id) for message in messages]


@cache
def plain(kind: TinyKind, count: int, sampled: bool) -> list[list[int]]:
    return run_together(make_loop(kind, prefix_caching=False), requests(count, **(SAMPLED if sampled else {})))


def truth(kind: TinyKind, count: int, sampled: bool = False) -> dict[str, list[int]]:
    outputs = plain(kind, count, sampled)
    return {f"r{index}": [*prompts(count)[index], *output] for index, output in enumerate(outputs)}


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_do_not_change_greedy_tokens(kind: TinyKind, count: int, right: float) -> None:
    drafter = ScriptedDrafter(truth(kind, count), VOCAB_SIZE, right=right)
    bench = make_drafting_loop(kind, drafter, LIMITS)
    assert run_together(bench, requests(count)) == plain(kind, count, False)
    assert drafter.num_proposed > 0
    num_steps = bench.stats().counters["num_steps"]
    assert num_steps >= NUM_NEW if right == 0.0 else num_steps < 0.8 * NUM_NEW


@pytest.mark.parametrize("kind", MORE_KINDS)
def test_drafts_do_not_change_the_tokens_of_other_kinds(kind: TinyKind) -> None:
    drafter = ScriptedDrafter(truth(kind, 3), VOCAB_SIZE, right=0.6)
    bench = make_drafting_loop(kind, drafter, LIMITS, max_step_tokens=40)
    assert run_together(bench, requests(3)) == plain(kind, 3, False)


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_do_not_change_sampled_tokens(kind: TinyKind, right: float) -> None:
    drafter = ScriptedDrafter(truth(kind, 4, True), VOCAB_SIZE, right=right)
    assert run_together(make_drafting_loop(kind, drafter, LIMITS), requests(4, **SAMPLED)) == plain(kind, 4, True)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_one_node_and_linear_drafts_take_the_same_path(length: int) -> None:
    limits = SpeculationConfig(length, 1, length)
    drafter = ScriptedDrafter(truth("hybrid", 2), VOCAB_SIZE, right=0.5)
    assert run_together(make_drafting_loop("hybrid", drafter, limits), requests(2)) == plain("hybrid", 2, False)


@pytest.mark.parametrize("right", [0.3, 1.0])
@pytest.mark.parametrize("kind", ["hybrid", "gated_delta", "attention_only"])
def test_suspended_requests_go_on_with_the_same_tokens(kind: TinyKind, right: float) -> None:
    messages = [submit(f"r{index}", prompt, 85, boundaries=[(9, "trunk")]) for index, prompt in enumerate(prompts(3))]
    outputs = run_together(make_loop(kind, prefix_caching=False), messages)
    whole = {m.request_id: [*m.prompt_ids, *output] for m, output in zip(messages, outputs, strict=True)}
    drafter = ScriptedDrafter(whole, VOCAB_SIZE, right=right)
    bench = make_drafting_loop(kind, drafter, LIMITS, num_pages=36)
    assert run_together(bench, messages) == outputs
    assert bench.stats().counters["num_suspensions"] > 0
    assert bench.finished("r0").num_suspensions == 0


@pytest.mark.parametrize("right", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_turn_reuses_as_much_as_without_drafts(kind: TinyKind, right: float) -> None:
    cold, warm = make_loop(kind, prefix_caching=False), make_loop(kind)
    known: dict[str, list[int]] = {}
    drafting = make_drafting_loop(kind, ScriptedDrafter(known, VOCAB_SIZE, right=right), LIMITS)
    history = prompts(1)[0]
    for turn in range(9):  # turns end at every offset of a page
        name = f"turn{turn}"
        boundaries = [(9, "trunk"), (len(history), "turn_start")]
        message = submit(name, history, 9 + turn, boundaries=boundaries, conversation_id="c")  # type: ignore[arg-type]
        for engine in (cold, warm, drafting):
            engine.loop.receive(message)
            engine.run()
            known[name] = [*history, *engine.tokens(name)]
        assert cold.tokens(name) == warm.tokens(name) == drafting.tokens(name)
        assert drafting.finished(name).num_cached_tokens == warm.finished(name).num_cached_tokens
        if turn:
            assert drafting.finished(name).num_cached_tokens == len(history) - 4
        history = [*history, *cold.tokens(name), 3 + turn, 4, 5]
        for engine in (warm, drafting):
            engine.loop.receive(EndTurn(name, len(history) - 3))


@pytest.mark.parametrize("kind", KINDS)
def test_turns_whose_last_tokens_are_not_repeated_end_a_part_of_a_page_earlier(kind: TinyKind) -> None:
    """Always where tokens are decoded in place; with drafts where a history reaches back so far."""
    known: dict[str, list[int]] = {}
    drafter = ScriptedDrafter(known, VOCAB_SIZE, right=0.7)
    cold, plain, drafting = (
        make_loop(kind, prefix_caching=False),
        make_loop(kind),
        make_drafting_loop(kind, drafter, LIMITS),
    )
    history, num_repeated = prompts(1)[0], 0
    lost: list[tuple[LoopBench, list[int]]] = [(plain, []), (drafting, [])]
    for turn in range(8):
        name = f"turn{turn}"
        message = submit(name, history, 23, boundaries=[(len(history), "turn_start")], conversation_id="c")
        for engine in (cold, plain, drafting):
            engine.loop.receive(message)
            engine.run()
            known[name] = [*history, *engine.tokens(name)]
        assert cold.tokens(name) == plain.tokens(name) == drafting.tokens(name)
        for engine, tokens in lost:
            tokens.append(num_repeated - engine.finished(name).num_cached_tokens)
            engine.loop.receive(EndTurn(name, len(history) + 20))
            engine.loop._scheduler._cache.check()
        num_repeated = len(history) + 23 - 3  # the last token was never computed, two more are trimmed
        history = [*known[name][:num_repeated], 3 + turn, 4, 5]
    # Learnt from the first turn. The last one ended one token behind a page's end, which is not repeated either.
    assert lost[0][1] == [0, 20, 4, 3, 2, 1, 0, 23]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_token_inside_an_accepted_path_ends_the_turn_there(kind: TinyKind) -> None:
    (output,) = plain(kind, 1, False)
    prompt = prompts(1)[0]
    for stop in range(8, 24):
        if output[stop] in output[:stop]:
            continue
        known = {"a": [*prompt, *output], "next": []}
        bench = make_drafting_loop(kind, ScriptedDrafter(known, VOCAB_SIZE, right=1.0), LIMITS)
        bench.loop.receive(submit("a", prompt, NUM_NEW, conversation_id="c", stop_token_ids=(output[stop],)))
        bench.run()
        assert bench.tokens("a") == output[: stop + 1]
        bench.loop.receive(EndTurn("a", 1 << 30))
        again = [*prompt, *output[: stop + 1], 7]
        known["next"] = [*again, *run_together(make_loop(kind), [submit("next", again, 12)])[0]]
        bench.loop.receive(submit("next", again, 12, conversation_id="c"))
        bench.run()
        assert bench.tokens("next") == known["next"][len(again) :]
        # All but the stop token, which was never fed to the model, and the new one.
        assert bench.finished("next").num_cached_tokens == len(again) - 2


@pytest.mark.parametrize("right", [0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_that_comes_late_ends_the_turn_where_it_is_repeated(kind: TinyKind, right: float) -> None:
    """At every place of an answer longer than a history: what was accepted behind it never becomes a part of a row."""
    prompt, num_new = prompts(1)[0], 90
    whole = submit("a", prompt, num_new)
    (output,) = run_together(make_loop(kind, prefix_caching=False), [whole])
    for repeated in range(8, num_new - 20, 7):
        known = {"a": [*prompt, *output], "next": []}
        bench = make_drafting_loop(kind, ScriptedDrafter(known, VOCAB_SIZE, right=right, seed=repeated), LIMITS)
        boundaries = [(len(prompt), "turn_start")]
        first = submit("a", prompt, num_new, boundaries=boundaries, conversation_id="c", may_be_stopped=True)  # type: ignore[arg-type]
        bench.loop.receive(first)
        while len(bench.tokens("a")) < repeated + 2:
            bench.loop.step()
            assert bench.loop.has_work
        bench.loop.step()  # while the stop is on its way
        num_ahead = len(bench.tokens("a")) - repeated
        bench.loop.receive(Stop("a", repeated))
        bench.run()
        bench.loop.receive(EndTurn("a", len(prompt) + repeated))
        assert bench.finished("a").reason == "stop"
        again = [*prompt, *output[:repeated], 7]
        known["next"] = [*again, *run_together(make_loop(kind), [submit("next", again, 12)])[0]]
        bench.loop.receive(submit("next", again, 12, conversation_id="c"))
        bench.run()
        assert bench.tokens("next") == known["next"][len(again) :]
        assert 2 < num_ahead <= 17
        assert bench.finished("next").num_cached_tokens == len(prompt) + repeated
        bench.loop._scheduler._cache.check()


def test_an_aborted_request_leaves_nothing_behind() -> None:
    drafter = ScriptedDrafter(truth("hybrid", 4), VOCAB_SIZE, right=0.8)
    bench = make_drafting_loop("hybrid", drafter, LIMITS)
    messages = requests(4)
    for message in messages:
        bench.loop.receive(message)
    for step in range(12):
        bench.loop.step()
        if step in (5, 8):
            bench.loop.receive(Abort(f"r{step - 5}"))
    bench.run()
    cache = bench.loop._scheduler._cache
    cache.check()
    for index in (1, 2):
        assert bench.tokens(f"r{index}") == plain("hybrid", 4, False)[index]
    # Its conversation goes on where its turn began.
    again = [*messages[0].prompt_ids, *plain("hybrid", 4, False)[0][:2], 7]
    bench.loop.receive(submit("again", again, 1, conversation_id="c0"))
    bench.run()
    assert bench.tokens("again") == run_together(make_loop("hybrid"), [submit("again", again, 1)])[0]
    assert bench.finished("again").num_cached_tokens == len(messages[0].prompt_ids) - 2


def test_logprobs_of_drafted_tokens_are_those_without_drafts() -> None:
    (message,) = requests(1, num_logprobs=2)
    entries = []
    for bench in (
        make_loop("hybrid"),
        make_drafting_loop("hybrid", ScriptedDrafter(truth("hybrid", 1), VOCAB_SIZE, right=1.0), LIMITS),
    ):
        assert run_together(bench, [message]) == plain("hybrid", 1, False)
        found = [entry for event in bench.events if isinstance(event, Tokens) for entry in event.logprobs or ()]
        assert len(found) == NUM_NEW
        entries.append([entry.logprob for entry in found])
    assert entries[1] == pytest.approx(entries[0], abs=1e-4)


def test_the_bundled_model_drafts_for_itself_in_sixteen_bits() -> None:
    # Rows keep float32 while histories have the weights' type.
    events: list[FromEngine] = []
    config = EngineConfig(model="demo", dtype="bfloat16", speculation="mtp", num_pages=200, num_state_rows=20)
    bench = LoopBench(build_engine(config, events.append)[0], events)
    bench.loop.receive(submit("a", order_desk_prompts(1)[0], 24))
    bench.run()
    end = bench.finished("a")
    assert end.reason in ("stop", "length"), end.message
    assert end.num_accepted_nodes > 0
