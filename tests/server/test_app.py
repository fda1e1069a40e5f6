"""Chat over HTTP: plain and streamed answers agree, read by the official client and by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from live_server import events, live_server, saying, user

from turnkeep.engine.messages import Submit
from turnkeep.server.text_model import TextModel

ANSWER = "<think>They greet, so do I.</think>Hello! How are you – good? 😀"
CALL = (
    '<think>I look it up.</think>One moment.<tool_call>{"name": "get_order", "arguments": {"order": "B47"}}</tool_call>'
)
TWO_CALLS = (
    '<think>Both.</think><tool_call>{"name": "get_price", "arguments": {"item": "lamps"}}</tool_call>'
    '<tool_call>{"name": "get_stock", "arguments": {"item": "lamps"}}</tool_call>'
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("get_order", "get_price", "get_stock")
]


def merge(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": []}
    reason, token_ids = None, []
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        delta = choice["delta"]
        message["role"] = delta.get("role") or message["role"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        token_ids += choice.get("token_ids", [])
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return {**message, "finish_reason": reason, "token_ids": token_ids}


@pytest.mark.parametrize("tokens_per_event", [1, 3, 1000])
@pytest.mark.parametrize("text", [ANSWER, CALL, TWO_CALLS, "no markup", ""])
async def test_a_stream_adds_up_to_the_plain_answer(text_model: TextModel, text: str, tokens_per_event: int) -> None:
    script = saying(text_model, text, num_cached_tokens=3, tokens_per_event=tokens_per_event)
    fields: dict[str, Any] = {"tools": TOOLS, "return_token_ids": True, "seed": 1}
    async with live_server(script, text_model=text_model) as server:
        status, plain = await server.chat(**fields)
        assert status == 200
        *chunks, done = events(await server.stream(stream_options={"include_usage": True}, **fields))
    assert done == "[DONE]"
    choice, merged = plain["choices"][0], merge(chunks)
    message = choice["message"]
    assert merged["role"] == message["role"] == "assistant"
    assert merged["content"] == (message["content"] or "")
    assert merged["reasoning_content"] == message.get("reasoning_content", "")
    assert merged["finish_reason"] == choice["finish_reason"]
    assert merged["token_ids"] == choice["token_ids"]
    assert chunks[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    assert chunks[-1]["usage"] == plain["usage"]
    for streamed, whole in itertools.zip_longest(merged["tool_calls"], message.get("tool_calls", [])):
        assert streamed["function"] == whole["function"]


async def test_the_chunks_of_a_stream_follow_the_rules(text_model: TextModel) -> None:
    async with live_server(saying(text_model, CALL), text_model=text_model) as server:
        *chunks, _ = events(await server.stream(tools=TOOLS, stream_options={"include_usage": True}))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [choice["delta"].get("role") for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert calls[0]["id"].startswith("call_")
    assert (calls[0]["index"], calls[0]["type"], calls[0]["function"]) == (
        0,
        "function",
        {"name": "get_order", "arguments": ""},
    )
    assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"order": "B47"}


async def test_usage_comes_only_when_asked_for(text_model: TextModel) -> None:
    async with live_server(saying(text_model, ANSWER), text_model=text_model) as server:
        *silent, _ = events(await server.stream())
        *always, _ = events(await server.stream(stream_options={"include_usage": True, "continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in silent)
    counts = [chunk["usage"]["completion_tokens"] for chunk in always]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] > counts[0] == 0


async def test_usage_counts_prompt_cached_output_and_reasoning(text_model: TextModel) -> None:
    script = saying(text_model, ANSWER, num_cached_tokens=4)
    async with live_server(script, text_model=text_model) as server:
        _, plain = await server.chat(return_token_ids=True)
        samples = {
            name: await server.metric(f"turnkeep_{name}_total")
            for name in ("prompt_tokens", "cached_tokens", "generated_tokens")
        }
    usage = plain["usage"]
    assert usage["prompt_tokens"] == len(plain["prompt_token_ids"])
    assert usage["completion_tokens"] == len(script.token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4
    num_think = script.token_ids.index(text_model.tokenizer.token_id("</think>") or -1)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == num_think - 1
    assert samples == {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": 4,
        "generated_tokens": usage["completion_tokens"],
    }


async def test_the_official_client_streams_and_calls_tools(text_model: TextModel) -> None:
    async with live_server(saying(text_model, TWO_CALLS), text_model=text_model) as server:
        messages: Any = user("price and stock of lamps?")
        tools: Any = TOOLS
        plain: Any = await server.client.chat.completions.create(model="demo", messages=messages, tools=tools)
        async with server.client.chat.completions.stream(model="demo", messages=messages, tools=tools) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        models = await server.client.models.list()
    assert [model.id for model in models.data] == ["demo"]
    assert plain.choices[0].finish_reason == final.choices[0].finish_reason == "tool_calls"
    names = [(call.function.name, json.loads(call.function.arguments)) for call in plain.choices[0].message.tool_calls]
    assert names == [("get_price", {"item": "lamps"}), ("get_stock", {"item": "lamps"})]
    streamed = final.choices[0].message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in streamed] == names
    assert len({call.id for call in [*streamed, *plain.choices[0].message.tool_calls]}) == 4


async def test_choices_are_requests_of_their_own_with_different_seeds(text_model: TextModel) -> None:
    def direct(submit: Submit) -> Any:
        return saying(text_model, f"answer {submit.request_id.rsplit('-', 1)[1]}", num_cached_tokens=2)

    async with live_server(direct, text_model=text_model) as server:
        _, plain = await server.chat(n=3, seed=2**64 - 1, conversation_id="c")
        seeds = [submit.sampling.seed for submit in server.engine.submitted]
        ids = [submit.conversation_id for submit in server.engine.submitted]
        *chunks, _ = events(await server.stream(n=3, stream_options={"include_usage": True}))
    assert [choice["message"]["content"] for choice in plain["choices"]] == ["answer 0", "answer 1", "answer 2"]
    assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2]
    assert seeds == [2**64 - 1, 0, 1]
    assert ids == ["c", None, None], "one branch of the conversation, not three"
    assert [merge(chunks, index)["content"] for index in range(3)] == ["answer 0", "answer 1", "answer 2"]
    assert [merge(chunks, index)["finish_reason"] for index in range(3)] == ["stop"] * 3
    one = plain["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"]["prompt_tokens"] == one, "the prompt is counted once"


async def test_a_stop_string_ends_the_answer_and_never_shows(text_model: TextModel) -> None:
    script = saying(text_model, "one two three four", is_endless=True)
    async with live_server(script, text_model=text_model) as server:
        _, plain = await server.chat(stop=["thr", "nothing"], ignore_eos=True)
        *chunks, _ = events(await server.stream(stop="o th", ignore_eos=True))
        stopped = list(server.engine.stopped)
        assert server.engine.num_playing == 0
    assert plain["choices"][0]["message"]["content"] == "one two "
    assert merge(chunks)["content"] == "one tw"
    assert plain["choices"][0]["finish_reason"] == merge(chunks)["finish_reason"] == "stop"
    assert len(stopped) == 2


async def test_tokens_after_a_stop_string_are_not_counted(text_model: TextModel) -> None:
    script = saying(text_model, "one two three four", tokens_per_event=1000)
    async with live_server(script, text_model=text_model) as server:
        _, plain = await server.chat(stop="two", return_token_ids=True)
    choice = plain["choices"][0]
    assert choice["message"]["content"] == "one "
    assert plain["usage"]["completion_tokens"] == len(choice["token_ids"]) < len(script.token_ids)


async def test_without_parallel_tool_calls_the_answer_ends_after_one(text_model: TextModel) -> None:
    async with live_server(saying(text_model, TWO_CALLS), text_model=text_model) as server:
        _, plain = await server.chat(tools=TOOLS, parallel_tool_calls=False)
        assert len(server.engine.stopped) <= 1
    choice = plain["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["get_price"]
    assert choice["finish_reason"] == "tool_calls"


async def test_logprobs_name_every_shown_token(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi 😀"), text_model=text_model) as server:
        _, plain = await server.chat(logprobs=True, top_logprobs=2)
        *chunks, _ = events(await server.stream(logprobs=True, top_logprobs=2))
    content = plain["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content
    assert content[0]["token"] == "Hi"
    assert bytes(content[0]["bytes"]) == b"Hi"
    assert all(set(entry) == {"token", "bytes", "logprob", "top_logprobs"} for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_the_answer_is_clamped_to_the_context(text_model: TextModel) -> None:
    script = saying(text_model, "word " * 50, is_endless=True)
    options = {"max_model_len": 40}
    async with live_server(script, text_model=text_model, engine_options=options) as server:
        _, plain = await server.chat(max_tokens=1000)
        _, unlimited = await server.chat()
        status, refused = await server.chat("word " * 60)
    assert plain["choices"][0]["finish_reason"] == "length"
    assert plain["usage"]["total_tokens"] == unlimited["usage"]["total_tokens"] == 40
    assert status == 400
    assert refused["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 40 tokens" in refused["error"]["message"]


async def test_stop_ids_are_the_models_and_the_clients(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        await server.chat(stop_token_ids=[50])
        await server.chat(stop_token_ids=[50], ignore_eos=True)
        assert [submit.sampling.stop_token_ids for submit in server.engine.submitted] == [(2, 50), (50,)]


async def test_the_prompt_of_the_render_endpoint_is_the_one_the_engine_gets(text_model: TextModel) -> None:
    body = {"model": "demo", "messages": [{"role": "system", "content": "Be kind."}, *user("Hello!")], "tools": TOOLS}
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        status, rendered = await server.post(body, path="/v1/chat/completions/render")
        assert not server.engine.submitted
        await server.post(body)
        submit = server.engine.submitted[0]
    assert status == 200
    assert rendered["prompt_token_ids"] == submit.prompt_ids
    assert [(one["position"], one["kind"]) for one in rendered["boundaries"]] == [
        (one.position, one.kind) for one in submit.boundaries
    ]
    assert {one["kind"] for one in rendered["boundaries"]} == {"trunk", "turn_start"}


async def test_the_end_of_a_turn_is_told_to_the_engine_before_the_client_can_return(text_model: TextModel) -> None:
    script = saying(text_model, "<think>a</think>Hi.")
    async with live_server(script, text_model=text_model) as server:
        _, plain = await server.chat(conversation_id="talk")
        submit = server.engine.submitted[0]
        stable = server.engine.ended_turns[submit.request_id]
        status, report = await server.get("/v1/conversations/talk/cache")
    # The template strips the reasoning of a closed turn: what is repeated ends before the answer.
    assert 0 < stable <= len(submit.prompt_ids)
    assert status == 200
    assert str(plain["usage"]["prompt_tokens"]) in json.dumps(report)


async def test_comments_keep_a_silent_stream_alive(text_model: TextModel) -> None:
    resume = asyncio.Event()
    script = saying(text_model, "Hi there", pause_after=1, resume=resume)
    async with live_server(script, text_model=text_model, comment_interval_s=0.02) as server:
        body = {"model": "demo", "messages": user("x"), "stream": True}
        async with server.session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            seen = b""
            while seen.count(b": keep-alive\n\n") < 3:
                seen += await response.content.readany()
            resume.set()
            seen += await response.content.read()
    assert merge([event for event in events(seen) if event != "[DONE]"])["content"] == "Hi there"


async def test_a_stream_that_waits_long_for_admission_is_opened_with_a_comment(text_model: TextModel) -> None:
    admit = asyncio.Event()
    script = saying(text_model, "Hi", admit=admit)
    async with live_server(script, text_model=text_model, status_delay_s=0.02) as server:
        body = {"model": "demo", "messages": user("x"), "stream": True}
        async with server.session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            assert await response.content.readany() == b": keep-alive\n\n"
            admit.set()
            rest = events(await response.content.read())
    assert rest[0]["choices"][0]["delta"]["role"] == "assistant"
    assert rest[-1] == "[DONE]"


async def test_the_last_bytes_come_in_one_piece_with_the_end_of_the_body(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi"), text_model=text_model) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        body = json.dumps({"model": "demo", "messages": user("x"), "stream": True}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        seen = await reader.readuntil(b"[DONE]\n\n")
        assert b"text/event-stream; charset=utf-8" in seen
        assert b"X-Accel-Buffering: no" in seen
        # Nothing may be waited for: the closing chunk was sent with the last event.
        assert await asyncio.wait_for(reader.readexactly(7), 0.2) == b"\r\n0\r\n\r\n"
        writer.close()
        await writer.wait_closed()


async def test_models_and_versions_are_listed(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model, served_model_names=("a/b", "c")) as server:
        _, listed = await server.get("/v1/models")
        _, one = await server.get("/v1/models/a/b")
        _, encoded = await server.get("/v1/models/a%2Fb")
        missing_status, missing = await server.get("/v1/models/demo")
        health = await server.get("/health")
    assert [model["id"] for model in listed["data"]] == ["a/b", "c"]
    assert one == encoded == listed["data"][0]
    assert one["max_model_len"] == 4096
    assert (missing_status, missing["error"]["code"]) == (404, "model_not_found")
    assert health == (200, "")


async def test_any_model_name_is_taken_when_asked_so(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model, accept_any_model=True) as server:
        status, answer = await server.post({"model": "gpt-x", "messages": user("x")})
    assert (status, answer["model"]) == (200, "gpt-x")


async def test_one_connection_serves_many_requests(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(3):
            writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b"version" in await reader.readexactly(length)
        writer.close()
        await writer.wait_closed()
