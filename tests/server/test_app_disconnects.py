"""Clients that go away, engines that die, servers that shut down: nothing is left running, nothing looks complete."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest
from live_server import CHAT, LiveServer, events, live_server, saying, user
from scripted_engine import Script

from turnkeep.engine.messages import Submit
from turnkeep.server.chat_completions import convert_request
from turnkeep.server.engine_supervisor import HANG_S
from turnkeep.server.serve import drain
from turnkeep.server.text_model import TextModel


async def open_request(server: LiveServer, *, stream: bool, **fields: Any) -> asyncio.StreamWriter:
    """Send a request on a connection of its own and keep it open."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = json.dumps({"model": "demo", "messages": user("x"), "stream": stream, **fields}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    await writer.drain()
    return writer


async def leave(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "reset":
        writer.transport.abort()
    else:
        writer.close()
        await writer.wait_closed()


async def read_to_the_end(response: aiohttp.ClientResponse, pieces: list[bytes]) -> None:
    while data := await response.content.readany():
        pieces.append(data)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
async def test_a_client_that_leaves_aborts_its_request(
    text_model: TextModel, stage: str, stream: bool, how: str
) -> None:
    never = asyncio.Event()
    script = {
        "queue": saying(text_model, "Hi", admit=never),
        "prefill": saying(text_model, "Hi", pause_after=0, resume=never),
        "decode": saying(text_model, "Hi there", is_endless=True),
    }[stage]
    async with live_server(script, text_model=text_model) as server:
        writer = await open_request(server, stream=stream, ignore_eos=True)
        await server.engine.wait_until(lambda: server.engine.num_playing == 1)
        await leave(writer, how)
        await server.engine.wait_until(lambda: server.engine.num_playing == 0)
        assert server.engine.aborted == [server.engine.submitted[0].request_id]
        await server.until(lambda: server.service.num_open_turns == 0)
        assert await server.metric("turnkeep_requests_aborted_total") == 1


async def test_a_client_that_leaves_aborts_all_choices(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi", is_endless=True), text_model=text_model) as server:
        writer = await open_request(server, stream=True, n=4, ignore_eos=True)
        await server.engine.wait_until(lambda: server.engine.num_playing == 4)
        await leave(writer, "close")
        await server.engine.wait_until(lambda: server.engine.num_playing == 0)
        assert len(server.engine.aborted) == 4


async def test_leaving_after_the_last_event_is_no_abort(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi"), text_model=text_model) as server:
        for _ in range(5):
            await server.stream(conversation_id="c")
            async with aiohttp.ClientSession() as session:
                body = {"model": "demo", "messages": user("x"), "stream": True, "conversation_id": "c"}
                async with session.post(server.url + CHAT, json=body) as response:
                    while b"[DONE]" not in await response.content.readany():
                        pass
        await server.until(lambda: len(server.engine.ended_turns) == 10)
        assert server.engine.aborted == []
        assert await server.metric("turnkeep_requests_aborted_total") == 0


async def test_a_turn_that_was_finished_while_its_client_left_is_still_ended(text_model: TextModel) -> None:
    """The engine keeps the turn's snapshot until it is told how much of it will be repeated."""
    resume = asyncio.Event()
    script = saying(text_model, "Hi", pause_after=1, resume=resume)
    async with live_server(script, text_model=text_model) as server:
        body = {"model": "demo", "messages": user("x")}
        turn = await server.service.start_turn(convert_request(body), {}, "", 0.0)
        async with turn:
            await turn.next_events(None)
            resume.set()
            await server.engine.wait_until(lambda: server.engine.num_playing == 0)
        await server.until(lambda: len(server.engine.ended_turns) == 1)
        assert server.engine.aborted == []


async def test_many_connects_and_disconnects_leave_nothing_running(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi there", is_endless=True), text_model=text_model) as server:
        for number in range(100):
            writer = await open_request(server, stream=number % 2 == 0, ignore_eos=True)
            if number % 3:
                await asyncio.sleep(0)
            await leave(writer, "reset" if number % 5 else "close")
        await server.until(lambda: server.service.num_open_turns == 0 and server.engine.num_playing == 0)
        assert len(server.engine.aborted) == len(server.engine.submitted)


async def test_a_stream_that_breaks_says_so_and_does_not_end_cleanly(text_model: TextModel) -> None:
    script = saying(text_model, "Hi there", pause_after=1, resume=asyncio.Event())
    async with live_server(script, text_model=text_model) as server:
        body = {"model": "demo", "messages": user("x"), "stream": True}
        async with server.session.post(server.url + CHAT, json=body) as response:
            seen = b""
            while b'"content":"Hi"' not in seen:
                seen += await response.content.readany()
            server.engine.die()
            rest: list[bytes] = []
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_to_the_end(response, rest)
        seen += b"".join(rest)
        *_, last = events(seen)
        assert last["error"]["code"] == "server_error"
        assert "Internal server error" in last["error"]["message"]
        assert b"[DONE]" not in seen


async def test_the_official_client_raises_when_a_stream_breaks(text_model: TextModel) -> None:
    script = saying(text_model, "Hi there", pause_after=1, resume=asyncio.Event())
    async with live_server(script, text_model=text_model) as server:
        stream = await server.client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], stream=True
        )

        async def read() -> None:
            async for chunk in stream:
                if chunk.choices[0].delta.content == "Hi":
                    server.engine.die()

        with pytest.raises(openai.APIError, match="Internal server error"):
            await read()


async def test_after_a_death_a_plain_answer_is_503_and_a_new_engine_serves(text_model: TextModel) -> None:
    scripts = [saying(text_model, "Hi", pause_after=1, resume=asyncio.Event()), saying(text_model, "again")]

    def direct(submit: Submit) -> Script:
        return scripts[0] if len(server.engines) == 1 else scripts[1]

    async with live_server(direct, text_model=text_model) as server:
        waiting = asyncio.create_task(server.chat())
        await server.engine.wait_until(lambda: server.engine.num_playing == 1)
        server.engine.die()
        status, answer = await waiting
        assert (status, answer["error"]["type"]) == (503, "server_error")
        assert (await server.get("/health"))[0] == 503
        status, answer = await server.chat()
        assert (status, answer["error"]["code"]) == (503, "service_unavailable")
        await server.until(lambda: server.supervisor.is_ready)
        assert len(server.engines) == 2
        assert (await server.get("/health"))[0] == 200
        status, answer = await server.chat()
        assert answer["choices"][0]["message"]["content"] == "again"
        assert await server.metric("turnkeep_engine_restarts_total") == 1


async def test_an_engine_that_does_not_come_back_is_tried_again(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        make_engine, num_failures = server.supervisor._make_engine, 2

        def make_failing_engine() -> Any:
            nonlocal num_failures
            engine = make_engine()
            if num_failures:
                num_failures -= 1
                engine.start_error = "not enough memory"  # type: ignore[attr-defined]
            return engine

        server.supervisor._make_engine = make_failing_engine
        server.engine.die()
        await server.until(lambda: len(server.engines) == 4 and server.supervisor.is_ready)
        assert (await server.chat())[0] == 200


async def test_an_engine_that_hangs_is_replaced(text_model: TextModel) -> None:
    script = saying(text_model, "Hi", pause_after=1, resume=asyncio.Event())
    async with live_server(script, text_model=text_model) as server:
        waiting = asyncio.create_task(server.chat())
        await server.engine.wait_until(lambda: server.engine.num_playing == 1)
        server.engine.silent_s = HANG_S + 1
        assert (await waiting)[0] == 503
        await server.until(lambda: len(server.engines) == 2 and server.supervisor.is_ready)
        assert not server.engines[0].alive


async def test_draining_refuses_new_turns_and_lets_running_ones_finish(text_model: TextModel) -> None:
    resume = asyncio.Event()
    script = saying(text_model, "Hi there", pause_after=1, resume=resume)
    async with live_server(script, text_model=text_model) as server:
        running = asyncio.create_task(server.chat())
        await server.engine.wait_until(lambda: server.engine.num_playing == 1)
        draining = asyncio.create_task(drain(server.service, 5.0, asyncio.Event()))
        await server.until(lambda: server.service.is_draining)
        for path in ("/health", "/ready"):
            assert (await server.get(path))[0] == 503
        async with server.session.post(server.url + CHAT, json={}) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
        assert not draining.done()
        resume.set()
        status, answer = await running
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hi there")
        await draining


async def test_draining_ends_at_its_limit_and_at_a_second_signal(text_model: TextModel) -> None:
    script = saying(text_model, "Hi there", pause_after=1, resume=asyncio.Event())
    async with live_server(script, text_model=text_model) as server:
        running = asyncio.create_task(server.chat())
        await server.engine.wait_until(lambda: server.engine.num_playing == 1)
        await asyncio.wait_for(drain(server.service, 0.02, asyncio.Event()), 2)
        hurry = asyncio.Event()
        hurry.set()
        await asyncio.wait_for(drain(server.service, 60.0, hurry), 2)
        await server.supervisor.close()
        status, answer = await running
        assert (status, answer["error"]["code"]) == (503, "service_unavailable")
