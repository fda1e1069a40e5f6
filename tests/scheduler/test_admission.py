"""Who runs, who waits, who is refused, and that nobody waits for ever."""

from __future__ import annotations

import pytest
from content_probe import expected_output
from scheduler_builders import VOCAB_SIZE, Bench, make_bench, make_request

from turnkeep.scheduler.events import Admitted
from turnkeep.scheduler.request import Request
from turnkeep.scheduler.scheduler import DuplicateRequestError


def running(bench: Bench) -> int:
    return bench.scheduler.stats().num_running


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request("r", 150, 51), ("150", "51", "201", "max_model_len", "200")),
        (make_request("r", 100, 30), ("pages", "33", "31")),
        (make_request("r", []), ("empty",)),
        (make_request("r", 4, 0), ("max_new_tokens", "0")),
        (make_request("r", [1, 2, VOCAB_SIZE]), ("prompt", str(VOCAB_SIZE))),
        (make_request("r", [1], logit_bias={-3: 1.0}), ("logit_bias", "-3")),
        (make_request("r", [1], logit_bias={VOCAB_SIZE + 1: 1.0}), ("logit_bias", str(VOCAB_SIZE + 1))),
    ],
)
def test_what_can_never_run_ends_at_once_with_the_resource_and_the_numbers(
    request_: Request, words: tuple[str, ...]
) -> None:
    bench = make_bench(num_pages=32)
    bench.scheduler.submit(request_)
    bench.run(max_steps=0)
    finished = bench.finished()["r"]
    assert finished.reason == "refused"
    assert finished.message is not None
    assert all(word in finished.message for word in words), finished.message
    bench.cache.check()


def test_a_request_that_fills_the_whole_pool_runs() -> None:
    bench = make_bench(num_pages=11, page_size=4, num_state_rows=2)
    request = make_request("r", 30, 11)  # 40 computed tokens: 10 pages
    bench.scheduler.submit(request)
    bench.run()
    assert bench.outputs()["r"] == expected_output(request.token_ids[:30], 11, VOCAB_SIZE)
    bench.cache.check()


def test_a_request_that_fills_the_pool_runs_again_after_itself() -> None:
    """Its own snapshot holds pages that the resumed run needs."""
    bench = make_bench(num_pages=11, page_size=4, num_state_rows=2)
    for index in range(3):
        bench.scheduler.submit(make_request(f"r{index}", 30, 11, boundaries=[(22, "trunk"), (29, "turn_start")]))
        bench.run()
        bench.cache.check()
    outputs = bench.outputs()
    assert outputs["r0"] == outputs["r1"] == outputs["r2"]


def test_live_rows_bound_what_runs() -> None:
    bench = make_bench(max_running=3)
    for index in range(7):
        bench.scheduler.submit(make_request(f"r{index}", salt=index, max_new_tokens=20))
    bench.step()
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (3, 4)
    bench.run()
    assert all(finished.reason == "length" for finished in bench.finished().values())


def test_requests_are_admitted_in_order_of_arrival_within_a_priority() -> None:
    bench = make_bench(max_running=1)
    for index, priority in enumerate([1, 1, 0, 0, -5]):
        bench.scheduler.submit(make_request(f"r{index}", salt=index, priority=priority))
    bench.run()
    order = [event.request_id for event in bench.events if isinstance(event, Admitted)]
    assert order == ["r4", "r2", "r3", "r0", "r1"]


def test_a_large_waiting_request_lets_small_ones_pass() -> None:
    bench = make_bench(num_pages=21)
    bench.scheduler.submit(make_request("running", 30, 20, salt=1))
    bench.step()
    bench.scheduler.submit(make_request("large", 60, 4, salt=2))
    bench.scheduler.submit(make_request("small", 4, 2, salt=3))
    bench.step()
    assert {event.request_id for event in bench.events if isinstance(event, Admitted)} == {"running", "small"}
    bench.run()
    assert {finished.reason for finished in bench.finished().values()} == {"length"}


def test_a_large_waiting_request_is_passed_a_bounded_number_of_times() -> None:
    bench = make_bench(num_pages=21, max_bypassed=5)
    bench.scheduler.submit(make_request("first", 30, 20, salt=1))
    bench.step()
    bench.scheduler.submit(make_request("large", 60, 4, salt=2))
    index = 0
    admitted_after: int | None = None
    while admitted_after is None and index < 500:
        bench.scheduler.submit(make_request(f"small{index}", 4, 6, salt=index + 3))
        index += 1
        bench.step()
        order = [event.request_id for event in bench.events if isinstance(event, Admitted)]
        if "large" in order:
            admitted_after = order.index("large")
    assert admitted_after is not None
    assert admitted_after <= 1 + 5
    bench.run()


