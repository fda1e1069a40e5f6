"""POST /v1/responses, streamed and not, by hand and with the official client."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import openai
import pytest
from aiohttp import ClientPayloadError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, live_server, make_text_model, saying
from response_events import check_events, read_events, read_until, without_ids

from turnkeep.server import errors
from turnkeep.server.responses.answers import ResponseBuilder, response_object
from turnkeep.server.responses.shapes import ResponsesRequest
from turnkeep.server.responses.tools import read_tools
from turnkeep.server.text_model import TextModel
from turnkeep.server.turn_events import ChoiceEnded, ToolCallDelta, TurnDelta, TurnEvent, TurnStarted
from turnkeep.server.turn_request import SamplingDefaults

RESPONSES = "/v1/responses"
ANSWER = "<think>They greet, so do I.</think>Hello! How are you – good? 😀"
CALL = '<think>I look.</think>One moment.<tool_call>{"name": "get_order", "arguments": {"order": "B47"}}</tool_call>'
TWO_CALLS = (
    '<tool_call>{"name": "get_order", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "shop__get_stock", "arguments": {"item": "lamps"}}</tool_call>'
)
PATCH = '<tool_call>{"name": "patch", "arguments": {"input": "*** a\\n{"}}</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "get_order", "parameters": {"type": "object", "properties": {}}},
    {"type": "namespace", "name": "shop", "tools": [{"type": "function", "name": "get_stock"}]},
    {"type": "custom", "name": "patch", "format": {"type": "text"}},
    {"type": "web_search"},
]


async def stream(server: LiveServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    sent = {"model": "demo", "stream": True, **body}
    async with server.session.post(server.url + RESPONSES, json=sent) as response:
        assert response.status == 200, await response.text()
        return read_events(await response.read())


@pytest.mark.parametrize("tokens_per_event", [1, 5, 1000])
@pytest.mark.parametrize("text", [ANSWER, CALL, TWO_CALLS, PATCH, "no markup", "", "<think>only thoughts</think>"])
async def test_a_stream_keeps_the_grammar_and_adds_up_to_the_plain_answer(
    text_model: TextModel, text: str, tokens_per_event: int
) -> None:
    script = saying(text_model, text, num_cached_tokens=3, tokens_per_event=tokens_per_event)
    body = {"input": "Hello!", "tools": TOOLS}
    async with live_server(script, text_model=text_model) as server:
        status, plain = await server.post({"model": "demo", **body}, RESPONSES)
        streamed = check_events(await stream(server, body))
    assert status == 200
    assert without_ids(streamed) == without_ids(plain)
    assert plain["status"] == "completed"
    assert plain["usage"]["input_tokens_details"]["cached_tokens"] == 3
    assert plain["usage"]["total_tokens"] == plain["usage"]["input_tokens"] + plain["usage"]["output_tokens"]


async def test_calls_go_by_the_names_that_the_client_gave(text_model: TextModel) -> None:
    async with live_server(saying(text_model, TWO_CALLS), text_model=text_model) as server:
        _, answer = await server.post({"model": "demo", "input": "x", "tools": TOOLS}, RESPONSES)
    first, second = answer["output"]
    assert (first["name"], first["arguments"], "namespace" in first) == ("get_order", "{}", False)
    assert (second["name"], second["namespace"], second["arguments"]) == ("get_stock", "shop", '{"item": "lamps"}')
    assert first["call_id"] != second["call_id"]
    async with live_server(saying(text_model, PATCH), text_model=text_model) as server:
        _, answer = await server.post({"model": "demo", "input": "x", "tools": TOOLS}, RESPONSES)
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", "*** a\n{")


@pytest.mark.parametrize("limit", range(1, 24))
async def test_an_answer_cut_anywhere_is_incomplete_and_keeps_the_grammar(text_model: TextModel, limit: int) -> None:
    async with live_server(saying(text_model, CALL), text_model=text_model) as server:
        events = await stream(server, {"input": "x", "tools": TOOLS, "max_output_tokens": limit})
    response = check_events(events)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens"] == limit
    assert events[-1]["type"] == "response.incomplete"


async def test_reasoning_comes_as_summary_when_one_is_asked_for(text_model: TextModel) -> None:
    async with live_server(saying(text_model, ANSWER), text_model=text_model) as server:
        response = check_events(await stream(server, {"input": "x", "reasoning": {"summary": "auto"}}))
    reasoning = response["output"][0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "They greet, so do I."}]
    assert "content" not in reasoning
    assert response["reasoning"] == {"effort": None, "summary": "auto"}


async def test_sealed_reasoning_comes_back_exactly(text_model: TextModel) -> None:
    body: dict[str, Any] = {"model": "demo", "input": "x", "store": False, "include": ["reasoning.encrypted_content"]}
    async with live_server(saying(text_model, "<think>  I think. </think>Yes."), text_model=text_model) as server:
        _, first = await server.post(body, RESPONSES)
        reasoning, message = first["output"]
        plain = server.engine.submitted[-1]
        trimmed = {**reasoning, "content": None, "summary": [{"type": "summary_text", "text": "short"}]}
        for item in (reasoning, trimmed, {**reasoning, "encrypted_content": None}):
            history = [{"role": "user", "content": "x"}, item, message, {"role": "user", "content": "y"}]
            status, _ = await server.post({**body, "input": history}, RESPONSES)
            assert status == 200
        exact, sealed, by_content = (one.prompt_ids for one in server.engine.submitted[-3:])
    assert exact == sealed == by_content
    assert exact[: len(plain.prompt_ids)] == plain.prompt_ids
    assert base64.b64decode(reasoning["encrypted_content"][4:])


async def test_the_same_conversation_has_the_same_prompt_as_a_chat() -> None:
    items = [
        {
            "type": "message",
            "role": "developer",
            "id": "msg_1",
            "content": [{"type": "input_text", "text": "Be kind."}],
        },
        {"role": "user", "content": "Where is B47?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "One moment."}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_order", "arguments": '{"order": "B47"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_order", "arguments": "not json"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "sent"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "bad"}]},
        {"role": "assistant", "content": "It was sent."},
        {"role": "user", "content": [{"type": "input_text", "text": "Thank "}, {"type": "input_text", "text": "you"}]},
    ]
    call = {"type": "function", "function": {"name": "get_order", "arguments": '{"order": "B47"}'}, "id": "c1"}
    bad = {"type": "function", "function": {"name": "get_order", "arguments": "not json"}, "id": "c2"}
    messages = [
        {"role": "system", "content": "Top."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Where is B47?"},
        {"role": "assistant", "content": "One moment.", "reasoning_content": "I look.", "tool_calls": [call, bad]},
        {"role": "tool", "tool_call_id": "c1", "content": "sent"},
        {"role": "tool", "tool_call_id": "c2", "content": "bad"},
        {"role": "assistant", "content": "It was sent."},
        {"role": "user", "content": "Thank you"},
    ]
    tool = TOOLS[0]
    chat_tool = {"type": "function", "function": {key: tool[key] for key in ("name", "parameters")}}
    model = make_text_model()
    async with live_server(saying(model, "x"), text_model=model) as server:
        body = {"model": "demo", "instructions": "Top.", "input": items, "tools": [tool]}
        assert (await server.post(body, RESPONSES))[0] == 200
        (first,) = server.engine.submitted
        status, count = await server.post(body, f"{RESPONSES}/input_tokens")
    # A server that has not seen the conversation: what it has learnt of one decides about boundaries, too.
    model = make_text_model()
    async with live_server(saying(model, "x"), text_model=model) as server:
        assert (await server.post({"model": "demo", "messages": messages, "tools": [chat_tool]}))[0] == 200
        (second,) = server.engine.submitted
    assert first.prompt_ids == second.prompt_ids
    assert first.boundaries == second.boundaries
    assert (status, count) == (200, {"object": "response.input_tokens", "input_tokens": len(first.prompt_ids)})


async def test_fields_reach_the_engine_and_are_repeated(text_model: TextModel) -> None:
    body = {
        "model": "demo", "input": "x", "temperature": 0.5, "top_p": 0.25, "seed": 7, "top_k": 3, "max_output_tokens": 9,
        "metadata": {"a": "b"}, "prompt_cache_key": "key", "include": ["message.output_text.logprobs"],
        "top_logprobs": 2, "parallel_tool_calls": False, "truncation": "auto", "text": {"verbosity": "low"},
        "reasoning": {"effort": "low"}, "service_tier": "auto", "client_metadata": {"unknown": 1}, "user": "u",
    }  # fmt: skip
    script = saying(text_model, "<think>a b</think>c d", num_cached_tokens=3)  # the whole prompt: nothing is lost
    async with live_server(script, text_model=text_model) as server:
        status, answer = await server.post(body, RESPONSES)
        submit = server.engine.submitted[0]
        streamed = check_events(await stream(server, body))
    assert status == 200
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.5, 0.25, 7, 3)
    assert (sampling.max_new_tokens, sampling.num_logprobs) == (9, 2)
    assert submit.conversation_id == "key"
    same = ("temperature", "top_p", "max_output_tokens", "metadata", "prompt_cache_key", "top_logprobs", "truncation",
            "parallel_tool_calls", "service_tier", "user")  # fmt: skip
    assert {key: answer[key] for key in same} == {key: body[key] for key in same}
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    logprobs = answer["output"][-1]["content"][0]["logprobs"]
    assert "".join(one["token"] for one in logprobs).strip() == "c d"
    assert all(len(one["top_logprobs"]) == 2 for one in logprobs)
    assert without_ids(streamed) == without_ids(answer)


async def test_the_official_client_reads_plain_and_streamed_answers(text_model: TextModel) -> None:
    async with live_server(saying(text_model, CALL), text_model=text_model) as server:
        tools: Any = TOOLS[:1]
        plain = await server.client.responses.create(model="demo", input="x", tools=tools)
        async with server.client.responses.stream(model="demo", input="x", tools=tools) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_response()
        again = await server.client.responses.retrieve(plain.id)
        listed = await server.client.responses.input_items.list(plain.id)
        await server.client.responses.delete(plain.id)
        with pytest.raises(openai.NotFoundError):
            await server.client.responses.retrieve(plain.id)
        count = await server.client.responses.input_tokens.count(model="demo", input="x")
    assert plain.output_text == final.output_text == "One moment."
    assert [item.type for item in plain.output] == ["reasoning", "message", "function_call"]
    assert again.model_dump() == plain.model_dump()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in listed.data] == ["message"]
    assert count.input_tokens > 0


async def test_an_engine_that_dies_fails_the_response_in_the_stream(text_model: TextModel) -> None:
    resume = asyncio.Event()
    script = saying(text_model, "one two three four", pause_after=2, resume=resume)
    async with live_server(script, text_model=text_model) as server:
        sent = {"model": "demo", "input": "x", "stream": True}
        async with server.session.post(server.url + RESPONSES, json=sent) as response:
            data = bytearray(await read_until(response, b"output_text.delta"))
            server.engine.die()

            async def read_on() -> None:
                async for chunk in response.content.iter_any():
                    data.extend(chunk)

            # The connection breaks off behind the last event: nobody may take it for a whole answer.
            with pytest.raises(ClientPayloadError):
                await read_on()
        *told, why, last = read_events(bytes(data))
        assert why["type"] == "error"
        assert last["sequence_number"] == why["sequence_number"] + 1
        failed = check_events([*told, {**last, "sequence_number": why["sequence_number"]}])
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        assert failed["output"][-1]["status"] == "incomplete"
        status, _ = await server.get(f"{RESPONSES}/{failed['id']}")
        assert status == 404


async def test_what_does_not_fit_is_refused_or_cut_in_the_middle(text_model: TextModel) -> None:
    turns = [
        item
        for number in range(30)
        for item in ({"role": "user", "content": f"question {number} " * 3}, {"role": "assistant", "content": "yes"})
    ]
    items = [{"role": "user", "content": "the first"}, *turns, {"role": "user", "content": "the last"}]
    options = {"max_model_len": 200}
    async with live_server(saying(text_model, "x"), text_model=text_model, engine_options=options) as server:
        body = {"model": "demo", "input": items}
        status, refused = await server.post(body, RESPONSES)
        assert (status, refused["error"]["param"]) == (400, "input")
        assert refused["error"]["code"] == "context_length_exceeded"
        status, _ = await server.post({**body, "truncation": "auto"}, RESPONSES)
        assert status == 200
        prompt = text_model.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
        longer = [*items, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
        await server.post({**body, "input": longer, "truncation": "auto"}, RESPONSES)
        after = text_model.tokenizer.decode(server.engine.submitted[-1].prompt_ids)
        short = {"model": "demo", "input": "x " * 400, "truncation": "auto"}
        assert (await server.post(short, RESPONSES))[0] == 400
    assert "the first" in prompt
    assert "the last" in prompt
    assert "question 0 " not in prompt
    assert "question 29 " in prompt
    assert after.startswith(prompt[: prompt.index("the last") + len("the last")])


async def test_a_response_names_its_conversation_for_the_next_turn(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        create = server.client.responses.create
        first = await create(model="demo", input="a")
        second = await create(model="demo", input="b", previous_response_id=first.id)
        await create(model="demo", input="c", previous_response_id=second.id)
        await create(model="demo", input="a", store=False)
        await create(model="demo", input="a", extra_headers={"thread-id": "t"})
        history: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
        await create(model="demo", input=[*history, {"role": "user", "content": "b"}])
        tags = [submit.conversation_id for submit in server.engine.submitted]
    assert tags == [first.id, first.id, first.id, None, "t", None]


DEEP: Any = []
for _ in range(99):
    DEEP = [DEEP]

BAD: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": None}, 400, "model"),
    ({"model": "other"}, 404, "model"),
    ({"input": None}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": 5}, 400, "input"),
    ({"input": [5]}, 400, "input[0]"),
    ({"input": [{"role": "king", "content": "x"}]}, 400, "input[0].role"),
    ({"input": [{"role": "user"}]}, 400, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, "input[0].content[0].text"),
    ({"input": [{"type": "message", "role": "user", "content": "a"}, {"type": "nonsense"}]}, 400, "input[1].type"),
    ({"input": [{}]}, 400, "input[0].type"),
    ({"input": [{"type": ["x"]}]}, 400, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f"}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c"}]}, 400, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, 400, "input[0].output"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "summary": 5}]}, 400, "input[0].summary"),
    ({"input": [{"type": "item_reference", "id": "msg_unknown"}]}, 400, "input[0].id"),
    ({"input": [{"id": f"msg_{'0' * 32}i0"}]}, 400, "input[0].id"),
    ({"input": [{"type": "web_search_call", "action": DEEP}]}, 400, "input[0]"),
    ({"tools": [{"type": "web_search", "x": DEEP}]}, 400, "tools[0]"),
    ({"tool_choice": {"type": "web_search", "x": DEEP}}, 400, "tool_choice"),
    ({"instructions": 5}, 400, "instructions"),
    ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
    ({"previous_response_id": f"resp_{'0' * 32}"}, 404, "previous_response_id"),
    ({"previous_response_id": "resp_x", "conversation": "conv_x"}, 400, "previous_response_id"),
    ({"conversation": "conv_x"}, 404, "conversation"),
    ({"conversation": {"id": f"conv_{'0' * 32}"}}, 404, "conversation"),
    ({"conversation": {}}, 400, "conversation.id"),
    ({"background": True, "store": False}, 400, "background"),
    ({"tools": [5]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, 400, "tools[0].parameters"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, 400, "tools[0].tools"),
    ({"tool_choice": "sometimes"}, 400, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, 400, "tool_choice.name"),
    ({"tool_choice": {"type": "web_search"}}, 400, "tool_choice.type"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"max_output_tokens": "5"}, 400, "max_output_tokens"),
    ({"max_tool_calls": 0}, 400, "max_tool_calls"),
    ({"temperature": 3}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_logprobs": 21}, 400, "top_logprobs"),
    ({"reasoning": {"effort": "enormous"}}, 400, "reasoning.effort"),
    ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, 400, "text.format.schema"),
    ({"truncation": "sometimes"}, 400, "truncation"),
    ({"metadata": {"a": 5}}, 400, "metadata[...]"),
    ({"metadata": {"a": "x" * 513}}, 400, "metadata"),
    ({"metadata": {f"{n}": "x" for n in range(17)}}, 400, "metadata"),
    ({"prompt": {"id": "p"}}, 400, "prompt"),
    ({"chat_template": "x"}, 400, "chat_template"),
    ({"context_management": [{"type": "compaction"}]}, 400, "context_management"),
]


async def test_bad_input_is_refused_with_its_field(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "x"), text_model=text_model) as server:
        for fields, status, param in BAD:
            body = {"model": "demo", "input": "x", **fields}
            got, answer = await server.post({key: value for key, value in body.items() if value is not None}, RESPONSES)
            assert (got, answer["error"]["param"]) == (status, param), fields
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert "max_completion_tokens" not in answer["error"]["message"], "a field that this shape does not have"
        for text in (b"{", b"[]", b'"x"', b'{"model": "demo", "input": "\\ud800"}', b"\xff", b"[" * 100_000):
            got, answer = await server.post(text, RESPONSES)
            assert got == 400, text[:20]
        assert (await server.get(RESPONSES))[0] == 426
        for path in ("resp_x", f"resp_{'0' * 32}", "%2e%2e"):
            for method in ("GET", "DELETE"):
                async with server.session.request(method, f"{server.url}{RESPONSES}/{path}") as response:
                    assert response.status == 404
        assert server.engine.submitted == []


TEXT = st.text(min_size=1, max_size=5)
DELTAS = st.one_of(
    st.builds(lambda text: ("content", text), TEXT),
    st.builds(lambda text: ("reasoning", text), TEXT),
    st.builds(
        lambda name, parts: ("call", (name, parts)), st.sampled_from(["get_order", "patch", "x"]), st.lists(TEXT)
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    deltas=st.lists(DELTAS, max_size=12),
    reason=st.sampled_from(["stop", "length", "tool_calls"]),
    summary=st.booleans(),
    is_queued=st.booleans(),
    ends=st.sampled_from(["complete", "fail", "cancel"]),
)
def test_any_turn_gives_events_of_the_grammar(
    deltas: list[Any], reason: Any, summary: bool, is_queued: bool, ends: str
) -> None:
    request, tools = ResponsesRequest(model="demo"), read_tools(TOOLS)
    body = response_object("resp_1", request, tools, SamplingDefaults(), 0.0)
    builder = ResponseBuilder(body, tools, lambda prefix, n: f"{prefix}_{n}", summary=summary, is_queued=is_queued)
    events = builder.opening()
    turn: list[TurnEvent] = [TurnStarted([1], 0)]
    num_calls = 0
    for kind, value in deltas:
        if kind == "call":
            name, parts = value
            turn.append(TurnDelta(0, tool_calls=[ToolCallDelta(num_calls, id=f"call_{num_calls}", name=name)]))
            turn += [TurnDelta(0, tool_calls=[ToolCallDelta(num_calls, arguments=part)]) for part in parts]
            num_calls += 1
        else:
            turn.append(TurnDelta(0, **{kind: value}))
    for event in turn:
        events += builder.add(event)
    if ends == "complete":
        events += builder.add(ChoiceEnded(0, reason, 1, 0, 1, 0))
        events += builder.complete()
    elif ends == "cancel":
        events += builder.cancel()
    else:
        events += builder.fail(errors.internal())
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(len(events)))
    shown = [event for event in events if event["type"] not in ("response.queued", "error")]
    for number, event in enumerate(shown):
        event["sequence_number"] = number
    response = check_events(shown)
    texts = {"content": "", "reasoning": ""}
    for kind, value in deltas:
        if kind in texts:
            texts[kind] += value
    said = {"content": "", "reasoning": ""}
    for item in response["output"]:
        if item["type"] == "message":
            said["content"] += item["content"][0]["text"]
        elif item["type"] == "reasoning":
            said["reasoning"] += (item["summary"] if summary else item["content"])[0]["text"]
    assert said == texts
    assert sum(item["type"].endswith("call") for item in response["output"]) == num_calls


STRUCTURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}},
    ),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"tool_choice": "required"}, {"tool_choice": "required"}),
    (
        {"tool_choice": {"type": "function", "name": "get_order"}},
        {"tool_choice": {"type": "function", "function": {"name": "get_order"}}},
    ),
    (
        {"tool_choice": {
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_order"}]}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "get_order"}}]}}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "chat_fields"), STRUCTURED)
async def test_structured_output_binds_the_answer_as_in_a_chat(
    text_model: TextModel, fields: dict[str, Any], chat_fields: dict[str, Any]
) -> None:
    tool = TOOLS[0]
    chat_tool = {"type": "function", "function": {key: tool[key] for key in ("name", "parameters")}}
    async with live_server(saying(text_model, "1"), text_model=text_model) as server:
        by_response = await server.post({"model": "demo", "input": "x", "tools": [tool], **fields}, RESPONSES)
        by_chat = await server.chat("x", tools=[chat_tool], **chat_fields)
        assert (by_response[0], by_chat[0]) == (200, 200), (by_response, by_chat)
        first, second = (submit.sampling.grammar for submit in server.engine.submitted)
    assert first is not None
    assert first == second
