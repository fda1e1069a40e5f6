"""A request whose reader stops it some tokens late (a stop string) ends its turn where the next prompt repeats it: what
its row has too much is left, and the answer computed again from the end of the prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from engine_builders import LoopBench, make_loop, submit

from turnkeep.engine.messages import Abort, EndTurn, Stop
from turnkeep.models.tiny import TinyKind

KINDS: tuple[TinyKind, ...] = ("hybrid", "attention_free", "gated_delta", "short_conv", "attention_only")
PROMPT = [3 + (7 * index) % 90 for index in range(29)]


def until(bench: LoopBench, request_id: str, num_tokens: int) -> None:
    while len(bench.tokens(request_id)) < num_tokens:
        assert bench.loop.has_work
        bench.loop.step()


def num_computed(bench: LoopBench) -> int:
    return int(bench.stats().counters["num_computed_tokens"])


def next_turn(bench: LoopBench, prompt: Sequence[int]) -> tuple[list[int], int]:
    """Its tokens, and how many were reused."""
    bench.loop.receive(submit("next", prompt, 6, conversation_id="c"))
    bench.run()
    return bench.tokens("next"), bench.finished("next").num_cached_tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_late", [1, 9, 30])
def test_a_turn_ends_where_it_is_repeated_however_late_its_stop(kind: TinyKind, num_late: int) -> None:
    bench, repeated = make_loop(kind), 20
    bench.loop.receive(submit("a", PROMPT, 90, conversation_id="c", may_be_stopped=True))
    until(bench, "a", repeated + num_late)
    bench.loop.receive(Stop("a", repeated))
    bench.loop.receive(Stop("a", repeated))
    bench.run()
    said = bench.tokens("a")
    finished = bench.finished("a")
    assert (finished.reason, finished.num_output_tokens) == ("stop", len(said))
    assert len(said) == repeated + num_late
    bench.loop.receive(EndTurn("a", len(PROMPT) + repeated))
    again = [*PROMPT, *said[:repeated], 7]
    cold = make_loop(kind, prefix_caching=False)
    expected, _ = next_turn(cold, again)
    assert next_turn(bench, again) == (expected, len(PROMPT) + repeated)
    bench.loop._scheduler._cache.check()


def test_only_the_answer_is_computed_again() -> None:
    bench = make_loop("hybrid")
    bench.loop.receive(submit("a", PROMPT, 90, may_be_stopped=True))
    until(bench, "a", 24)
    before = num_computed(bench)
    bench.loop.receive(Stop("a", 20))
    bench.run()
    assert num_computed(bench) - before == 20


def test_no_room_is_asked_for_tokens_that_will_not_come() -> None:
    bench = make_loop("hybrid")
    bench.loop.receive(submit("a", PROMPT, 90, may_be_stopped=True))
    until(bench, "a", 24)
    bench.loop.receive(Stop("a", 20))
    (request,) = bench.loop._scheduler._waiting
    assert request.max_computed_tokens == len(PROMPT) + 20


def test_a_prompt_whose_end_was_not_kept_is_not_computed_again() -> None:
    bench = make_loop("hybrid", num_state_rows=2)  # the padding and the one that it runs in
    bench.loop.receive(submit("a", PROMPT, 90, may_be_stopped=True))
    until(bench, "a", 24)
    before = num_computed(bench)
    bench.loop.receive(Stop("a", 20))
    assert bench.finished("a").reason == "stop"
    bench.run()
    assert num_computed(bench) == before


def test_a_request_that_goes_back_can_be_aborted() -> None:
    bench = make_loop("hybrid")
    bench.loop.receive(submit("a", PROMPT, 90, may_be_stopped=True))
    until(bench, "a", 24)
    bench.loop.receive(Stop("a", 20))
    bench.loop.receive(Abort("a"))
    assert bench.finished("a").reason == "abort"
    bench.run()
    bench.loop._scheduler._cache.check()


@pytest.mark.parametrize("seed", [1, 2])
def test_stops_among_many_in_little_memory_disturb_nobody(seed: int) -> None:
    chance = random.Random(seed)
    prompts = {f"r{number}": [chance.randrange(3, 90) for _ in range(chance.randint(5, 40))] for number in range(9)}
    alone = make_loop("hybrid", prefix_caching=False)
    for name, prompt in prompts.items():
        alone.loop.receive(submit(name, prompt, 150, ignore_eos=True))
        alone.run()
    bench = make_loop("hybrid", num_pages=34, num_state_rows=9, max_running=5, max_step_tokens=16)
    stops = {name: chance.randint(1, 149) for name in prompts if chance.random() < 0.6}
    for name, prompt in prompts.items():
        bench.loop.receive(
            submit(name, prompt, 150, ignore_eos=True, conversation_id=name, may_be_stopped=name in stops)
        )
    while bench.loop.has_work:
        bench.loop.step()
        for name in [name for name, stop in stops.items() if len(bench.tokens(name)) >= stop]:
            bench.loop.receive(Stop(name, max(stops.pop(name) - chance.randint(0, 12), 0)))
        if chance.random() < 0.2:
            bench.loop._scheduler._cache.check()
    bench.loop._scheduler._cache.check()
    for name in prompts:
        said = bench.tokens(name)
        assert bench.finished(name).reason in ("stop", "length")
        assert said == alone.tokens(name)[: len(said)]
    counters = bench.stats().counters
    assert counters["num_resumptions"] > counters["num_suspensions"] > 0
