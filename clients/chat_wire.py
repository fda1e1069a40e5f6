"""A turn over Chat Completions: the request's body, and its chunks read back. Pure."""

from __future__ import annotations

from typing import Any

from turnkeep.clients.history import History, Message
from turnkeep.clients.options import TurnOptions
from turnkeep.clients.partial_answer import PartialAnswer
from turnkeep.clients.turn import ToolCall


def chat_body(history: History, new: list[Message], options: TurnOptions) -> dict[str, Any]:
    """The whole history and the new messages."""
    messages: list[Message] = []
    if history.system is not None:
        messages.append({"role": "system", "content": history.system})
    body: dict[str, Any] = {
        "messages": [*messages, *history.messages, *new],
        "stream": True,
        "stream_options": {"include_usage": True},
        **options.chat_fields(),
    }
    if history.tools:
        body["tools"] = history.tools
    else:
        body.pop("tool_choice", None)
    return body


def read_chunk(chunk: dict[str, Any], answer: PartialAnswer) -> None:
    """Add a chunk to the answer."""
    usage = chunk.get("usage")
    if usage:
        answer.read_usage(usage, "prompt", "completion")
    for choice in chunk.get("choices") or ():
        if choice.get("index", 0) != 0:
            continue
        delta = choice.get("delta") or {}
        answer.add_reasoning(delta.get("reasoning_content") or delta.get("reasoning") or "")
        answer.add_text(delta.get("content") or delta.get("refusal") or "")
        for piece in delta.get("tool_calls") or ():
            answer.add_call_piece(piece)
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def calls_of(answer: PartialAnswer) -> tuple[ToolCall, ...]:
    """The calls that came in pieces, in their order."""
    return tuple(
        ToolCall(piece["id"], piece["name"], piece["arguments"]) for _, piece in sorted(answer.call_pieces.items())
    )
