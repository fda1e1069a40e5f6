"""One turn while it runs: its choices, each a request to the engine, and their events in the order they come.

Leaving a turn early aborts its requests in the engine. Knows the engine by its handle; no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from turnkeep.engine.handle import EngineHandle
from turnkeep.engine.messages import Admitted, Finished, Submit, Tokens
from turnkeep.engine.request_events import RequestEvents
from turnkeep.server import errors
from turnkeep.server.answer_text import AnswerText
from turnkeep.server.conversations import Conversation
from turnkeep.server.text_model import Prompt, TextModel
from turnkeep.server.turn_events import ChoiceEnded, TurnDelta, TurnEvent, TurnStarted
from turnkeep.server.turn_request import TurnRequest

if TYPE_CHECKING:
    from turnkeep.server.chat_service import ChatService

log = logging.getLogger(__name__)


class Choice:
    """One answer of a turn and the engine request that makes it."""

    def __init__(
        self,
        text_model: TextModel,
        request: TurnRequest,
        prompt: Prompt,
        submit: Submit,
        events: RequestEvents,
        index: int,
    ) -> None:
        self.index = index
        self.request_id = submit.request_id
        self.events = events
        self.text = AnswerText(text_model, request, prompt, submit.sampling.stop_token_ids, index)
        self.num_prompt_tokens = len(submit.prompt_ids)
        self.admitted: Admitted | None = None
        self.lost_tokens: dict[str, int] = {}  # by reason: computed before and computed again
        self.num_declared_tokens = prompt.num_declared_tokens
        self.finished: Finished | None = None
        self.is_ended = False  # everything that follows Finished is done too
        self.is_stop_sent = False

    def ended(self) -> ChoiceEnded:
        """Valid once the engine finished it with an answer."""
        assert self.finished is not None
        return ChoiceEnded(
            self.index,
            self.text.end_reason,
            self.num_prompt_tokens,
            self.finished.num_cached_tokens,
            self.text.num_output_tokens,
            self.text.num_reasoning_tokens,
            self.text.stop_string,
            self.num_declared_tokens,
            self.lost_tokens,
            self.finished.num_draft_nodes,
            self.finished.accepted_by_depth,
        )


class EventReceiver(Protocol):
    """Who wants events at once; see RequestEvents.deliver_to."""

    def can_take(self) -> bool: ...

    def take(self, events: list[TurnEvent]) -> None: ...


class _ChoiceReceiver:
    """Turns the tokens of a choice into events on their way."""

    def __init__(self, turn: Turn, choice: Choice, receiver: EventReceiver) -> None:
        self._turn = turn
        self._choice = choice
        self._receiver = receiver
        self.can_take = receiver.can_take

    def take(self, tokens: Tokens) -> None:
        deltas = self._turn.receive_tokens(self._choice, tokens)
        if deltas:
            self._receiver.take([*deltas])


class Turn:
    """Use it inside `async with` and call next_events() until is_complete."""

    def __init__(
        self,
        service: ChatService,
        engine: EngineHandle,
        request: TurnRequest,
        prompt: Prompt,
        conversation: Conversation | None,
        *,
        arrival_s: float,
        tenant: str = "",
        root: str = "",
    ) -> None:
        self.engine = engine
        self.request = request
        self.prompt = prompt
        self.conversation = conversation
        self.tenant = tenant
        self.root = root  # of the cache, under which its prefix lies
        self.is_last = False  # the client says that its conversation ends with this turn
        self.choices: list[Choice] = []
        self.is_admitted = False
        self.time_to_first_token_s: float | None = None
        self._service = service
        self._arrival_s = arrival_s
        self._last_tokens_s: float | None = None
        self._is_closed = False
        self._waits: dict[int, asyncio.Task[bool]] = {}

    @property
    def num_choices(self) -> int:
        return self.request.num_choices

    @property
    def is_complete(self) -> bool:
        if len(self.choices) == 1:  # asked for every token
            return self.choices[0].is_ended
        return all(choice.is_ended for choice in self.choices)

    async def next_events(self, timeout_s: float | None) -> list[TurnEvent]:
        """What has happened since the last call; waits for something. Empty when timeout_s passed without anything.

        Raises ApiError when the engine refused the turn or failed; the turn is over then.
        """
        events: list[TurnEvent] = []
        if timeout_s is None:
            timeout_s = math.inf
        choices = self.choices
        if len(choices) > 1:
            choices = await self._wait(timeout_s)
        elif not await choices[0].events.wait(timeout_s):
            return events
        for choice in choices:
            while (event := choice.events.take()) is not None:
                if isinstance(event, Tokens):
                    events += self.receive_tokens(choice, event)
                else:
                    events += await self._receive(choice, event)
        return events

    def deliver_to(self, receiver: EventReceiver | None) -> None:
        """Give what the tokens of an only choice become to the receiver while next_events() waits, where it can take
        it. None: no longer."""
        if len(self.choices) == 1:
            choice = self.choices[0]
            choice.events.deliver_to(None if receiver is None else _ChoiceReceiver(self, choice, receiver))

    async def __aenter__(self) -> Turn:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for wait in self._waits.values():
            wait.cancel()
        for choice in self.choices:
            choice.events.close()
            if choice.finished is None:
                self._service.run_to_end(self._leave(choice))
        self._service.turn_closed(self)

    async def _leave(self, choice: Choice) -> None:
        """Follow a choice that nobody waits for to its Finished: it may have been complete before the abort arrived."""
        async for event in choice.events:
            if isinstance(event, Tokens):
                choice.text.push(event.token_ids, event.logprobs)
            elif isinstance(event, Finished):
                choice.finished = event
        finished = choice.finished
        if finished is not None and finished.reason in ("stop", "length"):
            choice.text.finish(finished.reason)
            await self._service.end_choice(self, choice)
        elif finished is not None:
            self._service.metrics.aborted.inc()
            self._service.metrics.count_finished(finished, None)

    async def _wait(self, timeout_s: float) -> list[Choice]:
        """Of several choices those that have events, once there is one."""
        running = [choice for choice in self.choices if not choice.is_ended]
        if len(running) == 1:
            return running if await running[0].events.wait(timeout_s) else []
        for choice in running:
            if choice.index not in self._waits:
                self._waits[choice.index] = asyncio.create_task(choice.events.wait(math.inf))
        waits = [self._waits[choice.index] for choice in running]
        await asyncio.wait(waits, timeout=None if timeout_s == math.inf else timeout_s, return_when="FIRST_COMPLETED")
        ready = [choice for choice in running if self._waits[choice.index].done()]
        for choice in ready:
            del self._waits[choice.index]
        return ready

    def receive_tokens(self, choice: Choice, tokens: Tokens) -> list[TurnDelta]:
        self._measure()
        deltas = choice.text.push(tokens.token_ids, tokens.logprobs)
        if choice.text.is_stopped and not choice.is_stop_sent:
            choice.is_stop_sent = True
            # Where the next prompt will not repeat the answer, there is nothing to go back for.
            is_repeated = self._service.text_model.repeats_answer(self.prompt, has_calls=choice.text.has_calls)
            self.engine.stop(choice.request_id, choice.text.num_repeated_tokens if is_repeated else None)
        return deltas

    async def _receive(self, choice: Choice, event: Admitted | Finished) -> list[TurnEvent]:
        if isinstance(event, Admitted):
            choice.admitted = event
            if event.num_lost_tokens:
                choice.lost_tokens = {event.loss_reason: event.num_lost_tokens}
            if self.is_admitted:
                return []
            self.is_admitted = True
            prompt = self.prompt
            return [TurnStarted(prompt.encoded.token_ids, event.num_cached_tokens, prompt.num_declared_tokens)]
        return await self._finish(choice, event)

    async def _finish(self, choice: Choice, finished: Finished) -> list[TurnEvent]:
        choice.finished = finished
        if finished.reason not in ("stop", "length"):
            self._service.metrics.count_finished(finished, None)
            raise self._failure(finished)
        deltas = choice.text.finish(finished.reason)
        await self._service.end_choice(self, choice)
        choice.is_ended = True
        if self.is_complete:
            self._service.metrics.request_s.observe(time.monotonic() - self._arrival_s)
        return [*deltas, choice.ended()]

    def _failure(self, finished: Finished) -> errors.ApiError:
        message = finished.message or ""
        if finished.reason == "refused":
            self._service.metrics.refused.labels("capacity").inc()
            return errors.bad_request(
                f"The request cannot be served: {message}", "messages", code="context_length_exceeded"
            )
        if self._service.is_draining or finished.reason == "abort":
            return errors.unavailable("The server is shutting down.", retry_after_s=5)
        log.error("request %s failed in the engine: %s", finished.request_id, message or "no reason given")
        # The wording is one that most clients take for transient and retry.
        error = errors.unavailable("Internal server error: the engine stopped while it worked on this request.")
        error.code = "server_error"
        return error

    def _measure(self) -> None:
        now_s = time.monotonic()
        metrics = self._service.metrics
        if self.time_to_first_token_s is None:
            self.time_to_first_token_s = now_s - self._arrival_s
            metrics.time_to_first_token_s.observe(self.time_to_first_token_s)
        elif self._last_tokens_s is not None:
            metrics.inter_token_s.observe(now_s - self._last_tokens_s)
        self._last_tokens_s = now_s
