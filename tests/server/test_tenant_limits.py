"""Limits of one key: refused early, with a time after which trying again makes sense, and without harm to others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from live_server import live_server, saying, user

from turnkeep.server import errors
from turnkeep.server.tenant_limits import TenantLimits
from turnkeep.server.text_model import TextModel


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def refusal(limits: TenantLimits, tenant: str = "a") -> errors.ApiError | None:
    try:
        limits.check(tenant, num_waiting=0, max_waiting=10)
    except errors.ApiError as error:
        return error
    return None


def test_tokens_come_back_with_time_and_no_more_than_a_minutes_worth() -> None:
    clock = FakeClock()
    limits = TenantLimits(tokens_per_minute=600, clock=clock)
    limits.charge("a", 700)
    error = refusal(limits)
    assert error is not None
    assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 11)
    assert refusal(limits, "b") is None
    clock.now_s += 11.0
    assert refusal(limits) is None
    clock.now_s += 3600.0
    limits.charge("a", 600)
    assert refusal(limits) is not None


def test_what_was_cached_is_given_back() -> None:
    limits = TenantLimits(tokens_per_minute=100, clock=FakeClock())
    limits.charge("a", 150)
    limits.charge("a", 10 - 120)
    assert refusal(limits) is None


def test_without_limits_nothing_is_refused() -> None:
    limits = TenantLimits()
    for _ in range(100):
        limits.turn_opened("a")
    limits.charge("a", 10**9)
    assert refusal(limits) is None


def test_one_of_several_keys_fills_only_half_of_the_queue() -> None:
    limits = TenantLimits(num_tenants=2)
    limits.check("a", num_waiting=4, max_waiting=10)
    with pytest.raises(errors.ApiError, match="of this key"):
        limits.check("a", num_waiting=5, max_waiting=10)
    TenantLimits(num_tenants=1).check("a", num_waiting=9, max_waiting=10)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def test_a_key_over_its_tokens_gets_429_before_any_work_and_the_other_goes_on(text_model: TextModel) -> None:
    body = {"model": "demo", "messages": user("Hello, how is everybody today?")}
    script = saying(text_model, "fine")
    async with live_server(script, text_model=text_model, api_keys=("one", "two"), tokens_per_minute=12) as server:
        assert (await server.post(body, headers=key("one")))[0] == 200
        async with server.session.post(server.url + "/v1/chat/completions", json=body, headers=key("one")) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        assert (await server.post(body, headers=key("two")))[0] == 200
        assert len(server.engine.submitted) == 2
        assert len({submit.tenant for submit in server.engine.submitted}) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": user("Hi")}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/messages", {"messages": user("Hi"), "max_tokens": 5}),
        ("/v1/responses", {"input": "Hi"}),
    ],
)
async def test_every_way_to_a_turn_is_limited(text_model: TextModel, path: str, body: dict[str, Any]) -> None:
    async with live_server(saying(text_model, "fine"), text_model=text_model, tokens_per_minute=1) as server:
        statuses = [(await server.post({"model": "demo", **body}, path))[0] for _ in range(2)]
    assert statuses == [200, 429]


async def test_a_key_has_only_so_many_turns_open(text_model: TextModel) -> None:
    resume = asyncio.Event()
    script = saying(text_model, "one two", pause_after=1, resume=resume)
    async with live_server(script, text_model=text_model, max_turns_per_key=1) as server:
        first = asyncio.create_task(server.chat())
        await server.engine.wait_until(lambda: len(server.engine.submitted) == 1)
        assert (await server.chat())[0] == 429
        resume.set()
        assert (await first)[0] == 200
        assert (await server.chat())[0] == 200
