"""A response and the events that tell it, from the events of a turn. Pure: no store, no HTTP.

Everything a client gets, streamed or not, is made here from the same steps, so a stream adds up to the plain answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from turnkeep.server import errors
from turnkeep.server.responses.item_messages import make_encrypted
from turnkeep.server.responses.shapes import ResponsesRequest
from turnkeep.server.responses.tools import ToolSet, custom_input
from turnkeep.server.stores import Item
from turnkeep.server.turn_events import (
    ChoiceEnded,
    TokenLogprob,
    TokenText,
    ToolCallDelta,
    TurnEvent,
    TurnStarted,
    num_written_tokens,
)
from turnkeep.server.turn_request import SamplingDefaults
from turnkeep.server.usage_details import draft_details, loss_details

Event = dict[str, Any]
ItemStatus = Literal["completed", "incomplete"]

FAILURE_CODES = frozenset({"server_error", "rate_limit_exceeded", "context_length_exceeded"})


def response_object(
    id: str, request: ResponsesRequest, tools: ToolSet, defaults: SamplingDefaults, created_s: float
) -> dict[str, Any]:
    """The response before anything was said."""
    reasoning, text = request.reasoning, request.text
    text_format = text.format if text is not None and text.format is not None else None
    summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    conversation = request.conversation_given

    def given(value: Any, default: Any) -> Any:
        return default if value is None else value

    body = {
        "id": id,
        "object": "response",
        "created_at": int(created_s),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(request.background),
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": summary},
        "safety_identifier": request.safety_identifier,
        "service_tier": given(request.service_tier, "default"),
        "store": request.is_stored,
        "temperature": given(request.temperature, defaults.temperature),
        "top_p": given(request.top_p, defaults.top_p),
        "top_logprobs": given(request.top_logprobs, 0),
        "frequency_penalty": given(request.frequency_penalty, 0.0),
        "presence_penalty": given(request.presence_penalty, 0.0),
        "text": {
            "format": {"type": "text"} if text_format is None else msgspec.to_builtins(text_format),
            "verbosity": "medium" if text is None or text.verbosity is None else text.verbosity,
        },
        "tool_choice": given(request.tool_choice, "auto"),
        "tools": tools.shown,
        "truncation": given(request.truncation, "disabled"),
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }
    if conversation is not None:
        body["conversation"] = {"id": conversation}
    return body


class ResponseBuilder:
    """Follows one turn: opening(), add() for its events, then complete() or fail(). Events come in their order.

    `response` is the response as of now; make_item_id(prefix, number) names the items of the output.
    """

    def __init__(
        self,
        response: dict[str, Any],
        tools: ToolSet,
        make_item_id: Callable[[str, int], str],
        *,
        summary: bool = False,
        encrypted: bool = False,
        is_queued: bool = False,
    ) -> None:
        self.response = response
        self.is_over = False
        self._tools = tools
        self._make_item_id = make_item_id
        self._summary = summary
        self._encrypted = encrypted
        self._is_queued = is_queued
        self._num_events = 0
        self._item: Item | None = None  # what is open at the moment
        self._pieces: list[str] = []
        self._logprobs: list[Any] = []
        self._unshown_logprobs: list[Any] = []

    def opening(self) -> list[Event]:
        """The first events."""
        if self._is_queued:
            self.response["status"] = "queued"
            return [self._response_event("created"), self._response_event("queued")]
        return [self._response_event("created"), self._response_event("in_progress")]

    def add(self, event: TurnEvent) -> list[Event]:
        """What an event of the turn adds. After its end the response is complete except for complete()."""
        if isinstance(event, TurnStarted):
            if self.response["status"] != "queued":
                return []
            self.response["status"] = "in_progress"
            return [self._response_event("in_progress")]
        if isinstance(event, ChoiceEnded):
            return self._end(event)
        events = []
        if event.reasoning:
            events += self._add_reasoning(event.reasoning)
        if event.content and (self._item is None or self._item["type"] != "message"):
            events += self._open_message()
        if self._item is None or self._item["type"] == "message":
            self._unshown_logprobs += event.logprobs
        if event.content:
            events.append(self._add_text(event.content))
        for call in event.tool_calls:
            events += self._add_call(call)
        return events

    def complete(self) -> list[Event]:
        """The last event, after the end of the turn."""
        self.is_over = True
        return [self._response_event(self.response["status"])]

    def fail(self, error: errors.ApiError) -> list[Event]:
        """The end of a response that broke: what is open is closed, and both kinds of client are told why."""
        events = self._close("incomplete")
        code = error.code if error.code in FAILURE_CODES else "server_error"
        if error.status < 500 and code == "server_error":
            code = "invalid_prompt"
        self.is_over = True
        failure = {"code": code, "message": error.message}
        self.response |= {"status": "failed", "error": failure, "incomplete_details": None, "completed_at": None}
        events.append(self._event("error", code=code, message=error.message, param=error.param))
        events.append(self._response_event("failed"))
        return events

    def cancel(self) -> list[Event]:
        """The end of a response that its client called off."""
        events = self._close("incomplete")
        self.is_over = True
        self.response["status"] = "cancelled"
        return [*events, self._response_event("failed")]

    def _end(self, ended: ChoiceEnded) -> list[Event]:
        is_cut = ended.reason == "length"
        events = self._close("incomplete" if is_cut else "completed")
        kinds = {item["type"] for item in self.response["output"]}
        if not kinds or (not is_cut and kinds == {"reasoning"}):
            # An answer without a word is an empty message: clients take its text.
            events += self._open_message()
            events += self._close("incomplete" if is_cut else "completed")
        if is_cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        status = "incomplete" if is_cut else "completed"
        self.response |= {"status": status, "completed_at": int(time.time()), "usage": usage_dict(ended)}
        return events

    def _add_reasoning(self, text: str) -> list[Event]:
        events = []
        if self._item is None or self._item["type"] != "reasoning":
            events = self._close("completed")
            item = {"type": "reasoning", "id": self._next_id("rs"), "status": "in_progress", "summary": []}
            events += self._open({**item, "content": []} if not self._summary else item)
            part = {"type": "summary_text" if self._summary else "reasoning_text", "text": ""}
            events.append(self._part_event("added", part))
        self._pieces.append(text)
        kind = "reasoning_summary_text" if self._summary else "reasoning_text"
        events.append(self._item_event(f"{kind}.delta", **self._part_index(), delta=text))
        return events

    def _add_text(self, text: str) -> Event:
        self._pieces.append(text)
        logprobs = [logprob_dict(one) for one in self._unshown_logprobs]
        self._unshown_logprobs.clear()
        self._logprobs += logprobs
        return self._item_event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _open_message(self) -> list[Event]:
        events = self._close("completed")
        item = {
            "type": "message",
            "id": self._next_id("msg"),
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        events += self._open(item)
        events.append(self._part_event("added", {"type": "output_text", "text": "", "annotations": [], "logprobs": []}))
        return events

    def _add_call(self, call: ToolCallDelta) -> list[Event]:
        events = []
        if call.name is not None:
            events = self._close("completed")
            target = self._tools.target(call.name)
            is_custom = target.kind == "custom"
            item: Item = {
                "type": "custom_tool_call" if is_custom else "function_call",
                "id": self._next_id("ctc" if is_custom else "fc"),
                "call_id": call.id,
                "name": target.name,
                "input" if is_custom else "arguments": "",
                "status": "in_progress",
            }
            if target.namespace is not None:
                item["namespace"] = target.namespace
            events += self._open(item)
        if call.arguments:
            self._pieces.append(call.arguments)
            if self._item is not None and self._item["type"] == "function_call":
                events.append(self._item_event("function_call_arguments.delta", delta=call.arguments))
        return events

    def _open(self, item: Item) -> list[Event]:
        self._item, self._pieces, self._logprobs = item, [], []
        return [self._event("response.output_item.added", output_index=self._index, item={**item})]

    def _close(self, status: ItemStatus) -> list[Event]:
        """End what is open, with all events that belong to it."""
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return []
        closers = {
            "reasoning": self._close_reasoning,
            "message": self._close_message,
            "function_call": self._close_call,
            "custom_tool_call": self._close_custom_call,
        }
        events = closers[item["type"]](item, text)
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=self._index, item={**item}))
        self.response["output"] = [*self.response["output"], item]
        self._item = None
        self._unshown_logprobs.clear()
        return events

    def _close_reasoning(self, item: Item, text: str) -> list[Event]:
        part = {"type": "summary_text" if self._summary else "reasoning_text", "text": text}
        item["summary" if self._summary else "content"] = [part]
        if self._encrypted:
            item["encrypted_content"] = make_encrypted(text)
        kind = "reasoning_summary_text" if self._summary else "reasoning_text"
        done = self._item_event(f"{kind}.done", **self._part_index(), text=text)
        return [done, self._part_event("done", part)]

    def _close_message(self, item: Item, text: str) -> list[Event]:
        self._logprobs += [logprob_dict(one) for one in self._unshown_logprobs]
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}
        item["content"] = [part]
        done = self._item_event("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
        return [done, self._part_event("done", part)]

    def _close_call(self, item: Item, text: str) -> list[Event]:
        item["arguments"] = text
        return [self._item_event("function_call_arguments.done", name=item["name"], arguments=text)]

    def _close_custom_call(self, item: Item, text: str) -> list[Event]:
        item["input"] = custom_input(text)
        return [
            self._item_event("custom_tool_call_input.delta", delta=item["input"]),
            self._item_event("custom_tool_call_input.done", input=item["input"]),
        ]

    @property
    def _index(self) -> int:
        return len(self.response["output"])

    def _next_id(self, prefix: str) -> str:
        return self._make_item_id(prefix, self._index)

    def _part_index(self) -> dict[str, int]:
        return {"summary_index": 0} if self._summary else {"content_index": 0}

    def _part_event(self, what: str, part: Item) -> Event:
        is_summary = part["type"] == "summary_text"
        kind = "reasoning_summary_part" if is_summary else "content_part"
        index = {"summary_index": 0} if is_summary else {"content_index": 0}
        return self._item_event(f"{kind}.{what}", **index, part=part)

    def _item_event(self, kind: str, **fields: Any) -> Event:
        assert self._item is not None
        return self._event(f"response.{kind}", item_id=self._item["id"], output_index=self._index, **fields)

    def _response_event(self, kind: str) -> Event:
        return self._event(f"response.{kind}", response={**self.response})

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **fields}


def usage_dict(ended: ChoiceEnded) -> dict[str, Any]:
    return {
        "input_tokens": ended.num_prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": ended.num_cached_tokens,
            "cache_write_tokens": num_written_tokens(ended.num_cached_tokens, ended.num_declared_tokens),
            **loss_details(ended),
        },
        "output_tokens": ended.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": ended.num_reasoning_tokens, **draft_details(ended)},
        "total_tokens": ended.num_prompt_tokens + ended.num_output_tokens,
    }


def logprob_dict(one: TokenLogprob) -> dict[str, Any]:
    def entry(text: TokenText) -> dict[str, Any]:
        return {"token": text.token, "bytes": list(text.bytes or ()), "logprob": text.logprob}

    return {**entry(one.chosen), "top_logprobs": [entry(text) for text in one.top]}
