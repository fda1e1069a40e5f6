"""Equal conversations become equal messages, and wrong ones an error that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnkeep.server.chat_messages import (
    MessageError,
    normalize_messages,
    normalize_tools,
    parse_arguments,
    relaxed_messages,
)

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TOOL = {"type": "function", "function": {"name": "f"}}


def one(**message: Any) -> dict[str, Any]:
    return normalize_messages([message])[0]


def test_a_developer_speaks_as_the_system() -> None:
    assert one(role="developer", content="x") == one(role="system", content="x")


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_equal_the_joined_string(role: str) -> None:
    parts = [{"type": "text", "text": "a\n", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]
    assert one(role=role, content=parts) == one(role=role, content="a\nb")


def test_null_empty_and_absent_content_are_alike_beside_tool_calls() -> None:
    forms = [{"content": None}, {"content": ""}, {}, {"content": []}]
    results = [one(role="assistant", tool_calls=[CALL], **form) for form in forms]
    assert all(result == results[0] for result in results)
    assert results[0]["content"] == ""


def test_reasoning_is_taken_under_either_name_and_the_first_that_is_not_null_wins() -> None:
    expected = one(role="assistant", content="", reasoning_content="R")
    assert one(role="assistant", content="", reasoning="R") == expected
    assert one(role="assistant", content="", reasoning_content=None, reasoning="R") == expected
    assert one(role="assistant", content="", reasoning_content="R", reasoning="other") == expected
    assert "reasoning_content" not in one(role="assistant", content="", reasoning="")


def test_unknown_keys_never_reach_a_template() -> None:
    extra = {"name": "user", "refusal": None, "annotations": [], "audio": None, "provider_specific_fields": {"x": 1}}
    assert one(role="assistant", content="x", **extra) == {"role": "assistant", "content": "x"}
    assert one(role="user", content="x", reasoning_content="y", tool_calls=[CALL]) == {"role": "user", "content": "x"}


def test_legacy_functions_are_tools() -> None:
    assert one(role="function", name="f", content="x") == {"role": "tool", "name": "f", "content": "x"}
    calling = one(role="assistant", content=None, function_call={"name": "f", "arguments": "{}"})
    assert calling["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a":1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" ", {}),
        (None, {}),
        ("{}", {}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ("x", "x"),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": 1' + "0" * 5000 + "}", '{"a": 1' + "0" * 5000 + "}"),
        ("[" * 100_000, "[" * 100_000),
        ('{"a":' * 100 + "1" + "}" * 100, '{"a":' * 100 + "1" + "}" * 100),
    ],
)
def test_arguments_are_an_object_where_they_parse_to_one_and_the_raw_text_otherwise(
    arguments: object, expected: object
) -> None:
    assert parse_arguments(arguments) == expected


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hello", "messages"),
        ([], "messages"),
        (["x"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "narrator", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "reasoning": 3}], "messages[0].reasoning"),
    ],
)
def test_a_wrong_message_is_an_error_that_names_the_field(messages: object, param: str) -> None:
    with pytest.raises(MessageError) as caught:
        normalize_messages(messages)
    assert caught.value.param == param


def test_unmatched_duplicated_and_long_tool_call_ids_are_tolerated() -> None:
    messages = [{"role": "tool", "content": "x", "tool_call_id": "y" * 500}] * 2
    assert len(normalize_messages(messages)) == 2


def test_lone_surrogates_never_reach_a_template() -> None:
    text = json.loads('"a\\ud800b"')
    assert one(role="user", content=text)["content"] == "a\ufffdb"
    assert one(role="user", content=[{"type": "text", "text": text}])["content"] == "a\ufffdb"


def test_a_tool_without_parameters_takes_none() -> None:
    tools = normalize_tools([TOOL, {"type": "function", "function": {"name": "g", "strict": True, "parameters": {}}}])
    assert tools == [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},
        {"type": "function", "function": {"name": "g", "parameters": {}}},
    ]
    assert normalize_tools(None) is None


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([], "tools"),
        ({}, "tools"),
        ([1], "tools[0].type"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "f", "description": 1}}], "tools[0].function.description"),
    ],
)
def test_a_wrong_tool_is_an_error_that_names_the_field(tools: object, param: str) -> None:
    with pytest.raises(MessageError) as caught:
        normalize_tools(tools)
    assert caught.value.param == param


def test_relaxed_messages_alternate() -> None:
    messages = normalize_messages(
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "broken"}}]},
            {"role": "tool", "content": "r"},
            {"role": "tool", "content": "r"},
        ]
    )
    relaxed = relaxed_messages(messages)
    assert [message["role"] for message in relaxed] == ["user", "assistant", "tool", "tool"]
    assert relaxed[0]["content"] == "S\n\na\n\nb"
    assert relaxed[1]["tool_calls"][0]["function"]["arguments"] == {"arguments": "broken"}