def test_a_blocked_request_is_not_matched_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(num_pages=21)
    bench.scheduler.submit(make_request("running", 30, 20, salt=1))
    bench.step()
    bench.scheduler.submit(make_request("large", 60, 4, salt=2))
    bench.step()
    calls = 0
    match = bench.cache.match

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return match(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.cache, "match", counted)
    for _ in range(5):
        bench.step()
    assert calls == 0


def test_waiting_and_matching_for_ever_leaks_nothing() -> None:
    bench = make_bench(num_pages=21)
    bench.scheduler.submit(make_request("first", 40, 4, boundaries=[(20, "trunk")], salt=1))
    bench.run()
    before = bench.cache.stats()
    for index in range(300):
        bench.scheduler.submit(make_request(f"r{index}", 40, 4, salt=1))
        bench.scheduler.abort(f"r{index}")
    bench.run()
    after = bench.cache.stats()
    assert (before.num_free_pages, before.num_free_rows) == (after.num_free_pages, after.num_free_rows)
    bench.cache.check()


def test_siblings_that_arrive_together_compute_their_shared_prefix_once() -> None:
    bench = make_bench(num_pages=129, max_step_tokens=16, max_running=10)
    trunk = make_request("x", 40).token_ids
    for index in range(10):
        bench.scheduler.submit(make_request(f"r{index}", [*trunk, index, index, 5], 3, boundaries=[(40, "trunk")]))
    bench.run()
    # 40 once, and of each request its own 3 tokens and the 2 that are fed back.
    assert bench.probe.num_computed_tokens == 40 + 10 * (3 + 2)
    for index in range(10):
        assert bench.outputs()[f"r{index}"] == expected_output([*trunk, index, index, 5], 3, VOCAB_SIZE)


def test_siblings_share_by_pages_alone_without_recurrent_layers() -> None:
    bench = make_bench(has_state=False, num_state_rows=1, num_pages=129, max_step_tokens=16, max_running=10)
    trunk = make_request("x", 40).token_ids
    for index in range(10):
        bench.scheduler.submit(make_request(f"r{index}", [*trunk, index, index, 5], 3, boundaries=[(40, "trunk")]))
    bench.run()
    assert bench.probe.num_computed_tokens == 40 + 10 * (3 + 2)


def test_siblings_go_on_when_the_first_one_is_aborted() -> None:
    bench = make_bench(num_pages=129, max_step_tokens=8)
    trunk = make_request("x", 40).token_ids
    for index in range(3):
        bench.scheduler.submit(make_request(f"r{index}", [*trunk, index], 3, boundaries=[(40, "trunk")]))
    bench.step()
    assert running(bench) == 1
    bench.scheduler.abort("r0")
    bench.run()
    assert {key: finished.reason for key, finished in bench.finished().items()} == {
        "r0": "abort",
        "r1": "length",
        "r2": "length",
    }


def test_prefixes_are_not_waited_for_across_cache_roots() -> None:
    bench = make_bench(num_pages=129, max_step_tokens=8)
    trunk = make_request("x", 40).token_ids
    for index in range(3):
        bench.scheduler.submit(
            make_request(f"r{index}", [*trunk, index], 3, boundaries=[(40, "trunk")], cache_root=f"tenant{index}")
        )
    bench.step()
    assert running(bench) == 3
    bench.run()
    assert all(finished.num_cached_tokens == 0 for finished in bench.finished().values())


def test_a_second_request_of_an_open_id_is_an_error_that_leaves_the_first_alone() -> None:
    bench = make_bench()
    bench.scheduler.submit(make_request("r", 10))
    with pytest.raises(DuplicateRequestError, match="'r'"):
        bench.scheduler.submit(make_request("r", 5))
    bench.run()
    assert bench.finished()["r"].num_prompt_tokens == 10
    bench.scheduler.submit(make_request("r", 5))  # an id is free again after its Finished
    assert bench.scheduler.has_work


def test_what_a_request_lost_is_told_when_it_is_admitted() -> None:
    """The pages of the trunk are there, no snapshot is: it is computed again."""
    bench = make_bench()
    trunk = list(make_request("x", 40).token_ids)
    bench.scheduler.submit(make_request("first", trunk, 1, boundaries=[(30, "trunk")]))
    bench.run()
    bench.scheduler.submit(make_request("second", [*trunk[:36], 1, 2, 3], 1))
    bench.run()
    admitted = {event.request_id: event for event in bench.events if isinstance(event, Admitted)}
    assert (admitted["first"].num_lost_tokens, admitted["first"].loss_reason) == (0, "none")
    assert (admitted["second"].num_cached_tokens, admitted["second"].num_lost_tokens) == (30, 6)
    assert admitted["second"].loss_reason == "no_snapshot"
