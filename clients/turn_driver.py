"""One turn over as many requests as it takes: what to send next, what the events mean, whether to try again.

Does no input or output itself: the sync and the async conversation drive it with the same few lines, which is why
they cannot differ. Not thread-safe; one driver serves one turn.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from random import random
from typing import Any, Literal

import openai

from turnkeep.clients.chat_wire import calls_of, chat_body, read_chunk
from turnkeep.clients.errors import ContextOverflow, TurnInterrupted
from turnkeep.clients.history import History, Message
from turnkeep.clients.options import TurnOptions
from turnkeep.clients.partial_answer import Delivery, PartialAnswer
from turnkeep.clients.responses_wire import read_event, response_body
from turnkeep.clients.retry import RetryPolicy, StreamBroke, is_outage, is_worth_retrying, retry_after_s
from turnkeep.clients.turn import Turn, TurnEvent, TurnStats

Transport = Literal["websocket", "responses", "chat"]

# What a server without the Responses API, or without its store, answers.
UNSUPPORTED_STATUSES = (404, 405, 426, 501)
STORE_IS_DOWN = "store_unavailable"
NO_SUCH_RESPONSE = "previous_response_not_found"


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One attempt. extra: fields that the openai package does not know of."""

    transport: Transport
    body: dict[str, Any]
    headers: dict[str, str]
    extra: dict[str, Any]


class TurnDriver:
    """`new` are the messages of this turn; the history is only read."""

    def __init__(
        self,
        history: History,
        new: list[Message],
        options: TurnOptions,
        *,
        model: str,
        transport: Transport,
        headers: dict[str, str],
        extra: dict[str, Any],
        retries: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport: Transport = transport
        self.lasting_transport: Transport = transport  # what the server can do, an outage of its store aside
        self.new = new
        self._history = history
        self._options = options
        self._model = model
        # One key for all attempts: a server that has carried the turn out already gives the same answer again.
        self._headers = {**headers, "Idempotency-Key": uuid.uuid4().hex}
        self._extra = {**extra, **options.extra}
        self._retries = retries
        self._clock = clock
        self._uses_chain = True
        self._answer = PartialAnswer()
        self._delivery = Delivery()
        self._num_attempts = 0
        self._num_failures = 0
        self._started_s = clock()
        self._first_token_s: float | None = None
        self._outage_since_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """The answer is there, to its end."""
        return self._answer.finish_reason is not None

    @property
    def items(self) -> list[dict[str, Any]] | None:
        """The answer as the Responses API gave it."""
        return self._answer.items

    def next_request(self) -> PreparedRequest:
        """The next attempt; what earlier ones brought is kept for comparison only."""
        self._num_attempts += 1
        self._answer = PartialAnswer()
        if self.transport == "chat":
            body = chat_body(self._history, self.new, self._options)
        else:
            previous = self._history.last_response_id if self._uses_chain else None
            body = response_body(self._history, self.new, self._options, previous_response_id=previous, store=True)
        body["model"] = self._model
        return PreparedRequest(self.transport, body, dict(self._headers), dict(self._extra))

    def feed(self, payload: dict[str, Any]) -> list[TurnEvent]:
        """The events of one payload of the stream. Raises openai.APIError for an error inside it."""
        self._outage_since_s = None
        if self.transport == "chat":
            read_chunk(payload, self._answer)
        else:
            _raise_stream_error(payload)
            read_event(payload, self._answer)
        events = self._delivery.events(self._answer, is_complete=False)
        if self._first_token_s is None and (events or self._answer.call_pieces):
            self._first_token_s = self._clock()
        return events

    def end(self) -> list[TurnEvent]:
        """The stream has ended. The last events; raises StreamBroke when the answer is not complete."""
        if not self.is_complete:
            raise StreamBroke("the stream ended before the answer did")
        return [*self._delivery.events(self._answer, is_complete=True), *calls_of(self._answer)]

    def failed(self, error: Exception) -> float:
        """Seconds to wait before the next attempt. Raises the error, or what it means, where there is to be none."""
        if isinstance(error, openai.APIError) and error.code == "context_length_exceeded":
            raise ContextOverflow(error.message) from error
        if self._change_way(error):
            self._num_failures = 0
            return 0.0
        if not is_worth_retrying(error):
            raise error
        now = self._clock()
        if is_outage(error):
            if self._outage_since_s is None:
                self._outage_since_s = now
            exhausted = now - self._outage_since_s >= self._retries.outage_s
        else:
            exhausted = self._num_failures >= self._retries.max_retries
        self._num_failures += 1
        if exhausted:
            if is_outage(error) or isinstance(error, openai.APIStatusError | openai.APITimeoutError):
                raise error
            message = f"the answer broke off {self._num_attempts} times in a row: {error}"
            raise TurnInterrupted(message) from error
        backoff_s = self._retries.backoff_s(self._num_failures, random())
        return max(retry_after_s(error) or 0.0, backoff_s)

    def turn(self) -> Turn:
        """The complete answer."""
        answer, now = self._answer, self._clock()
        return Turn(
            text=answer.text,
            reasoning=answer.reasoning,
            tool_calls=calls_of(answer),
            finish_reason=answer.finish_reason or "stop",
            response_id=answer.response_id,
            stats=TurnStats(
                num_prompt_tokens=answer.num_prompt_tokens,
                num_cached_tokens=answer.num_cached_tokens,
                num_generated_tokens=answer.num_generated_tokens,
                time_to_first_token_s=(self._first_token_s or now) - self._started_s,
                duration_s=now - self._started_s,
                num_attempts=self._num_attempts,
                transport=self.transport,
                lost_tokens=answer.lost_tokens,
                num_drafted_tokens=answer.num_drafted_tokens,
                accepted_by_depth=answer.accepted_by_depth,
            ),
        )

    def _change_way(self, error: Exception) -> bool:
        """Whether another way of sending the same turn may do: the whole history, or a plainer transport."""
        if self.transport == "chat":
            return False
        if isinstance(error, openai.APIError) and error.code == NO_SUCH_RESPONSE and self._uses_chain:
            self._uses_chain = False
            return True
        status = error.status_code if isinstance(error, openai.APIStatusError) else None
        if status in UNSUPPORTED_STATUSES or isinstance(error, WebSocketRefused):
            self.transport = self.lasting_transport = "responses" if self.transport == "websocket" else "chat"
            return True
        if isinstance(error, openai.APIError) and error.code == STORE_IS_DOWN:
            self.transport = "chat"  # for this turn: it needs no store
            return True
        return False


class WebSocketRefused(Exception):
    """The server did not take the connection as a WebSocket."""


def _raise_stream_error(event: dict[str, Any]) -> None:
    kind = event.get("type")
    if kind == "error":
        error = event.get("error") or event
    elif kind == "response.failed":
        error = event["response"].get("error") or {}
    else:
        return
    message = error.get("message") or "the response failed"
    raise _StreamError(message, error)


class _StreamError(openai.APIError):
    """An error that came as an event: there is no request of its own to point at."""

    def __init__(self, message: str, body: dict[str, Any]) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.body = body
        self.code = body.get("code")
        self.param = body.get("param")
        self.type = body.get("type") if body.get("type") != "error" else None
