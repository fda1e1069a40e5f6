"""Structured output of the bundled model over HTTP: of the form asked for, whatever the model would have said."""

from __future__ import annotations

import json
from typing import Any

import pytest
from served_conversation import Server

from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, TOOLS

PATH = "/v1/chat/completions"
ORDER = {
    "type": "object",
    "properties": {
        "order": {"type": "string", "pattern": "^[A-Z][0-9]{2}$"},
        "status": {"enum": ["sent", "waiting", "unknown"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["order", "status", "count"],
    "additionalProperties": False,
}


def chat(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}]
    body = {"model": "demo", "messages": messages, "max_tokens": 300, **fields}
    status, answer = server.post(PATH, body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.2, "seed": 4}])
def test_an_order_is_described_as_its_schema_says(demo_server: Server, options: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "order", "strict": True, "schema": ORDER}}
    first, again = (chat(demo_server, "Where is my order B47?", response_format=wanted, **options) for _ in range(2))
    message = first["choices"][0]["message"]
    assert first["choices"][0]["finish_reason"] == "stop"
    order = json.loads(message["content"])
    assert sorted(order) == ["count", "order", "status"]
    assert order["status"] in ("sent", "waiting", "unknown")
    assert 0 <= order["count"] <= 99
    assert again["choices"][0]["message"] == message, "a hit on the prefix changes nothing"
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.2, "seed": 4}])
def test_a_required_call_is_made_even_to_a_greeting(demo_server: Server, options: dict[str, Any]) -> None:
    answer = chat(demo_server, "Hello!", tools=TOOLS, tool_choice="required", **options)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    for call in choice["message"]["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments) <= set(declared[call["function"]["name"]]["properties"])


def test_a_named_function_is_the_one_called_and_the_conversation_goes_on_from_it(demo_server: Server) -> None:
    name = TOOLS[-1]["function"]["name"]
    choice = {"type": "function", "function": {"name": name}}
    first = chat(demo_server, "Hello!", tools=TOOLS, tool_choice=choice, temperature=0)
    message = first["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == name
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "Hello!"},
        message,
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    status, second = demo_server.post(PATH, {"model": "demo", "messages": messages, "tools": TOOLS, "max_tokens": 20})
    assert status == 200, second
    usage = first["usage"]
    held = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= held - 1, "the call is in the model's own form"


def test_a_free_json_object_is_one_or_was_cut_off(demo_server: Server) -> None:
    answer = chat(demo_server, "Hello!", response_format={"type": "json_object"}, temperature=0, max_tokens=400)
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":  # nothing makes a model end a free object
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].startswith("{")
