"""/v1/responses as a WebSocket."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientWebSocketResponse
from live_server import LiveServer, live_server, saying
from response_events import TERMINAL, check_events, without_ids

from turnkeep.server.responses import websocket
from turnkeep.server.text_model import TextModel

PATH = "/v1/responses"


@pytest.fixture
async def server(text_model: TextModel) -> AsyncIterator[LiveServer]:
    """Answers "answer 0", "answer 1", ..."""
    numbers = itertools.count()
    async with live_server(lambda _: saying(text_model, f"answer {next(numbers)}"), text_model=text_model) as running:
        yield running


async def send(socket: ClientWebSocketResponse, **fields: Any) -> None:
    await socket.send_json({"type": "response.create", "model": "demo", "store": False, **fields})


async def receive(socket: ClientWebSocketResponse) -> list[dict[str, Any]]:
    """The events of one response, or one error."""
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(10):
        while not events or events[-1]["type"] not in {*TERMINAL, "error"}:
            events.append(await socket.receive_json())
    return events


async def ask(socket: ClientWebSocketResponse, **fields: Any) -> dict[str, Any]:
    await send(socket, **fields)
    return check_events(await receive(socket))


def prompts(server: LiveServer) -> list[str]:
    return [server.service.text_model.tokenizer.decode(one.prompt_ids) for one in server.engine.submitted]


async def test_a_socket_tells_the_same_events_as_a_stream(text_model: TextModel) -> None:
    text = "<think>I think.</think>Hello!"
    async with live_server(saying(text_model, text), text_model=text_model) as server:
        async with server.session.ws_connect(server.url + PATH) as socket:
            by_socket = await ask(socket, input="x")
        plain = (await server.post({"model": "demo", "input": "x", "store": False}, PATH))[1]
    assert without_ids(by_socket) == without_ids(plain)


async def test_a_connection_continues_what_is_not_stored_and_only_it_does(server: LiveServer) -> None:
    async with server.session.ws_connect(server.url + PATH) as socket:
        first = await ask(socket, input="one")
        second = await ask(socket, input="two", previous_response_id=first["id"])
        await ask(socket, input="three", previous_response_id=second["id"])
        assert all(text in prompts(server)[-1] for text in ("one", "answer 0", "two", "answer 1", "three"))
        async with server.session.ws_connect(server.url + PATH) as other:
            await send(other, input="x", previous_response_id=second["id"])
            (error,) = await receive(other)
        # Only the newest one is remembered.
        await send(socket, input="x", previous_response_id=first["id"])
        (old,) = await receive(socket)
    for one in (error, old):
        assert (one["type"], one["status"], one["error"]["code"]) == ("error", 404, "previous_response_not_found")
    assert {one.conversation_id for one in server.engine.submitted} == {first["id"]}
    await server.engine.wait_until(lambda: server.engine.closed_conversations == [first["id"]])


async def test_a_failed_continuation_forgets_what_it_continued(server: LiveServer) -> None:
    async with server.session.ws_connect(server.url + PATH) as socket:
        first = await ask(socket, input="one")
        await send(socket, input="x", previous_response_id=first["id"], temperature=9)
        (error,) = await receive(socket)
        assert (error["status"], error["error"]["param"]) == (400, "temperature")
        await send(socket, input="x", previous_response_id=first["id"])
        (error,) = await receive(socket)
        assert error["error"]["code"] == "previous_response_not_found"
        await ask(socket, input="a new start")


async def test_stored_responses_outlive_the_connection(server: LiveServer) -> None:
    async with server.session.ws_connect(server.url + PATH) as socket:
        first = await ask(socket, input="one", store=True)
    async with server.session.ws_connect(server.url + PATH) as socket:
        await ask(socket, input="two", previous_response_id=first["id"])
    assert "answer 0" in prompts(server)[-1]
    assert server.engine.closed_conversations == []


async def test_requests_wait_for_their_turn(server: LiveServer) -> None:
    async with server.session.ws_connect(server.url + PATH) as socket:
        for text in ("one", "two", "three"):
            await send(socket, input=text)
        ids = [check_events(await receive(socket))["id"] for _ in range(3)]
    assert len(set(ids)) == 3
    assert [text in prompt for text, prompt in zip(("one", "two", "three"), prompts(server), strict=True)] == [True] * 3


async def test_bad_frames_are_answered_and_the_connection_goes_on(server: LiveServer) -> None:
    async with server.session.ws_connect(server.url + PATH) as socket:
        for frame in ("{", "[]", "5", '{"type": "session.update"}', "{}", '{"type": "response.create"}'):
            await socket.send_str(frame)
            (error,) = await receive(socket)
            assert (error["type"], error["status"]) == ("error", 400)
            assert set(error["error"]) == {"message", "type", "param", "code"}
        await socket.send_bytes(b"\xff\xfe")
        assert (await receive(socket))[0]["status"] == 400
        await ask(socket, input="x")


async def test_a_client_that_goes_away_ends_its_turn(text_model: TextModel) -> None:
    resume = asyncio.Event()
    async with live_server(saying(text_model, "a b", pause_after=1, resume=resume), text_model=text_model) as server:
        async with server.session.ws_connect(server.url + PATH) as socket:
            await send(socket, input="x")
            while (await socket.receive_json())["type"] != "response.output_text.delta":
                pass
        await server.engine.wait_until(lambda: len(server.engine.aborted) == 1)
        await server.until(lambda: server.service.num_open_turns == 0)


async def test_an_engine_that_dies_is_told_and_the_connection_goes_on(text_model: TextModel) -> None:
    resume = asyncio.Event()
    script = saying(text_model, "a b", pause_after=1, resume=resume)
    async with (
        live_server(script, text_model=text_model) as server,
        server.session.ws_connect(server.url + PATH) as socket,
    ):
        await send(socket, input="x")
        while (await socket.receive_json())["type"] != "response.output_text.delta":
            pass
        server.engine.die()
        events = [await socket.receive_json()]
        while events[-1]["type"] != "response.failed":
            events.append(await socket.receive_json())
        assert events[-1]["response"]["error"]["code"] == "server_error"
        resume.set()
        await server.until(lambda: len(server.engines) == 2 and server.supervisor.is_ready)
        assert (await ask(socket, input="x"))["status"] == "completed"


async def test_an_old_connection_is_ended_with_its_code(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_CONNECTION_S", 0.05)
    async with (
        live_server(saying(text_model, "x"), text_model=text_model) as server,
        server.session.ws_connect(server.url + PATH) as socket,
    ):
        (error,) = await receive(socket)
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)


async def test_a_socket_needs_a_key_like_everything_else(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model, api_keys=("key",)) as server:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await server.session.ws_connect(server.url + PATH)
        assert caught.value.status == 401
        headers = {"Authorization": "Bearer key"}
        async with server.session.ws_connect(server.url + PATH, headers=headers) as socket:
            await ask(socket, input="x")


async def test_a_server_that_ends_says_so_to_idle_connections(text_model: TextModel) -> None:
    async with aiohttp.ClientSession() as session:
        async with live_server(saying(text_model, "x"), text_model=text_model) as server:
            socket = await session.ws_connect(server.url + PATH)
            await ask(socket, input="x")
            receiving = asyncio.create_task(socket.receive())
        closed = await receiving
        assert (closed.type, closed.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.GOING_AWAY)


@pytest.mark.parametrize("origin", ["null", "http://elsewhere.example", "http://127.0.0.1", ""])
async def test_pages_of_other_origins_may_not_connect(server: LiveServer, origin: str) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await server.session.ws_connect(server.url + PATH, headers={"Origin": origin})
    assert caught.value.status == 403
    async with server.session.ws_connect(server.url + PATH, headers={"Origin": server.url}) as socket:
        await ask(socket, input="x")
