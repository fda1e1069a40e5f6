"""POST /v1/completions: the body as clients send it, and its answers. Pure; bare texts or token ids are continued.

Every choice of every prompt has one index: prompt number times n, plus the choice's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from turnkeep.server import errors, event_stream
from turnkeep.server.chat_answers import AnswerFrame, usage_dict
from turnkeep.server.chat_completions import (
    ChatCompletionRequest,
    CompletionFields,
    convert_request,
    decode_request,
)
from turnkeep.server.turn_events import ChoiceEnded, TokenLogprob, TurnDelta, TurnEvent, TurnStarted, Usage

MAX_PROMPTS = 64
MAX_LOGPROBS = 5
DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


class CompletionRequest(CompletionFields, kw_only=True):
    """The body. None and absent mean the same everywhere; what samples means what it means in chat completions."""

    prompt: str | list[Any]
    max_tokens: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None


_decoder = msgspec.json.Decoder(CompletionRequest)


def parse_completion_request(body: bytes) -> CompletionRequest:
    """The typed request. Raises ApiError 400."""
    return decode_request(_decoder, body)


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """The prompts in their order: a text, token ids, or a list of either. Raises ApiError 400."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise errors.bad_request("prompt must not be empty.", "prompt")
    if all(_is_id(one) for one in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise errors.bad_request(f"prompt may hold at most {MAX_PROMPTS} prompts.", "prompt")
    for index, one in enumerate(prompt):
        if not isinstance(one, str) and not (isinstance(one, list) and one and all(map(_is_id, one))):
            raise errors.bad_request("A prompt is a text or a list of token ids.", f"prompt[{index}]")
    return list(prompt)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def to_sampling_request(body: CompletionRequest) -> ChatCompletionRequest:
    """The chat request that samples in the same way; its messages mean nothing. Raises ApiError 400."""
    if body.suffix:
        raise errors.unsupported("suffix needs a model that fills in the middle; it is not served.", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise errors.unsupported("best_of other than n is not served.", "best_of")
    if body.echo and body.logprobs is not None:
        raise errors.unsupported("Log probabilities of the prompt (echo with logprobs) are not served.", "logprobs")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise errors.bad_request(f"logprobs must be at least 0 and at most {MAX_LOGPROBS}.", "logprobs")
    fields = {name: msgspec.to_builtins(getattr(body, name)) for name in CompletionFields.__struct_fields__}
    return convert_request(
        {
            **fields,
            "messages": [{"role": "user", "content": ""}],
            "max_tokens": DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            "logprobs": body.logprobs is not None,
            "top_logprobs": body.logprobs,
        }
    )


@dataclass(slots=True)
class _Progress:
    """One choice so far."""

    num_chars: int = 0  # of its text, echo included: where the next token begins
    is_begun: bool = False
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reason: str | None = None


class CompletionEvents:
    """Turns events of all turns into chunks. echoes: the text to repeat in front, one a prompt; empty for none."""

    def __init__(self, frame: AnswerFrame, *, num_choices: int, echoes: list[str], token_ids: bool) -> None:
        self.usage = Usage()
        self._frame = frame
        self._num_choices = num_choices
        self._echoes = echoes
        self._token_ids = token_ids
        self._choices = [_Progress() for _ in range(num_choices * len(echoes))]

    def convert(self, event: TurnEvent) -> dict[str, Any] | None:
        """The chunk of an event, None where there is nothing to tell."""
        if isinstance(event, TurnStarted):
            return None
        progress = self._choices[event.index]
        text = "" if progress.is_begun else self._echoes[event.index // self._num_choices]
        progress.is_begun = True
        progress.num_chars += len(text)
        if isinstance(event, ChoiceEnded):
            self.usage.add(event, is_first_of_prompt=event.index % self._num_choices == 0)
            progress.reason = event.reason
            return self._chunk(event.index, text, None, event.reason, [])
        logprobs = self._logprobs(progress, event.logprobs) if event.logprobs else None
        text += event.content
        progress.num_chars += len(event.content)
        if not (text or logprobs or (self._token_ids and event.token_ids)):
            return None
        return self._chunk(event.index, text, logprobs, None, event.token_ids)

    def body(self) -> dict[str, Any]:
        """The plain answer, after the last event."""
        choices = []
        for index, progress in enumerate(self._choices):
            logprobs: dict[str, Any] | None = None
            if progress.logprobs:
                names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                logprobs = {name: [value for one in progress.logprobs for value in one[name]] for name in names}
            choice = self._choice(index, "".join(progress.texts), logprobs, progress.reason)
            if self._token_ids:
                choice["token_ids"] = progress.token_ids
            choices.append(choice)
        return {**self._frame.build("text_completion", choices), "usage": usage_dict(self.usage)}

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._frame.build("text_completion", []), "usage": usage_dict(self.usage)}

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None, token_ids: list[int]
    ) -> dict[str, Any]:
        progress = self._choices[index]
        progress.texts.append(text)
        progress.token_ids += token_ids
        if logprobs is not None:
            progress.logprobs.append(logprobs)
        choice = self._choice(index, text, logprobs, reason)
        if self._token_ids:
            choice["token_ids"] = token_ids
        return self._frame.build("text_completion", [choice])

    def _choice(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, progress: _Progress, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Columns, as this API has them. The chosen token is always among the top ones."""
        offsets, start = [], progress.num_chars
        for one in logprobs:
            offsets.append(start)
            start += len(one.chosen.token)
        return {
            "tokens": [one.chosen.token for one in logprobs],
            "token_logprobs": [one.chosen.logprob for one in logprobs],
            "top_logprobs": [
                {text.token: text.logprob for text in (*one.top, one.chosen)} for one in logprobs
            ],
            "text_offset": offsets,
        }  # fmt: skip


class CompletionStream:
    """StreamShape of text completion chunks."""

    def __init__(self, events: CompletionEvents, *, with_usage: bool) -> None:
        self._events = events
        self._with_usage = with_usage

    def encode(self, events: list[TurnEvent]) -> bytes:
        chunks = map(self._events.convert, events)
        return b"".join(event_stream.encode_event(chunk) for chunk in chunks if chunk is not None)

    def end(self) -> bytes:
        last = event_stream.encode_event(self._events.usage_chunk()) if self._with_usage else b""
        return last + event_stream.DONE

    def broken(self, error: errors.ApiError) -> bytes:
        return event_stream.encode_event(error.envelope())


def shifted(event: TurnEvent, by: int) -> TurnEvent:
    """The event of a later prompt, under the index that its choice has in the whole answer."""
    if isinstance(event, TurnDelta):
        event.index += by
    elif isinstance(event, ChoiceEnded):
        return replace(event, index=event.index + by)
    return event
