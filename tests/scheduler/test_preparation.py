"""What a next turn will begin with is computed while nothing else is to do, for nobody, and gives way at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from content_probe import expected_output
from scheduler_builders import VOCAB_SIZE, Bench, make_bench, make_request

from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.scheduler.preparation import MAX_PREPARATIONS

ASKED = [(3 * place) % VOCAB_SIZE for place in range(20)]
NEXT = [*ASKED, *[(5 * place + 1) % VOCAB_SIZE for place in range(50)]]  # the template drops what was answered
MODELS = [{}, {"has_state": False}, {"has_pages": False}]


def answered(bench: Bench, conversation_id: str | None = "c", prompt: Sequence[int] = ASKED) -> None:
    """A turn whose answer the next prompt does not repeat."""
    name = f"turn{len(bench.finished())}"
    bench.scheduler.submit(
        make_request(name, prompt, 8, boundaries=[(len(prompt) - 1, "turn_start")], conversation_id=conversation_id)
    )
    bench.run()
    bench.scheduler.end_turn(name, len(prompt) - 1)


def prepare(bench: Bench, prefix: Sequence[int] = NEXT, conversation_id: str | None = "c") -> None:
    bench.scheduler.prepare("", conversation_id, EncodedTokens(prefix))


def asks(bench: Bench, name: str = "next", prompt: Sequence[int] = (*NEXT, 1, 2, 3), **options: object) -> int:
    """Submit and finish the next turn; how many of its tokens were cached. Its answer must be the right one."""
    bench.scheduler.submit(make_request(name, prompt, 4, conversation_id="c", **options))  # type: ignore[arg-type]
    bench.run()
    assert bench.outputs()[name] == expected_output(prompt, 4, VOCAB_SIZE)
    return bench.finished()[name].num_cached_tokens


def counts(bench: Bench) -> dict[str, int]:
    return dict(bench.scheduler.stats().num_preparations)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("conversation_id", ["c", None])
def test_a_prepared_prefix_is_there_when_the_next_turn_comes(
    model: dict[str, bool], conversation_id: str | None
) -> None:
    bench = make_bench(**model)  # type: ignore[arg-type]
    answered(bench, conversation_id)
    prepare(bench, NEXT, conversation_id)
    num_events = len(bench.events)
    bench.run()
    assert len(bench.events) == num_events, "nobody is told of it"
    assert asks(bench) == len(NEXT)
    bench.cache.check()


def test_without_idle_time_nothing_is_prepared() -> None:
    bench = make_bench()
    answered(bench)
    prepare(bench)
    assert asks(bench) == len(ASKED) - 1
    assert counts(bench) == {"started": 0, "finished": 0, "tokens": 0, "yields": 0, "dropped": 1}


def test_a_request_that_comes_meanwhile_runs_in_the_very_next_step() -> None:
    bench = make_bench()
    answered(bench)
    prepare(bench)
    bench.step()
    assert counts(bench)["tokens"] == 32
    bench.scheduler.submit(make_request("other", 10, 3, salt=9, conversation_id="d"))
    plan = bench.scheduler.plan()
    assert plan is not None
    assert [item.request_id for item in plan.items] == ["other"]
    bench.scheduler.apply(plan, bench.probe.run(plan))
    bench.run()
    assert bench.outputs()["other"] == expected_output(make_request("x", 10, salt=9).token_ids, 3, VOCAB_SIZE)
    # Afterwards it goes on where it was: every token of it was computed once.
    assert counts(bench) == {"started": 2, "finished": 1, "tokens": len(NEXT) - 19, "yields": 1, "dropped": 0}
    assert asks(bench) == len(NEXT)


def test_a_turn_that_comes_too_early_uses_what_is_prepared_so_far() -> None:
    bench = make_bench()
    answered(bench)
    prepare(bench)
    bench.step()
    assert asks(bench) == 19 + 32
    assert counts(bench) == {"started": 1, "finished": 0, "tokens": 32, "yields": 1, "dropped": 1}
    assert not bench.scheduler.has_work


def test_what_a_conversation_prepares_goes_when_it_is_closed() -> None:
    bench = make_bench()
    answered(bench)
    prepare(bench)
    bench.step()
    prepare(bench, [*NEXT, 4])
    bench.scheduler.close_conversation("", "c")
    assert not bench.scheduler.has_work
    assert counts(bench)["dropped"] == 2
    bench.cache.check()
    assert bench.cache.stats().num_open_sequences == 0


def test_a_preparation_whose_step_fails_is_given_up() -> None:
    bench = make_bench()
    answered(bench)
    prepare(bench)
    bench.probe.fail_next = 1
    bench.step()
    assert not bench.scheduler.has_work
    assert asks(bench) == 19


def test_what_is_there_already_is_not_prepared_again() -> None:
    bench = make_bench()
    answered(bench)
    prepare(bench)
    bench.run()
    prepare(bench, [*NEXT, 1, 2])
    bench.run()
    assert counts(bench)["started"] == 1


def test_without_room_or_without_prefix_caching_nothing_is_prepared() -> None:
    bench = make_bench(num_pages=12)
    prepare(bench)
    bench.run()
    assert counts(bench) == {"started": 0, "finished": 0, "tokens": 0, "yields": 0, "dropped": 1}
    bench = make_bench(prefix_caching=False)
    prepare(bench)
    assert not bench.scheduler.has_work


def test_the_number_of_waiting_preparations_is_bounded() -> None:
    bench = make_bench()
    for number in range(MAX_PREPARATIONS + 3):
        prepare(bench, [*NEXT, number % VOCAB_SIZE], f"c{number}")
    assert counts(bench)["dropped"] == 3
    bench.scheduler.end_all("abort")
    assert not bench.scheduler.has_work


def test_prepared_tokens_are_counted_apart_and_so_are_those_that_nobody_used() -> None:
    bench = make_bench()
    answered(bench)
    computed = bench.scheduler.stats().num_computed_tokens
    opens = bench.cache.stats().counters.num_opens
    prepare(bench)
    bench.run()
    prepare(bench, [9] * 40, "d")
    bench.run()
    counters = bench.cache.stats().counters
    assert bench.scheduler.stats().num_computed_tokens == computed
    assert counters.num_opens == opens
    assert counters.num_prepared_tokens == len(NEXT) - 19 + 40
    assert counters.num_used_prepared_tokens == counters.num_unused_prepared_tokens == 0
    asks(bench)
    bench.cache.clear()
    counters = bench.cache.stats().counters
    assert counters.num_used_prepared_tokens == len(NEXT) - 19
    assert counters.num_unused_prepared_tokens == 40


def test_the_turn_that_follows_takes_the_place_of_what_was_prepared() -> None:
    """The prepared snapshot is one of the conversation's own: superseded by the next turn's end, never piled up."""
    bench = make_bench()
    prefix = list(ASKED)
    for turn in range(6):
        answered(bench, prompt=[*prefix, turn])
        prefix = [*prefix, turn, 40, 41, 42, *[turn + 20] * 16]
        prepare(bench, prefix)
        bench.run()
        stats = bench.cache.stats()
        assert sum(stats.num_snapshots.values()) - stats.num_superseded_snapshots <= 3
        bench.cache.check()
