"""The engine loop: messages in, one step at a time, events out. No torch here, the runner brings it.

Synchronous and single-threaded: whoever drives it calls receive() for what has arrived, then step().
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.engine.messages import (
    Abort,
    Admitted,
    CloseConversation,
    EndTurn,
    Expect,
    Finished,
    FromEngine,
    Prepare,
    ReadStats,
    Shutdown,
    Stats,
    Stop,
    Submit,
    ToEngine,
    TokenLogprobs,
    Tokens,
)
from turnkeep.engine.stats import gather_stats
from turnkeep.scheduler import events as scheduler_events
from turnkeep.scheduler.request import Request
from turnkeep.scheduler.scheduler import DuplicateRequestError, Scheduler
from turnkeep.scheduler.step_plan import StepOutput, StepPlan

log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
STATS_PERIOD_S = 1.0
LEAVE_S = 3.0  # for what is saved when the engine ends


class Runner(Protocol):
    """What carries a plan out."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Copies, one forward pass, one token for every item that wants one. May raise; the step has failed then."""


class EngineFailure(RuntimeError):
    """Several steps in a row failed: every request was ended with an error, and the engine cannot go on."""


class EngineLoop:
    """`outbox` takes each event; `clock` gives seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        outbox: Callable[[FromEngine], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._outbox = outbox
        self._clock = clock
        self._num_failed_in_a_row = 0
        self._step_seconds = 0.0
        self._num_readings = 0
        self._next_stats_s = clock()
        self._is_shut_down = False

    @property
    def has_work(self) -> bool:
        """Some request is waiting or running, or something is to be prepared."""
        return self._scheduler.has_work

    @property
    def is_shut_down(self) -> bool:
        """A Shutdown was received; nothing is computed any more."""
        return self._is_shut_down

    def receive(self, message: ToEngine) -> None:
        """Take one message; its events go out before this returns."""
        scheduler = self._scheduler
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            scheduler.abort(message.request_id)
        elif isinstance(message, Stop):
            scheduler.stop(message.request_id, message.num_repeated_tokens)
        elif isinstance(message, EndTurn):
            scheduler.end_turn(message.request_id, message.stable_tokens, message.has_tool_call)
        elif isinstance(message, Prepare):
            scheduler.prepare(message.cache_root, message.conversation_id, EncodedTokens(message.prompt_ids))
        elif isinstance(message, CloseConversation):
            scheduler.close_conversation(message.cache_root, message.conversation_id)
        elif isinstance(message, Expect):
            scheduler.expect(message.cache_root, message.conversation_id)
        elif isinstance(message, ReadStats):
            self._outbox(self.stats(requested=True))
        elif isinstance(message, Shutdown):
            self._is_shut_down = True
            scheduler.end_all("abort", "the engine was closed")
            scheduler.leave(LEAVE_S)
        self._send_events()

    def step(self) -> bool:
        """Compute one step, or use the time in another way. False when there was nothing to do.

        When the runner fails, the requests of that step end with an error and the others go on. Raises EngineFailure
        after several failures in a row.
        """
        self._send_stats_when_due()
        plan = self._scheduler.plan()
        if plan is None:
            self._send_events()
            return self._scheduler.use_idle_time()
        try:
            output = self._runner.run(plan)
        except Exception as error:
            self._fail_step(plan, error)
            return True
        self._num_failed_in_a_row = 0
        self._step_seconds += output.duration_s
        self._scheduler.apply(plan, output)
        self._send_events()
        return True

    def stats(self, *, requested: bool = False) -> Stats:
        """Counters and gauges as of now."""
        self._num_readings += 1
        return gather_stats(self._scheduler, self._step_seconds, requested=requested, reading=self._num_readings)

    def _submit(self, message: Submit) -> None:
        try:
            self._scheduler.submit(
                Request(
                    request_id=message.request_id,
                    token_ids=EncodedTokens(message.prompt_ids),
                    num_prompt_tokens=len(message.prompt_ids),
                    boundaries=message.boundaries,
                    sampling=message.sampling,
                    conversation_id=message.conversation_id,
                    cache_root=message.cache_root,
                    priority=message.priority,
                    tenant=message.tenant,
                    retention_s=message.retention_s,
                    may_be_stopped=message.may_be_stopped,
                )
            )
        except DuplicateRequestError as error:
            log.error("ignored: %s", error)

    def _fail_step(self, plan: StepPlan, error: Exception) -> None:
        log.error("a step of %d requests failed", len(plan.items), exc_info=error)
        message = f"the step failed: {type(error).__name__}: {error}"
        self._scheduler.fail_step(plan, message)
        self._num_failed_in_a_row += 1
        if self._num_failed_in_a_row >= MAX_FAILED_STEPS:
            self._scheduler.end_all("error", message)
            self._send_events()
            raise EngineFailure(f"{MAX_FAILED_STEPS} steps in a row failed, the last: {message}") from error
        self._send_events()

    def _send_stats_when_due(self) -> None:
        now = self._clock()
        if now >= self._next_stats_s:
            self._next_stats_s = now + STATS_PERIOD_S
            self._outbox(self.stats())

    def _send_events(self) -> None:
        for event in self._scheduler.drain_events():
            self._outbox(_message(event))


def _message(event: scheduler_events.SchedulerEvent) -> FromEngine:
    if isinstance(event, scheduler_events.TokenOut):
        token = event.token
        if token.logprob is None:
            return Tokens(event.request_id, [token.token_id])
        logprobs = TokenLogprobs(token.logprob, list(token.top_logprobs))
        return Tokens(event.request_id, [token.token_id], [logprobs])
    if isinstance(event, scheduler_events.Admitted):
        return Admitted(
            event.request_id,
            event.num_cached_tokens,
            event.num_matched_tokens,
            event.num_lost_tokens,
            event.loss_reason,
        )
    return Finished(
        request_id=event.request_id,
        reason=event.reason,
        num_prompt_tokens=event.num_prompt_tokens,
        num_cached_tokens=event.num_cached_tokens,
        num_output_tokens=event.num_output_tokens,
        num_suspensions=event.num_suspensions,
        num_draft_nodes=event.num_draft_nodes,
        accepted_by_depth=event.accepted_by_depth,
        queue_s=event.queue_s,
        message=event.message,
    )
