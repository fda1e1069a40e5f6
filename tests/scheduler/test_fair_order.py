"""Tenants share fairly: a burst of one does not push the others back."""

from __future__ import annotations

from scheduler_builders import Bench, make_bench, make_request

from turnkeep.scheduler.events import Admitted
from turnkeep.scheduler.fair_order import LIKELY_OUTPUT_TOKENS, MAX_TENANTS, FairOrder


def admitted(bench: Bench) -> list[str]:
    return [event.request_id for event in bench.events if isinstance(event, Admitted)]


def submit(bench: Bench, request_id: str, tenant: str, *, num_prompt_tokens: int = 10, priority: int = 0) -> None:
    request = make_request(request_id, num_prompt_tokens, priority=priority, salt=len(request_id) + ord(request_id[-1]))
    request.tenant = request.cache_root = tenant
    bench.scheduler.submit(request)


def test_one_request_of_another_tenant_passes_a_burst() -> None:
    bench = make_bench(max_running=1)
    for index in range(10):
        submit(bench, f"fleet{index}", "fleet")
    submit(bench, "single", "other")
    bench.run()
    assert admitted(bench)[:3] in (["fleet0", "single", "fleet1"], ["single", "fleet0", "fleet1"])
    assert [one for one in admitted(bench) if one != "single"] == [f"fleet{index}" for index in range(10)]


def test_shares_are_of_tokens_not_of_requests() -> None:
    bench = make_bench(max_running=1, num_pages=200)
    for index in range(4):
        submit(bench, f"long{index}", "a", num_prompt_tokens=120)
        submit(bench, f"short{index}", "b", num_prompt_tokens=4)
    bench.run()
    order = admitted(bench)
    assert order.index("short3") < order.index("long2")


def test_alone_a_tenant_is_served_in_order_of_arrival_and_priority_goes_first() -> None:
    bench = make_bench(max_running=1)
    for index in range(6):
        submit(bench, f"r{index}", "a", num_prompt_tokens=30 - 4 * index)
    submit(bench, "urgent", "b", priority=-1)
    bench.run()
    assert [one for one in admitted(bench) if one != "urgent"] == [f"r{index}" for index in range(6)]
    assert admitted(bench).index("urgent") <= 1


def test_who_was_idle_has_saved_up_nothing() -> None:
    order = FairOrder()
    order.start("busy", 1000, 0)
    later = order.start("busy", 1000, 0)
    order.admitted(later)
    assert order.start("idle", 10, 0) == later
    assert order.start("idle", 10, 10**9) == later + 10
    assert order.start("idle", 10, 0) == later + 20 + LIKELY_OUTPUT_TOKENS


def test_tenants_that_owe_nothing_are_forgotten() -> None:
    order = FairOrder()
    for index in range(3 * MAX_TENANTS):
        order.admitted(order.start(f"tenant{index}", 10, 0))
        assert len(order._ends) <= MAX_TENANTS
