"""Answers of the Messages API: the events of a stream, and the plain body made of the same events.

Pure. An answer is a list of blocks, each opened, filled and closed before the next: thinking, text, tool_use.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from turnkeep.server import event_stream
from turnkeep.server.errors import ApiError
from turnkeep.server.messages_api.refusals import messages_envelope
from turnkeep.server.messages_api.signature import make_signature
from turnkeep.server.turn_events import (
    ChoiceEnded,
    ToolCallDelta,
    TurnDelta,
    TurnEvent,
    TurnStarted,
    num_written_tokens,
)
from turnkeep.server.usage_details import draft_details, loss_details

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

Event = dict[str, Any]


def usage_dict(
    num_prompt_tokens: int, num_cached_tokens: int, num_output_tokens: int, num_declared_tokens: int
) -> dict[str, int]:
    """What had to be computed up to the client's last cache mark counts as created, the rest of it as input; with what
    was read, they add up to the prompt."""
    num_written = num_written_tokens(num_cached_tokens, num_declared_tokens)
    return {
        "input_tokens": num_prompt_tokens - num_cached_tokens - num_written,
        "cache_creation_input_tokens": num_written,
        "cache_read_input_tokens": num_cached_tokens,
        "output_tokens": num_output_tokens,
    }


class MessageEvents:
    """Turns the events of one turn into Anthropic's. omit_thinking: thinking blocks carry only their signature."""

    def __init__(self, model: str, *, omit_thinking: bool) -> None:
        self._model = model
        self._omit_thinking = omit_thinking
        self._id = f"msg_{uuid.uuid4().hex[:24]}"
        self._index = -1  # of the block that is open, or was last
        self._open: str | None = None
        self._call_index = -1
        self._reasoning: list[str] = []

    def convert(self, event: TurnEvent) -> list[Event]:
        if isinstance(event, TurnStarted):
            return [self._start(event)]
        if isinstance(event, TurnDelta):
            return self._delta(event)
        return self._end(event)

    def _start(self, started: TurnStarted) -> Event:
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_dict(len(started.prompt_ids), started.num_cached_tokens, 0, started.num_declared_tokens),
        }
        return {"type": "message_start", "message": message}

    def _delta(self, delta: TurnDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            if self._open != "thinking":
                events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
            self._reasoning.append(delta.reasoning)
            if not self._omit_thinking:
                events.append(self._piece({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            if self._open != "text":
                events += self._begin({"type": "text", "text": ""})
            events.append(self._piece({"type": "text_delta", "text": delta.content}))
        for call in delta.tool_calls:
            events += self._call(call)
        return events

    def _call(self, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if call.index != self._call_index:
            self._call_index = call.index
            events += self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if call.arguments:
            events.append(self._piece({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._index += 1
        self._open = block["type"]
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _piece(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        events: list[Event] = []
        if self._open == "thinking":
            signature = make_signature("".join(self._reasoning))
            events.append(self._piece({"type": "signature_delta", "signature": signature}))
            self._reasoning.clear()
        self._open = None
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _end(self, ended: ChoiceEnded) -> list[Event]:
        is_sequence = ended.reason == "stop" and ended.stop_string is not None
        delta = {
            "stop_reason": "stop_sequence" if is_sequence else STOP_REASONS[ended.reason],
            "stop_sequence": ended.stop_string if is_sequence else None,
        }
        usage: dict[str, Any] = {
            **usage_dict(
                ended.num_prompt_tokens, ended.num_cached_tokens, ended.num_output_tokens, ended.num_declared_tokens
            ),
            **loss_details(ended),
            "output_tokens_details": {"thinking_tokens": ended.num_reasoning_tokens, **draft_details(ended)},
        }
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]


class MessageStream:
    """StreamShape of Anthropic's events."""

    def __init__(self, events: MessageEvents, request_id: str) -> None:
        self._events = events
        self._request_id = request_id

    def encode(self, events: list[TurnEvent]) -> bytes:
        return b"".join(
            event_stream.encode_named_event(one["type"], one) for event in events for one in self._events.convert(event)
        )

    def end(self) -> bytes:
        return b""

    def broken(self, error: ApiError) -> bytes:
        return event_stream.encode_named_event("error", messages_envelope(error, self._request_id))


class MessageCollector:
    """Adds Anthropic's events up to the plain body."""

    def __init__(self, events: MessageEvents) -> None:
        self._events = events
        self._message: dict[str, Any] = {}
        self._pieces: list[str] = []

    def add(self, event: TurnEvent) -> None:
        for one in self._events.convert(event):
            self._apply(one)

    def body(self) -> dict[str, Any]:
        """Valid once the turn is complete."""
        return self._message

    def _apply(self, event: Event) -> None:
        kind = event["type"]
        if kind == "message_start":
            self._message = event["message"]
        elif kind == "content_block_start":
            self._message["content"].append(event["content_block"])
            self._pieces = []
        elif kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                self._message["content"][-1]["signature"] = delta["signature"]
            else:
                self._pieces.append(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
        elif kind == "content_block_stop":
            self._fill(self._message["content"][-1], "".join(self._pieces))
        elif kind == "message_delta":
            self._message |= event["delta"]
            self._message["usage"] = event["usage"]

    def _fill(self, block: dict[str, Any], text: str) -> None:
        if block["type"] == "tool_use":
            # The parser has checked that it is an object; numbers too large for a machine word pass as they are.
            block["input"] = msgspec.Raw(text.encode()) if text else {}
        else:
            block[block["type"]] = text
