"""Chat completion answers: the chunks of a stream and the body of a plain answer, from the events of a turn.

Pure. Both are made from the same deltas, so a stream adds up to the plain answer byte for byte.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from turnkeep.server.turn_events import (
    ChoiceEnded,
    EndReason,
    TokenLogprob,
    TokenText,
    ToolCallDelta,
    TurnDelta,
    TurnEvent,
    TurnStarted,
    Usage,
)
from turnkeep.server.usage_details import draft_details, loss_details


@dataclass(frozen=True)
class AnswerFrame:
    """What every chunk of one answer repeats."""

    model: str
    fingerprint: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def build(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


def usage_dict(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens, **loss_details(usage)},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens, **draft_details(usage)},
    }


class ChunkBuilder:
    """Turns the events of one turn into the payloads of its stream, in order."""

    def __init__(
        self, frame: AnswerFrame, *, num_choices: int, with_usage: bool, usage_on_every_chunk: bool, token_ids: bool
    ) -> None:
        self.usage = Usage()
        self._frame = frame
        self._num_choices = num_choices
        self._with_usage = with_usage
        self._usage_on_every_chunk = with_usage and usage_on_every_chunk
        self._token_ids = token_ids

    def first(self, started: TurnStarted) -> list[dict[str, Any]]:
        """The chunks that open the choices. Sent at admission, so that the client sees a byte early."""
        self.usage.num_prompt_tokens = len(started.prompt_ids)
        self.usage.num_cached_tokens = started.num_cached_tokens
        chunks = [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._num_choices)]
        if self._token_ids:
            chunks[0]["prompt_token_ids"] = started.prompt_ids
        return chunks

    def delta(self, delta: TurnDelta) -> dict[str, Any] | None:
        """One chunk, or None when there is nothing that this client wants to see."""
        body: dict[str, Any] = {}
        if delta.reasoning:
            body["reasoning_content"] = delta.reasoning
            body["reasoning"] = delta.reasoning
        if delta.content:
            body["content"] = delta.content
        if delta.tool_calls:
            body["tool_calls"] = [tool_call_chunk(call) for call in delta.tool_calls]
        if self._usage_on_every_chunk:
            self.usage.num_output_tokens += len(delta.token_ids)
        if not (body or delta.logprobs or (self._token_ids and delta.token_ids)):
            return None
        chunk = self._chunk(delta.index, body, logprobs=delta.logprobs)
        if self._token_ids:
            chunk["choices"][0]["token_ids"] = delta.token_ids
        return chunk

    def ended(self, ended: ChoiceEnded) -> dict[str, Any]:
        return self._chunk(ended.index, {}, reason=ended.reason)

    def last(self, usage: Usage) -> list[dict[str, Any]]:
        """The usage chunk, when the client asked for it."""
        if not self._with_usage:
            return []
        chunk = self._frame.build("chat.completion.chunk", [])
        chunk["usage"] = usage_dict(usage)
        return [chunk]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: EndReason | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": reason}
        choice["logprobs"] = logprobs_dict(logprobs) if logprobs else None
        chunk = self._frame.build("chat.completion.chunk", [choice])
        if self._usage_on_every_chunk:
            chunk["usage"] = usage_dict(self.usage)
        elif self._with_usage:
            chunk["usage"] = None
        return chunk


class CollectedChoice:
    """One choice, added up from its deltas."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason: EndReason | None = None
        # Pieces are joined once at the end: an answer may have tens of thousands.
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str | None, str | None, list[str]]] = []  # id, name, arguments

    def add(self, delta: TurnDelta) -> None:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.index == len(self._calls):
                self._calls.append((call.id, call.name, []))
            self._calls[call.index][2].append(call.arguments)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs

    def message(self) -> dict[str, Any]:
        """The assistant message as the client gets it, and as the next turn will repeat it."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if reasoning:
            message["reasoning_content"] = reasoning
            message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for id, name, arguments in self._calls
            ]
        return message


class AnswerCollector:
    """Adds the events of one turn up to a plain answer."""

    def __init__(self, num_choices: int) -> None:
        self.choices = [CollectedChoice() for _ in range(num_choices)]
        self.usage = Usage()
        self.prompt_ids: list[int] = []

    def add(self, event: TurnEvent) -> None:
        if isinstance(event, TurnStarted):
            self.prompt_ids = event.prompt_ids
        elif isinstance(event, TurnDelta):
            self.choices[event.index].add(event)
        else:
            self.choices[event.index].reason = event.reason
            self.usage.add(event, is_first_of_prompt=event.index == 0)

    def body(self, frame: AnswerFrame, *, logprobs: bool, token_ids: bool) -> dict[str, Any]:
        choices = []
        for index, collected in enumerate(self.choices):
            choice: dict[str, Any] = {
                "index": index,
                "message": collected.message(),
                "finish_reason": collected.reason,
                "logprobs": logprobs_dict(collected.logprobs) if logprobs else None,
            }
            if token_ids:
                choice["token_ids"] = collected.token_ids
            choices.append(choice)
        body = frame.build("chat.completion", choices)
        body["usage"] = usage_dict(self.usage)
        if token_ids:
            body["prompt_token_ids"] = self.prompt_ids
        return body


def tool_call_chunk(call: ToolCallDelta) -> dict[str, Any]:
    """id, type and name come with the first piece only."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def logprobs_dict(logprobs: list[TokenLogprob]) -> dict[str, Any]:
    def entry(text: TokenText) -> dict[str, Any]:
        return {"token": text.token, "bytes": None if text.bytes is None else list(text.bytes), "logprob": text.logprob}

    content = [{**entry(one.chosen), "top_logprobs": [entry(text) for text in one.top]} for one in logprobs]
    return {"content": content, "refusal": None}
