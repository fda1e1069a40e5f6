"""Chains, conversations, background responses, and what of it all is kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from live_server import LiveServer, live_server, saying
from response_events import read_events, read_until
from scripted_engine import Script

from turnkeep.server.responses import background
from turnkeep.server.text_model import TextModel

RESPONSES = "/v1/responses"
TOOLS: Any = [{"type": "function", "name": "get_order", "parameters": {"type": "object", "properties": {}}}]
CALL = '<think>I look.</think><tool_call>{"name": "get_order", "arguments": {"order": "B47"}}</tool_call>'


@pytest.fixture
async def server(text_model: TextModel) -> AsyncIterator[LiveServer]:
    """Answers "answer 0", "answer 1", ..."""
    numbers = itertools.count()
    async with live_server(lambda _: saying(text_model, f"answer {next(numbers)}"), text_model=text_model) as running:
        yield running


def last_prompt(server: LiveServer) -> str:
    return server.service.text_model.tokenizer.decode(server.engine.submitted[-1].prompt_ids)


async def test_a_chain_carries_the_whole_conversation_and_forks(server: LiveServer) -> None:
    create = server.client.responses.create
    first = await create(model="demo", input="one", instructions="First rule.")
    second = await create(model="demo", input="two", previous_response_id=first.id)
    await create(model="demo", input="three", previous_response_id=second.id, instructions="Third rule.")
    prompt = last_prompt(server)
    said = ["Third rule.", "one", "answer 0", "two", "answer 1", "three"]
    positions = [prompt.index(text) for text in said]
    assert positions == sorted(positions)
    assert "First rule." not in prompt
    await create(model="demo", input="other", previous_response_id=first.id)
    assert "two" not in last_prompt(server)
    assert "answer 0" in last_prompt(server)
    retrieved = await server.client.responses.retrieve(second.id)
    assert retrieved.previous_response_id == first.id


async def test_a_call_and_its_result_continue_a_chain(text_model: TextModel) -> None:
    texts = iter([CALL, "It was sent."])
    async with live_server(lambda _: saying(text_model, next(texts)), text_model=text_model) as server:
        create = server.client.responses.create
        first = await create(model="demo", input="Where?", tools=TOOLS)
        (call,) = [item for item in first.output if item.type == "function_call"]
        result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sent"}]
        second = await create(model="demo", input=result, previous_response_id=first.id, tools=TOOLS)
        before, after = server.engine.submitted
    assert second.output_text == "It was sent."
    # The turn goes on exactly where the model stopped.
    said = [*before.prompt_ids, *text_model.tokenizer.encode(CALL)]
    assert after.prompt_ids[: len(said)] == said


async def test_what_is_gone_or_was_never_stored_cannot_be_continued(server: LiveServer) -> None:
    create = server.client.responses.create
    unstored = await create(model="demo", input="x", store=False)
    first = await create(model="demo", input="one")
    second = await create(model="demo", input="two", previous_response_id=first.id)
    await server.client.responses.delete(first.id)
    for id in (unstored.id, first.id, second.id):
        with pytest.raises(openai.NotFoundError) as caught:
            await create(model="demo", input="x", previous_response_id=id)
        assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        await server.client.responses.retrieve(unstored.id)
    assert (await server.client.responses.retrieve(second.id)).output_text == "answer 2"


async def test_references_are_followed(server: LiveServer) -> None:
    first = await server.client.responses.create(model="demo", input="remember this")
    listed = await server.client.responses.input_items.list(first.id)
    items: Any = [{"type": "item_reference", "id": listed.data[0].id}, {"id": first.output[0].id}]
    await server.client.responses.create(model="demo", input=[*items, {"role": "user", "content": "go on"}])
    prompt = last_prompt(server)
    assert prompt.index("remember this") < prompt.index("answer 0") < prompt.index("go on")


async def test_input_items_come_in_pages(server: LiveServer) -> None:
    items: Any = [{"role": "user", "content": f"{number}"} for number in range(45)]
    response = await server.client.responses.create(model="demo", input=items)
    for order in ("asc", "desc"):
        for limit in (1, 7, 45, 100):
            pages = server.client.responses.input_items.list(response.id, limit=limit, order=order)
            texts = [item.content[0].text async for item in pages]  # type: ignore[union-attr]
            expected = [f"{number}" for number in range(45)]
            assert texts == (expected if order == "asc" else expected[::-1])
    for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=unknown"):
        status, answer = await server.get(f"{RESPONSES}/{response.id}/input_items?{query}")
        assert (status, answer["error"]["param"]) == (400, query.split("=")[0])


async def test_a_conversation_grows_turn_by_turn(server: LiveServer) -> None:
    client = server.client
    given: Any = [{"type": "message", "role": "user", "content": "zero"}]
    conversation = await client.conversations.create(items=given, metadata={"topic": "lamps"})
    for text in ("one", "two"):
        async with client.responses.stream(model="demo", input=text, conversation=conversation.id) as events:
            response = await events.get_final_response()
        assert response.conversation is not None
        assert response.conversation.id == conversation.id
    prompt = last_prompt(server)
    positions = [prompt.index(text) for text in ("zero", "one", "answer 0", "two")]
    assert positions == sorted(positions)
    items = [item async for item in client.conversations.items.list(conversation.id, order="asc", limit=2)]
    assert [item.role for item in items] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
    assert {submit.conversation_id for submit in server.engine.submitted} == {conversation.id}
    status, report = await server.get(f"/v1/conversations/{conversation.id}/cache")
    assert status == 200
    assert len(report["turns"]) == 2
    # Without a store the response cannot be fetched; the conversation has it all the same.
    unstored = await client.responses.create(model="demo", input="three", conversation=conversation.id, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)
    newest = await client.conversations.items.list(conversation.id, limit=1)
    assert newest.data[0].id == unstored.output[-1].id


async def test_conversations_are_made_changed_and_deleted(server: LiveServer) -> None:
    client = server.client
    conversation = await client.conversations.create()
    assert conversation.metadata == {}
    changed = await client.conversations.update(conversation.id, metadata={"a": "b"})
    assert changed == await client.conversations.retrieve(conversation.id)
    assert changed.metadata == {"a": "b"}
    given: Any = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi", "id": "msg_mine"}]
    added = await client.conversations.items.create(conversation.id, items=given)
    assert [item.id for item in added.data][1] == "msg_mine"
    found = await client.conversations.items.retrieve("msg_mine", conversation_id=conversation.id)
    assert found.type == "message"
    await client.conversations.items.delete("msg_mine", conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve("msg_mine", conversation_id=conversation.id)
    assert len((await client.conversations.items.list(conversation.id)).data) == 1
    assert (await client.conversations.delete(conversation.id)).deleted
    assert server.engine.closed_conversations == [conversation.id]
    for call in (
        client.conversations.retrieve(conversation.id),
        client.conversations.update(conversation.id, metadata={}),
        client.conversations.delete(conversation.id),
        client.conversations.items.create(conversation.id, items=given),
        client.responses.create(model="demo", input="x", conversation=conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call


async def test_bad_conversation_bodies_are_refused_with_their_field(server: LiveServer) -> None:
    conversation = await server.client.conversations.create()
    path = "/v1/conversations"
    message = {"role": "user", "content": "x"}
    cases: list[tuple[str, Any, str | None]] = [
        (path, {"items": 5}, "items"),
        (path, {"items": [message] * 21}, "items"),
        (path, {"items": [{"role": "user"}]}, "items[0].content"),
        (path, {"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        (path, {"metadata": {"a": "x" * 513}}, "metadata"),
        (f"{path}/{conversation.id}", {}, "metadata"),
        (f"{path}/{conversation.id}/items", {}, "items"),
        (f"{path}/{conversation.id}/items", {"items": []}, "items"),
        (path, b"{", None),
    ]
    for where, body, param in cases:
        status, answer = await server.post(body, where)
        assert (status, answer["error"]["param"]) == (400, param), body


async def test_a_turn_that_fails_leaves_nothing_behind(text_model: TextModel) -> None:
    resume = asyncio.Event()
    script = saying(text_model, "one two three", pause_after=2, resume=resume)
    async with live_server(script, text_model=text_model) as server:
        conversation = await server.client.conversations.create()
        body: dict[str, Any] = {"model": "demo", "input": "x", "conversation": conversation.id, "stream": True}
        async with server.session.post(server.url + RESPONSES, json=body) as response:
            data = await read_until(response, b"output_text.delta")
            id = read_events(data[: data.rindex(b"\n\n") + 2])[0]["response"]["id"]
            # Meanwhile nobody else may take a turn or add items.
            status, refused = await server.post({**body, "stream": False}, RESPONSES)
            assert (status, refused["error"]["code"]) == (409, "conversation_locked")
            items = {"items": [{"role": "user", "content": "y"}]}
            assert (await server.post(items, f"/v1/conversations/{conversation.id}/items"))[0] == 409
            # A count takes no turn.
            assert (await server.post(body, f"{RESPONSES}/input_tokens"))[0] == 200
        # Now the client is gone.
        await server.engine.wait_until(lambda: len(server.engine.aborted) == 1)
        await server.until(lambda: server.service.num_open_turns == 0)
        assert (await server.client.conversations.items.list(conversation.id)).data == []
        assert (await server.get(f"{RESPONSES}/{id}"))[0] == 404
        resume.set()
        await server.client.responses.create(model="demo", input="x", conversation=conversation.id)
        assert len((await server.client.conversations.items.list(conversation.id)).data) == 2


async def test_a_turn_whose_conversation_is_deleted_meanwhile_fails_as_a_whole(text_model: TextModel) -> None:
    resume = asyncio.Event()
    script = saying(text_model, "one two three", pause_after=1, resume=resume)
    async with live_server(script, text_model=text_model) as server:
        conversation = await server.client.conversations.create()
        body: dict[str, Any] = {"model": "demo", "input": "x", "conversation": conversation.id, "stream": True}
        async with server.session.post(server.url + RESPONSES, json=body) as response:
            await server.client.conversations.delete(conversation.id)
            resume.set()
            data = b""
            with contextlib.suppress(aiohttp.ClientPayloadError):
                async for chunk in response.content.iter_any():
                    data += chunk
        last = read_events(data)[-1]
        assert last["type"] == "response.failed"
        assert (await server.get(f"{RESPONSES}/{last['response']['id']}"))[0] == 404


async def test_a_background_response_runs_by_itself_and_can_be_followed_twice(text_model: TextModel) -> None:
    resume = asyncio.Event()
    script = saying(text_model, CALL, pause_after=4, resume=resume)
    async with live_server(script, text_model=text_model) as server:
        queued = await server.client.responses.create(model="demo", input="x", background=True, tools=TOOLS)
        assert queued.status == "queued"
        await server.until(lambda: server.engine.num_playing == 1)
        while (await server.client.responses.retrieve(queued.id)).status == "queued":
            await asyncio.sleep(0.005)
        assert (await server.client.responses.retrieve(queued.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="only one that has ended"):
            await server.client.responses.create(model="demo", input="y", previous_response_id=queued.id)
        following = asyncio.create_task(server.get(f"{RESPONSES}/{queued.id}?stream=true"))
        await server.get("/health")  # a round trip: the server has seen that somebody follows
        resume.set()
        events = read_events((await following)[1].encode())
        response = events[-1]["response"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:3]] == [
            "response.created", "response.queued", "response.in_progress"
        ]  # fmt: skip
        assert response["status"] == "completed"
        stored = await server.get(f"{RESPONSES}/{queued.id}")
        assert stored == (200, response)
        rest = await server.client.responses.retrieve(
            queued.id, stream=True, starting_after=events[5]["sequence_number"]
        )
        assert [event.sequence_number async for event in rest] == list(range(6, len(events)))
        with pytest.raises(openai.BadRequestError):
            await server.client.responses.retrieve(queued.id, stream=True, starting_after=-5)
        plain = await server.client.responses.create(model="demo", input="x")
        with pytest.raises(openai.BadRequestError, match="not kept"):
            await server.client.responses.retrieve(plain.id, stream=True)
        with pytest.raises(openai.BadRequestError, match="background"):
            await server.client.responses.cancel(plain.id)


async def test_a_background_response_outlives_its_streaming_client(text_model: TextModel) -> None:
    resume = asyncio.Event()
    async with live_server(saying(text_model, "a b c", pause_after=2, resume=resume), text_model=text_model) as server:
        body = {"model": "demo", "input": "x", "background": True, "stream": True}
        async with server.session.post(server.url + RESPONSES, json=body) as response:
            data = await read_until(response, b"output_text.delta")
        id = read_events(data[: data.rindex(b"\n\n") + 2])[0]["response"]["id"]
        await server.get("/health")  # a round trip: the server has seen that the client is gone
        resume.set()
        await server.until(lambda: server.service.num_open_turns == 0)
        assert (await server.client.responses.retrieve(id)).output_text == "a b c"
        assert server.engine.aborted == []


async def test_a_background_response_is_cancelled_once_and_for_all(text_model: TextModel) -> None:
    script = Script(text_model.tokenizer.encode("on and on "), is_endless=True)
    async with live_server(script, text_model=text_model) as server:
        queued = await server.client.responses.create(model="demo", input="x", background=True)
        await server.until(lambda: server.engine.num_playing == 1)
        cancelled = await server.client.responses.cancel(queued.id)
        assert cancelled.status == "cancelled"
        await server.engine.wait_until(lambda: len(server.engine.aborted) == 1)
        again = await server.client.responses.cancel(queued.id)
        assert again.model_dump() == cancelled.model_dump()
        assert (await server.client.responses.retrieve(queued.id)).status == "cancelled"
        events = read_events((await server.get(f"{RESPONSES}/{queued.id}?stream=true"))[1].encode())
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["status"] == "cancelled"
        await server.client.responses.delete(queued.id)
        assert (await server.get(f"{RESPONSES}/{queued.id}"))[0] == 404


async def test_a_background_response_whose_engine_dies_has_failed(text_model: TextModel) -> None:
    resume = asyncio.Event()
    async with live_server(saying(text_model, "a b c", pause_after=1, resume=resume), text_model=text_model) as server:
        queued = await server.client.responses.create(model="demo", input="x", background=True)
        await server.until(lambda: server.engine.num_playing == 1)
        server.engine.die()
        await server.until(lambda: server.service.num_open_turns == 0)
        failed = await server.client.responses.retrieve(queued.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "server_error"


async def test_a_restart_keeps_what_was_stored_and_knows_what_broke(text_model: TextModel, tmp_path: Path) -> None:
    options: dict[str, Any] = {"text_model": text_model, "state_dir": str(tmp_path / "state")}
    async with live_server(saying(text_model, "before"), **options) as server:
        first = await server.client.responses.create(model="demo", input="one")
        conversation = await server.client.conversations.create()
        await server.client.responses.create(model="demo", input="hello", conversation=conversation.id)
        began_s = server.service.conversations.open("", conversation.id).started_s
    async with live_server(saying(text_model, "after"), **options) as server:
        second = await server.client.responses.create(model="demo", input="two", previous_response_id=first.id)
        assert "before" in last_prompt(server)
        await server.client.responses.create(model="demo", input="again", conversation=conversation.id)
        assert "hello" in last_prompt(server)
        assert server.service.conversations.open("", conversation.id).started_s == began_s
        assert (await server.client.responses.retrieve(first.id)).output_text == "before"
        assert second.output_text == "after"


async def test_other_keys_do_not_reach_what_is_stored(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model, api_keys=("one", "two")) as server:
        one, two = (server.client.with_options(api_key=key) for key in ("one", "two"))
        response = await one.responses.create(model="demo", input="secret")
        conversation = await one.conversations.create()
        calls = (
            two.responses.retrieve(response.id),
            two.responses.delete(response.id),
            two.responses.cancel(response.id),
            two.responses.create(model="demo", input="x", previous_response_id=response.id),
            two.conversations.retrieve(conversation.id),
            two.conversations.delete(conversation.id),
            two.responses.create(model="demo", input="x", conversation=conversation.id),
        )
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call
        reference: Any = [{"type": "item_reference", "id": response.output[0].id}]
        with pytest.raises(openai.BadRequestError):
            await two.responses.create(model="demo", input=reference)
        assert (await one.responses.retrieve(response.id)).id == response.id


@pytest.mark.parametrize("bound", ["MAX_ENDED_RUNS", "MAX_ENDED_EVENTS", "ENDED_RUN_TTL_S"])
async def test_events_of_ended_runs_are_bounded(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    ids = []
    for _ in range(3):
        response = await server.client.responses.create(model="demo", input="x", background=True)
        ids.append(response.id)
        await server.until(lambda: server.service.num_open_turns == 0)
    assert [(await server.get(f"{RESPONSES}/{id}?stream=true"))[0] for id in ids] == [200, 200, 200]
    num_events = [len(read_events((await server.get(f"{RESPONSES}/{id}?stream=true"))[1].encode())) for id in ids]
    limits = {"MAX_ENDED_RUNS": 2, "MAX_ENDED_EVENTS": sum(num_events[1:]), "ENDED_RUN_TTL_S": -1.0}
    monkeypatch.setattr(background, bound, limits[bound])
    expected = [400, 400, 400] if bound == "ENDED_RUN_TTL_S" else [400, 200, 200]
    assert [(await server.get(f"{RESPONSES}/{id}?stream=true"))[0] for id in ids] == expected
    assert [(await server.client.responses.retrieve(id)).status for id in ids] == ["completed"] * 3
