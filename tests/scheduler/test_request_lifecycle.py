"""Stops, lengths, aborts in every state, suspension, failing steps: one Finished each, nothing held afterwards."""

from __future__ import annotations

import pytest
from content_probe import expected_output
from scheduler_builders import VOCAB_SIZE, Bench, make_bench, make_request

from turnkeep.scheduler.events import Admitted


def check_nothing_is_held(bench: Bench) -> None:
    bench.cache.check()
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_suspended) == (0, 0, 0)
    pools = bench.cache.stats()
    assert bench.cache.can_provide(pools.num_pages, pools.num_rows)


def test_max_new_tokens_ends_with_length() -> None:
    bench = make_bench()
    request = make_request("r", 10, 7)
    prompt = list(request.token_ids)
    bench.scheduler.submit(request)
    bench.run()
    assert bench.outputs()["r"] == expected_output(prompt, 7, VOCAB_SIZE)
    finished = bench.finished()["r"]
    assert (finished.reason, finished.num_output_tokens, finished.num_prompt_tokens) == ("length", 7, 10)
    check_nothing_is_held(bench)


@pytest.mark.parametrize(("ignore_eos", "min_new_tokens", "length"), [(False, 0, 3), (True, 0, 9), (False, 4, 9)])
def test_a_stop_token_ends_the_request_where_it_counts(ignore_eos: bool, min_new_tokens: int, length: int) -> None:
    bench = make_bench()
    prompt = make_request("x", 10).token_ids
    expected = expected_output(prompt, 9, VOCAB_SIZE)
    assert expected[2] not in expected[:2] + expected[3:]
    bench.scheduler.submit(
        make_request(
            "r", prompt, 9, stop_token_ids=(expected[2],), ignore_eos=ignore_eos, min_new_tokens=min_new_tokens
        )
    )
    bench.run()
    assert bench.outputs()["r"] == expected[:length]
    assert bench.finished()["r"].reason == ("stop" if length == 3 else "length")


def test_stop_finishes_a_decoding_request_and_keeps_its_turn_end() -> None:
    bench = make_bench()
    bench.scheduler.submit(make_request("r", 10, 50, conversation_id="c"))
    for _ in range(4):
        bench.step()
    bench.scheduler.stop("r")
    bench.scheduler.end_turn("r", 1000)
    bench.run()
    assert bench.finished()["r"].reason == "stop"
    prompt = list(make_request("x", 10).token_ids) + bench.outputs()["r"] + [1]
    assert bench.cache.match("", prompt).num_tokens == 13
    check_nothing_is_held(bench)


def test_stop_in_the_queue_and_in_prefill_finishes_without_an_answer() -> None:
    bench = make_bench(max_running=1, max_step_tokens=4)
    bench.scheduler.submit(make_request("prefilling", 10, salt=1))
    bench.scheduler.submit(make_request("waiting", 10, salt=2))
    bench.step()
    bench.scheduler.stop("waiting")
    bench.scheduler.stop("prefilling")
    bench.scheduler.stop("unknown")
    bench.run()
    assert {key: finished.reason for key, finished in bench.finished().items()} == {
        "prefilling": "stop",
        "waiting": "stop",
    }
    check_nothing_is_held(bench)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_abort_releases_everything_in_every_state(num_steps: int) -> None:
    bench = make_bench(max_running=2, max_step_tokens=8)
    for index in range(4):
        bench.scheduler.submit(make_request(f"r{index}", 12, 50, salt=index, boundaries=[(5, "trunk")]))
    for _ in range(num_steps):
        bench.step()
    for index in range(4):
        bench.scheduler.abort(f"r{index}")
        bench.cache.check()
    bench.scheduler.abort("unknown")
    bench.run(max_steps=0)
    assert [finished.reason for finished in bench.finished().values()] == ["abort"] * 4
    check_nothing_is_held(bench)


def test_an_aborted_request_leaves_its_snapshots_to_the_next_one() -> None:
    bench = make_bench(max_step_tokens=8)
    bench.scheduler.submit(make_request("r", 30, boundaries=[(6, "trunk")]))
    bench.step()
    bench.step()
    bench.scheduler.abort("r")
    bench.scheduler.submit(make_request("again", 30))
    bench.run()
    assert bench.finished()["again"].num_cached_tokens == 6


def test_the_youngest_gives_way_when_pages_are_short_and_no_token_changes() -> None:
    bench = make_bench(num_pages=19, decode_reserve_tokens=0)
    for index in range(3):
        bench.scheduler.submit(make_request(f"r{index}", 12, 30, salt=index))
    suspended: list[int] = []
    oldest_progress: list[int] = []
    while bench.scheduler.has_work:
        bench.step()
        bench.cache.check()
        suspended.append(bench.scheduler.stats().num_suspended)
        oldest_progress.append(len(bench.outputs().get("r0", [])))
    assert max(suspended) >= 1
    assert oldest_progress[:30] == list(range(1, 31))  # one token in every step
    finished = bench.finished()
    assert finished["r0"].num_suspensions == 0
    assert finished["r2"].num_suspensions >= 1
    for index in range(3):
        prompt = make_request("x", 12, salt=index).token_ids
        assert bench.outputs()[f"r{index}"] == expected_output(prompt, 30, VOCAB_SIZE)
    admitted = [event.request_id for event in bench.events if isinstance(event, Admitted)]
    assert len(admitted) == 3  # told once, however often it was resumed
    check_nothing_is_held(bench)


