"""Messages requests become the chat request that asks for the same, however they are written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from turnkeep.server.chat_messages import normalize_messages
from turnkeep.server.errors import ApiError
from turnkeep.server.messages_api.conversion import to_chat_request
from turnkeep.server.messages_api.shapes import MessagesRequest, parse_messages_request
from turnkeep.server.messages_api.signature import MAX_REASONING_BYTES, make_signature, read_signature

USE = {"type": "tool_use", "id": "t1", "name": "get_order", "input": {"order": "B47"}}


def request(messages: list[dict[str, Any]], **fields: Any) -> MessagesRequest:
    return parse_messages_request(
        json.dumps({"model": "demo", "max_tokens": 2000, "messages": messages, **fields}).encode()
    )


def canonical(messages: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return normalize_messages(to_chat_request(request(messages, **fields)).messages)


def text(value: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def test_text_and_blocks_and_cache_marks_give_the_same_prompt() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    plain = canonical([{"role": "user", "content": "Hi"}], system="Be brief.")
    assert plain == canonical([user(text("Hi"))], system=[text("Be brief.")])
    assert plain == canonical([user(text("Hi", **mark))], system=[text("Be brief.", **mark)])


def test_the_billing_header_never_reaches_the_model() -> None:
    system = [text("x-anthropic-billing-header: cc_version=2.1; cch=ab12;"), text("You are an agent."), text("Rules.")]
    assert canonical([user(text("Hi"))], system=system)[0]["content"] == "You are an agent.\n\nRules."


def test_reminders_stay_where_they_stand() -> None:
    messages = canonical(
        [user(text("Hi")), {"role": "system", "content": "A reminder."}, {"role": "assistant", "content": "Hello."}]
    )
    assert [message["role"] for message in messages] == ["user", "system", "assistant"]


def test_tool_results_become_tool_messages_and_the_rest_stays_the_users() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("sent"), {"type": "image", "source": {}}]}
    messages = canonical([user(text("Where?")), {"role": "assistant", "content": [USE]}, user(result, text("And?"))])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    assert messages[1]["tool_calls"][0]["function"] == {"name": "get_order", "arguments": {"order": "B47"}}
    assert messages[2] == {"role": "tool", "tool_call_id": "t1", "content": messages[2]["content"]}
    assert messages[2]["content"].startswith("sent\n[an image")
    assert messages[3]["content"] == "And?"


@pytest.mark.parametrize(
    ("content", "expected"),
    [("no such file", "Error: no such file"), ("Error: gone", "Error: gone"), (None, "Error: ")],
)
def test_a_failed_tool_is_told_as_an_error(content: str | None, expected: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": content}
    assert canonical([user(result)])[0]["content"] == expected


def test_thinking_comes_back_exactly_by_its_signature() -> None:
    signature = make_signature("  I look.\n")
    for shown in ("  I look.\n", "I look.", ""):
        block = {"type": "thinking", "thinking": shown, "signature": signature}
        messages = canonical([user(text("Hi")), {"role": "assistant", "content": [block, text("Yes.")]}])
        assert messages[1]["reasoning_content"] == "  I look.\n"
    edited = {"type": "thinking", "thinking": "Something else", "signature": signature}
    messages = canonical([user(text("Hi")), {"role": "assistant", "content": [edited, text("Yes.")]}])
    assert messages[1]["reasoning_content"] == "Something else"


@pytest.mark.parametrize("signature", ["", "tk1.", "tk1.!!!", "tk1.AAAA", "EqQBCgIYAhIM", None, 5])
def test_signatures_of_others_say_nothing(signature: object) -> None:
    assert read_signature(signature) is None


def test_a_signature_cannot_unpack_without_bound() -> None:
    assert read_signature(make_signature("x" * (MAX_REASONING_BYTES + 1))) is None
    assert read_signature(make_signature("ü" * 1000)) == "ü" * 1000


def test_blocks_of_hosted_tools_are_passed_over() -> None:
    blocks = [{"type": "server_tool_use", "id": "s"}, text("Found it."), {"type": "redacted_thinking", "data": "x"}]
    assert canonical([user(text("Hi")), {"role": "assistant", "content": blocks}])[1] == {
        "role": "assistant",
        "content": "Found it.",
    }


def test_tools_and_choices_become_those_of_chat() -> None:
    tools = [
        {"name": "get_order", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    chat = to_chat_request(request([user(text("Hi"))], tools=tools, tool_choice={"type": "any"}))
    function = {"name": "get_order", "description": "d", "parameters": {"type": "object"}}
    assert chat.tools == [{"type": "function", "function": function, "cache_control": {}}]
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", True)
    choice = {"type": "tool", "name": "get_order", "disable_parallel_tool_use": True}
    chat = to_chat_request(request([user(text("Hi"))], tools=tools, tool_choice=choice))
    assert chat.tool_choice == {"type": "function", "function": {"name": "get_order"}}
    assert chat.parallel_tool_calls is False
    assert to_chat_request(request([user(text("Hi"))], tools=[])).tools is None


def test_an_output_format_becomes_a_response_format() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_format": wanted}, {"output_config": {"format": wanted}}):
        chat = to_chat_request(request([user(text("Hi"))], **fields))
        assert chat.response_format is not None
        assert chat.response_format.json_schema is not None
        assert chat.response_format.json_schema.schema == {"type": "object"}


def test_thinking_settings_become_template_arguments() -> None:
    def settings(**fields: Any) -> tuple[Any, Any]:
        chat = to_chat_request(request([user(text("Hi"))], **fields))
        return chat.chat_template_kwargs, chat.reasoning_effort

    assert settings() == (None, None)
    assert settings(thinking={"type": "disabled"}) == ({"enable_thinking": False}, None)
    assert settings(thinking={"type": "enabled", "budget_tokens": 1024}) == ({"enable_thinking": True}, None)
    adaptive = {"type": "adaptive", "display": "omitted"}
    assert settings(thinking=adaptive, output_config={"effort": "high"}) == ({"enable_thinking": True}, "high")


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [user({"type": "image", "source": {}})]}, "messages.0.content.0.type"),
        ({"messages": [user({"text": "x"})]}, "messages.0.content.0.type"),
        ({"messages": [user({"type": "tool_result", "content": "x"})]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{**USE, "input": "x"}]}]}, "messages.0.content.0.input"),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "max_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"stop_sequences": ["a"] * 5}, "stop_sequences"),
        ({"output_config": {"effort": "huge"}}, "reasoning_effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], where: str) -> None:
    body = request([user(text("Hi"))])
    with pytest.raises(ApiError) as refusal:
        to_chat_request(msgspec.structs.replace(body, **fields))
    assert refusal.value.status == 400
    assert refusal.value.param == where
