"""The Messages API over HTTP, read by Anthropic's own client and by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import pytest
from live_server import LiveServer, live_server, saying, user
from scripted_engine import Script

from turnkeep.server.text_model import TextModel

PATH = "/v1/messages"
CALL = (
    '<think>I look it up.</think>One moment.<tool_call>{"name": "get_order", "arguments": {"order": "B47"}}</tool_call>'
)
TOOL: Any = {
    "name": "get_order",
    "description": "Look an order up",
    "input_schema": {"type": "object", "properties": {"order": {"type": "string"}}},
}


@asynccontextmanager
async def client_of(server: LiveServer, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=server.url, **{"api_key": "none", "max_retries": 0, **options}
    ) as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": 64, "messages": user("Hello!"), **fields}


async def read_to_the_end(response: aiohttp.ClientResponse, chunks: list[bytes]) -> None:
    while chunk := await response.content.readany():
        chunks.append(chunk)


async def test_the_official_client_reads_an_answer_with_thinking_text_and_a_call(text_model: TextModel) -> None:
    script = saying(text_model, CALL, num_cached_tokens=3)
    async with live_server(script, text_model=text_model) as server, client_of(server) as client:
        message = await client.messages.create(**body(tools=[TOOL]))
        prompt = len(server.engine.submitted[-1].prompt_ids)
    thinking, text, call = message.content
    assert (thinking.type, text.type, call.type) == ("thinking", "text", "tool_use")
    assert isinstance(thinking, anthropic.types.ThinkingBlock)
    assert isinstance(text, anthropic.types.TextBlock)
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (thinking.thinking, text.text, call.input) == ("I look it up.", "One moment.", {"order": "B47"})
    assert (call.name, message.stop_reason, message.stop_sequence) == ("get_order", "tool_use", None)
    usage = message.usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 0)
    assert usage.input_tokens == prompt - 3
    assert usage.output_tokens == len(script.token_ids)


@pytest.mark.parametrize("tokens_per_event", [1, 7, 1000])
@pytest.mark.parametrize("text", [CALL, "no markup", "", "<think>only this</think>"])
async def test_a_stream_adds_up_to_the_plain_answer(text_model: TextModel, text: str, tokens_per_event: int) -> None:
    script = saying(text_model, text, num_cached_tokens=2, tokens_per_event=tokens_per_event)
    async with live_server(script, text_model=text_model) as server, client_of(server) as client:
        plain = await client.messages.create(**body(tools=[TOOL]))
        async with client.messages.stream(**body(tools=[TOOL])) as stream:
            streamed = await stream.get_final_message()

    def comparable(message: anthropic.types.Message) -> dict[str, Any]:
        values = json.loads(message.model_dump_json(exclude={"id"}))
        for block in values["content"]:
            block.pop("id", None)  # of a call
            block.pop("parsed_output", None)  # a field of the client's own stream helper
        return {name: value for name, value in values.items() if value is not None}

    assert comparable(streamed) == comparable(plain)


async def test_the_events_follow_the_grammar(text_model: TextModel) -> None:
    async with (
        live_server(saying(text_model, CALL), text_model=text_model) as server,
        server.session.post(server.url + PATH + "?beta=true", json=body(stream=True, tools=[TOOL])) as response,
    ):
        assert response.status == 200
        frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    names = []
    for frame in frames:
        name, data = frame.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
        names.append(name.removeprefix("event: "))
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    blocks = [name for name in names if name in ("content_block_start", "content_block_stop")]
    assert blocks == ["content_block_start", "content_block_stop"] * 3


async def test_a_conversation_with_a_tool_result_goes_on_with_the_same_prompt(text_model: TextModel) -> None:
    """The echoed answer, thinking trimmed as some clients do, renders to what was generated."""
    script = saying(text_model, CALL)
    async with live_server(script, text_model=text_model) as server, client_of(server) as client:
        first = await client.messages.create(**body(tools=[TOOL]))
        call = first.content[-1]
        assert isinstance(call, anthropic.types.ToolUseBlock)
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sent", "cache_control": {"type": "x"}}
        messages: Any = [
            *user("Hello!"),
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        count = await client.messages.count_tokens(model="demo", messages=messages, tools=[TOOL])
        await client.messages.create(**body(messages=messages, tools=[TOOL]))
        before, after = server.engine.submitted
    assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids
    output = script.token_ids[:-1]
    assert after.prompt_ids[len(before.prompt_ids) :][: len(output)] == output
    assert count.input_tokens == len(after.prompt_ids)


async def test_omitted_thinking_is_signed_and_comes_back(text_model: TextModel) -> None:
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    async with (
        live_server(saying(text_model, "<think>Secret.</think>Hi."), text_model=text_model) as server,
        client_of(server) as client,
    ):
        async with client.messages.stream(**body(), extra_body={"thinking": thinking}) as stream:
            message = await stream.get_final_message()
        block = message.content[0]
        assert isinstance(block, anthropic.types.ThinkingBlock)
        assert block.thinking == ""
        history: Any = [*user("A"), {"role": "assistant", "content": message.to_dict()["content"]}]
        tail: Any = {"type": "tool_result", "tool_use_id": "x", "content": "y"}
        await client.messages.create(**body(messages=[*history, {"role": "user", "content": [tail]}]))
        prompt = text_model.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
    assert "<think>Secret.</think>Hi." in prompt


async def test_stop_sequences_and_the_length_limit_are_told_apart(text_model: TextModel) -> None:
    async with (
        live_server(saying(text_model, "one two three"), text_model=text_model) as server,
        client_of(server) as client,
    ):
        stopped = await client.messages.create(**body(stop_sequences=[" three", "x"]))
        cut = await client.messages.create(**body(max_tokens=1))
        ended = await client.messages.create(**body())
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert stopped.content[0].to_dict()["text"] == "one two"
    assert (cut.stop_reason, ended.stop_reason) == ("max_tokens", "end_turn")


@pytest.mark.parametrize(
    ("user_id", "expected"),
    [
        ('{"device_id": "d", "session_id": "s-1"}', "s-1"),
        ("user_ab12_account__session_5f0c", "5f0c"),
        ("a-person", None),
    ],
)
async def test_the_session_in_the_user_id_is_the_conversation(
    text_model: TextModel, user_id: str, expected: str | None
) -> None:
    async with live_server(saying(text_model, "Hi"), text_model=text_model) as server:
        status, _ = await server.post(body(metadata={"user_id": user_id}), PATH)
        assert status == 200
        assert server.engine.submitted[-1].conversation_id == expected


async def test_the_models_are_listed_for_the_official_client(text_model: TextModel) -> None:
    options = {"served_model_names": ("demo", "org/demo")}
    async with (
        live_server(saying(text_model, "Hi"), text_model=text_model, **options) as server,
        client_of(server) as client,
    ):
        models = [model.id async for model in client.models.list()]
        one = await client.models.retrieve("demo")
    assert models == ["demo", "org/demo"]
    assert (one.type, one.display_name) == ("model", "demo")


async def test_errors_are_in_anthropics_envelope_with_its_words(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi"), text_model=text_model, api_keys=("key",)) as server:
        async with client_of(server, api_key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**body())
        async with client_of(server, api_key="key") as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**body(model="other"))
            with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4095 maximum"):
                await client.messages.create(**body(messages=user("word " * 5000)))
            with pytest.raises(anthropic.BadRequestError) as refusal:
                await client.messages.create(**body(max_tokens=0))
        headers = {"x-api-key": "key"}
        status, missing = await server.post({"model": "demo", "messages": user("Hi")}, PATH, headers)
        lost = await server.get("/v1/messages/batches", headers)
    assert refusal.value.request_id
    error: Any = refusal.value.body
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["request_id"] == refusal.value.request_id
    assert status == 400
    assert "max_tokens" in missing["error"]["message"]
    assert lost[0] == 404
    assert lost[1]["error"]["type"] == "not_found_error"


async def test_an_engine_that_dies_breaks_the_stream_with_a_retryable_event(text_model: TextModel) -> None:
    script = Script([*text_model.tokenizer.encode("Hello there")], pause_after=1, resume=asyncio.Event())
    async with (
        live_server(script, text_model=text_model) as server,
        server.session.post(server.url + PATH, json=body(stream=True)) as response,
    ):
        first = await response.content.readuntil(b"\n\n")
        assert first.startswith(b"event: message_start\n")
        server.engine.die()
        rest: list[bytes] = []
        with pytest.raises(aiohttp.ClientPayloadError):  # never a clean end
            await read_to_the_end(response, rest)
    last = b"".join(rest).decode().strip().split("\n\n")[-1]
    assert last.startswith("event: error\n")
    assert json.loads(last.split("data: ")[1])["error"]["type"] == "overloaded_error"
