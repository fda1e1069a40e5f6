"""Items of a conversation as the messages of a chat."""

from __future__ import annotations

from typing import Any

from turnkeep.server.responses.input_items import read_items, with_ids
from turnkeep.server.responses.item_messages import make_encrypted, to_messages
from turnkeep.server.responses.tools import custom_input

USER = {"role": "user", "content": "x"}


def messages(*items: dict[str, Any]) -> list[dict[str, Any]]:
    return to_messages(read_items(list(items)))


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def call(id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_what_one_turn_wrote_is_one_message() -> None:
    (message,) = messages(reasoning("a"), said("b"), call("1"), call("2"))
    assert (message["reasoning_content"], message["content"]) == ("a", "b")
    assert [one["id"] for one in message["tool_calls"]] == ["1", "2"]
    assert len(messages(call("1"), said("b"))) == 1


def test_answers_in_a_row_stay_answers_of_their_own() -> None:
    assert [one["content"] for one in messages(said("a"), said("b"))] == ["a", "b"]
    first, second = messages(reasoning("1"), said("a"), reasoning("2"), said("b"))
    assert (first["reasoning_content"], second["reasoning_content"]) == ("1", "2")


def test_results_and_users_end_a_turn() -> None:
    output = {"type": "function_call_output", "call_id": "1", "output": "ok"}
    roles = [one["role"] for one in messages(USER, call("1"), output, call("2"), USER, said("a"))]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]


def test_free_text_calls_go_to_the_model_and_back_as_one_string() -> None:
    item = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": 'say "hi" – ü\n'}
    (message,) = messages(item)
    (made,) = message["tool_calls"]
    assert custom_input(made["function"]["arguments"]) == item["input"]
    assert custom_input("no json") == "no json"
    assert custom_input('{"input": 5}') == '{"input": 5}'


def test_what_only_another_server_can_read_leaves_nothing() -> None:
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    assert messages(USER, foreign, USER) == [USER, USER]
    assert messages({"type": "compaction", "encrypted_content": "gAAAA"}, USER) == [USER]
    assert messages({"type": "compaction", "encrypted_content": make_encrypted("s")})[0]["content"] == "s"


def test_every_item_gets_an_id_of_its_own() -> None:
    items = read_items([{**USER, "id": "a"}, {**USER, "id": "a"}, USER, {**USER, "id": "known"}, {**USER, "id": "\n"}])
    named = with_ids(items, lambda _, number: f"new{number}", {"known"})
    assert [item["id"] for item in named] == ["a", "new1", "new2", "new3", "new4"]
