"""Work beside the loop: order, urgency, errors, and ends that are told in the caller's thread."""

from __future__ import annotations

import threading

from turnkeep.cache.tiers.background import BackgroundThread


def test_work_runs_in_order_and_is_told_in_the_callers_thread() -> None:
    background = BackgroundThread()
    told: list[tuple[int, threading.Thread]] = []
    for number in range(20):
        background.submit(
            lambda number=number: number, lambda result: told.append((result, threading.current_thread()))
        )  # type: ignore[misc, arg-type, return-value]
    while len(told) < 20:
        background.wait(5)
        background.poll()
    assert [number for number, _ in told] == list(range(20))
    assert {thread for _, thread in told} == {threading.current_thread()}
    background.close()


def test_urgent_work_goes_first() -> None:
    background = BackgroundThread()
    gate = threading.Event()
    order: list[str] = []
    background.submit(lambda: gate.wait(5), lambda _: None)
    background.submit(lambda: order.append("write"), lambda _: None)
    background.submit(lambda: order.append("read"), lambda _: None, is_urgent=True)
    gate.set()
    num_told = 0
    while num_told < 3:
        assert background.wait(5)
        num_told += background.poll()
    assert order == ["read", "write"]
    background.close()


def test_an_error_is_a_result_and_the_thread_goes_on() -> None:
    background = BackgroundThread()
    results: list[object] = []
    background.submit(lambda: 1 // 0, results.append)
    background.submit(lambda: 5, results.append)
    while len(results) < 2:
        background.wait(5)
        background.poll()
    assert isinstance(results[0], ZeroDivisionError)
    assert results[1] == 5
    background.close()


def test_closing_leaves_queued_work_undone() -> None:
    background = BackgroundThread()
    gate, started = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        started.set()
        gate.wait(5)

    background.submit(first, lambda _: None)
    background.submit(lambda: done.append(1), lambda _: None)
    assert started.wait(5)
    threading.Timer(0.05, gate.set).start()
    background.close()
    assert not done
    assert not BackgroundThread().wait(0.0)
