"""A turn over the Responses API: the request's body, with or without the history, and its events read back. Pure."""

from __future__ import annotations

from typing import Any

from turnkeep.clients.history import History, Message
from turnkeep.clients.options import TurnOptions
from turnkeep.clients.partial_answer import PartialAnswer

INCLUDE = ["reasoning.encrypted_content"]


def response_body(
    history: History, new: list[Message], options: TurnOptions, *, previous_response_id: str | None, store: bool
) -> dict[str, Any]:
    """The new messages behind a response, or the whole history where there is none to continue."""
    items: list[dict[str, Any]] = []
    if previous_response_id is None:
        items.extend(_history_items(history))
    for message in new:
        items.extend(_message_items(message))
    body: dict[str, Any] = {"input": items, "store": store, "include": INCLUDE, **options.response_fields()}
    if history.system is not None:
        body["instructions"] = history.system
    if previous_response_id is not None:
        body["previous_response_id"] = previous_response_id
    if history.tools:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in history.tools]
    else:
        body.pop("tool_choice", None)
    return body


def read_event(event: dict[str, Any], answer: PartialAnswer) -> None:
    """Add a streaming event to the answer."""
    kind = event.get("type")
    if kind == "response.output_text.delta":
        answer.add_text(event["delta"])
    elif kind in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
        answer.add_reasoning(event["delta"])
    elif kind in ("response.completed", "response.incomplete"):
        _read_response(event["response"], answer)


def _read_response(response: dict[str, Any], answer: PartialAnswer) -> None:
    answer.read_usage(response.get("usage") or {}, "input", "output")
    answer.response_id = response["id"]
    answer.items = response["output"]
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    answer.call_pieces = {
        index: {"id": call["call_id"], "name": call["name"], "arguments": call["arguments"]}
        for index, call in enumerate(calls)
    }
    if response.get("status") == "incomplete":
        reason = (response.get("incomplete_details") or {}).get("reason")
        answer.finish_reason = "content_filter" if reason == "content_filter" else "length"
    else:
        answer.finish_reason = "tool_calls" if calls else "stop"


def _history_items(history: History) -> list[dict[str, Any]]:
    """Every message as items; an answer that came as items goes back as those."""
    answers = {turn.end: turn.items for turn in history.turns if turn.items is not None}
    items: list[dict[str, Any]] = []
    for index, message in enumerate(history.messages):
        items.extend(answers[index] if index in answers else _message_items(message))
    return items


def _message_items(message: Message) -> list[dict[str, Any]]:
    role = message["role"]
    if role == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    if role != "assistant":
        return [{"type": "message", "role": role, "content": message["content"]}]
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        text = {"type": "reasoning_text", "text": message["reasoning_content"]}
        items.append({"type": "reasoning", "summary": [], "content": [text]})
    if message.get("content"):
        content = [{"type": "output_text", "text": message["content"], "annotations": []}]
        items.append({"type": "message", "role": "assistant", "content": content})
    items.extend(
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
        }
        for call in message.get("tool_calls", ())
    )
    return items