def test_a_suspended_request_enters_before_a_new_one() -> None:
    bench = make_bench(num_pages=19, decode_reserve_tokens=0)
    for index in range(3):
        bench.scheduler.submit(make_request(f"r{index}", 12, 30, salt=index))
    while not bench.scheduler.stats().num_suspended:
        bench.step()
    bench.scheduler.submit(make_request("new", 12, 30, salt=8))
    bench.run()
    ends = list(bench.finished())
    assert ends.index("r2") < ends.index("new")


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_a_suspended_request_can_be_ended(end: str) -> None:
    bench = make_bench(num_pages=19, decode_reserve_tokens=0)
    for index in range(3):
        bench.scheduler.submit(make_request(f"r{index}", 12, 30, salt=index))
    while not bench.scheduler.stats().num_suspended:
        bench.step()
    getattr(bench.scheduler, end)("r2")
    bench.run()
    assert bench.finished()["r2"].reason == end
    check_nothing_is_held(bench)


def test_a_failing_step_ends_its_requests_and_the_others_go_on() -> None:
    bench = make_bench(max_step_tokens=6)
    bench.scheduler.submit(make_request("first", 6, 3, salt=1))
    bench.scheduler.submit(make_request("second", 6, 3, salt=2))
    bench.probe.fail_next = 1
    bench.run()
    finished = bench.finished()
    assert finished["first"].reason == "error"
    assert finished["first"].message == "the probe was told to fail"
    assert finished["second"].reason == "length"
    assert bench.outputs()["second"] == expected_output(make_request("x", 6, salt=2).token_ids, 3, VOCAB_SIZE)
    check_nothing_is_held(bench)


def test_copies_of_a_failed_step_are_made_again_for_the_requests_that_go_on() -> None:
    """Both resume from a snapshot in the step that fails, but only one of them is part of it."""
    bench = make_bench(max_step_tokens=6)
    trunk = make_request("x", 22).token_ids
    bench.scheduler.submit(make_request("before", trunk, 1, boundaries=[(18, "trunk")]))
    bench.run()
    bench.scheduler.submit(make_request("first", [*trunk[:18], *range(6)], 3))
    bench.scheduler.submit(make_request("second", [*trunk[:18], *range(10, 16)], 3))
    bench.probe.fail_next = 1
    bench.run()
    assert bench.finished()["first"].reason == "error"
    assert bench.outputs()["second"] == expected_output([*trunk[:18], *range(10, 16)], 3, VOCAB_SIZE)
    assert bench.finished()["second"].num_cached_tokens == 18
    check_nothing_is_held(bench)


def test_ending_everything_ends_each_request_once() -> None:
    bench = make_bench(max_running=2)
    for index in range(5):
        bench.scheduler.submit(make_request(f"r{index}", salt=index))
    bench.step()
    bench.scheduler.end_all("abort", "the engine was closed")
    bench.run(max_steps=0)
    assert [finished.message for finished in bench.finished().values()] == ["the engine was closed"] * 5
    check_nothing_is_held(bench)


def test_the_table_of_turn_handles_is_bounded() -> None:
    bench = make_bench(max_turn_handles=2)
    for index in range(4):
        bench.scheduler.submit(make_request(f"r{index}", 6, 2, salt=index))
        bench.run()
    for index in range(4):
        bench.scheduler.end_turn(f"r{index}", 0)
        bench.scheduler.end_turn(f"r{index}", 0)  # a second time is ignored
    # The handles of r0 and r1 were let go: their turn ends stay until they are evicted.
    matches = [
        bench.cache.match("", [*make_request("x", 6, salt=i).token_ids, *bench.outputs()[f"r{i}"]]).num_tokens
        for i in range(4)
    ]
    assert matches == [7, 7, 6, 6]  # of the others the end of the prompt is left, for a second try


def test_closing_a_conversation_lets_its_snapshots_go_first() -> None:
    bench = make_bench(num_state_rows=4, max_running=1)
    for index, conversation in enumerate(["kept", "closed"]):
        bench.scheduler.submit(make_request(conversation, 8, 2, salt=index, conversation_id=conversation))
        bench.run()
        bench.scheduler.end_turn(conversation, 100)
    bench.scheduler.close_conversation("", "closed")
    for index in range(2):
        bench.scheduler.submit(make_request(f"other{index}", 8, 2, salt=index + 5, boundaries=[(4, "trunk")]))
        bench.run()
        bench.scheduler.end_turn(f"other{index}", 0)

    def reused(name: str, salt: int) -> int:
        prompt = list(make_request("x", 8, salt=salt).token_ids) + bench.outputs()[name] + [3]
        return bench.cache.match("", prompt).num_tokens

    assert reused("closed", 1) == 0
    bench.cache.check()


def test_without_prefix_caching_everything_is_computed_and_released() -> None:
    bench = make_bench(prefix_caching=False)
    for index in range(3):
        bench.scheduler.submit(make_request(f"r{index}", 20, 4, boundaries=[(10, "trunk")]))
        bench.run()
        bench.scheduler.end_turn(f"r{index}", 100)
    assert all(finished.num_cached_tokens == 0 for finished in bench.finished().values())
    pools = bench.cache.stats()
    assert (pools.num_free_pages, pools.num_free_rows) == (pools.num_pages, pools.num_rows)
