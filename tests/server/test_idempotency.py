"""Idempotency-Key: carried out once, answered twice; never across tenants, bodies or failures."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from live_server import CHAT, LiveServer, live_server, saying, user

from turnkeep.server import errors
from turnkeep.server.idempotency import IdempotencyTable
from turnkeep.server.text_model import TextModel

Key = tuple[str, str, str]
KEY: Key = ("tenant", "/path", "key")


async def send(
    server: LiveServer, key: str, text: str = "hi", api_key: str = "", **fields: Any
) -> tuple[int, bytes, str | None]:
    body = json.dumps({"model": "demo", "messages": user(text), **fields})
    headers = {"Idempotency-Key": key, "Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    async with server.session.post(server.url + CHAT, data=body, headers=headers) as response:
        return response.status, await response.read(), response.headers.get("Idempotent-Replayed")


async def test_the_same_request_under_one_key_is_carried_out_once(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "fine"), text_model=text_model) as server:
        first, second = await send(server, "k1"), await send(server, "k1")
        assert (first[0], first[2]) == (200, None)
        assert second == (200, first[1], "true")
        assert len(server.engine.submitted) == 1
        assert (await send(server, "k2"))[2] is None


async def test_another_body_under_the_key_is_refused(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "fine"), text_model=text_model) as server:
        await send(server, "k")
        status, body, _ = await send(server, "k", "something else")
        assert (status, json.loads(body)["error"]["code"]) == (400, "idempotency_key_reused")


async def test_while_the_first_runs_the_second_is_told_to_wait(text_model: TextModel) -> None:
    resume = asyncio.Event()
    script = saying(text_model, "one two", pause_after=1, resume=resume)
    async with live_server(script, text_model=text_model) as server:
        first = asyncio.create_task(send(server, "k"))
        await server.engine.wait_until(lambda: len(server.engine.submitted) == 1)
        status, body, _ = await send(server, "k")
        assert (status, json.loads(body)["error"]["code"]) == (409, "idempotency_in_progress")
        resume.set()
        assert (await first)[0] == 200


async def test_keys_of_two_tenants_do_not_meet(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "fine"), text_model=text_model, api_keys=("a", "b")) as server:
        assert (await send(server, "k", api_key="a"))[2] is None
        assert (await send(server, "k", api_key="b"))[2] is None
        assert len(server.engine.submitted) == 2


async def test_failures_and_streams_are_carried_out_again(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "fine"), text_model=text_model) as server:
        for _ in range(2):
            assert (await send(server, "bad", temperature=-1))[0::2] == (400, None)
            assert (await send(server, "stream", stream=True))[0::2] == (200, None)
        assert (await send(server, "x" * 256))[0] == 400


def test_answers_are_forgotten_by_age_and_by_size() -> None:
    now = [0.0]
    table = IdempotencyTable(clock=lambda: now[0], max_bytes=1000)
    keys: list[Key] = [("t", "/p", str(number)) for number in range(10)]
    for key in keys:
        assert table.begin(key, b"d") is None
        table.end(key, web.Response(body=b"x" * 200))
    assert table.begin(keys[0], b"d") is None
    table.end(keys[0], None)
    assert table.begin(keys[9], b"d") is not None
    now[0] = 10_000.0
    assert table.begin(keys[9], b"d") is None


def test_an_answer_that_is_too_large_is_not_kept_and_a_running_request_is_never_forgotten() -> None:
    now = [0.0]
    table = IdempotencyTable(clock=lambda: now[0], max_bytes=1000)
    assert table.begin(KEY, b"d") is None
    now[0] = 10_000.0
    with pytest.raises(errors.ApiError, match="still running"):
        table.begin(KEY, b"d")
    table.end(KEY, web.Response(body=b"x" * 900))
    assert table.begin(KEY, b"d") is None
