"""The life of every request in the engine: submitted, admitted, computed step by step, finished exactly once.

The loop calls plan, runs it, calls apply. The scheduler is the only caller of the cache; it knows no tensors, no
sockets and no text.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from turnkeep.cache.prefill_cost import PrefillCost, num_pairs
from turnkeep.scheduler.admission import Admission
from turnkeep.scheduler.config import SchedulerConfig
from turnkeep.scheduler.drafting import Drafting
from turnkeep.scheduler.events import Admitted, Finished, SchedulerEvent, TokenOut
from turnkeep.scheduler.fair_order import FairOrder
from turnkeep.scheduler.preparation import Preparations
from turnkeep.scheduler.request import FinishReason, Request
from turnkeep.scheduler.scheduler_stats import SchedulerStats
from turnkeep.scheduler.step_plan import SampledToken, StepItem, StepOutput, StepPlan
from turnkeep.scheduler.step_planner import StepPlanner
from turnkeep.scheduler.tree_budget import TreeBudget
from turnkeep.scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from turnkeep.cache.cache_manager import CacheManager
    from turnkeep.cache.encoded_tokens import EncodedTokens
    from turnkeep.cache.retention import TurnHandle
    from turnkeep.cache.statistics import CacheStats


class DuplicateRequestError(ValueError):
    """A request of this id is still open. No event tells of it: events of that id belong to the open one."""


class Scheduler:
    """Single-threaded; `clock` gives seconds. Events pile up until drain_events(). `cost` is told what steps took.

    budget: decides how much is drafted and verified; without one every draft within config.tree_grant is verified.
    """

    def __init__(
        self,
        cache: CacheManager,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        cost: PrefillCost | None = None,
        budget: TreeBudget | None = None,
    ) -> None:
        self._cache = cache
        self._config = config
        self._clock = clock
        self._cost = cost
        self._drafting = Drafting(budget, config.tree_grant)
        self._planned_s = 0.0
        self._requests: dict[str, Request] = {}  # waiting, running and suspended
        self._running: list[Request] = []  # in order of service (Request.rank)
        self._waiting = WaitingQueue()
        self._fair_order = FairOrder()
        self._admission = Admission(cache, config, self._waiting)
        self._planner = StepPlanner(cache, config.max_step_tokens, drafts_from_tokens=config.drafts_from_tokens)
        self._events: list[SchedulerEvent] = []
        self._turn_handles: OrderedDict[str, TurnHandle] = OrderedDict()
        self._stats = SchedulerStats()
        self._preparations = Preparations(cache, config.max_step_tokens)
        self._may_admit = False  # something has changed since the last admission round
        self._opened_since_step: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Some request is waiting or running, or something is to be prepared."""
        return bool(self._requests) or self._preparations.has_work

    def submit(self, request: Request) -> None:
        """Queue a request; one that can never run ends at once with Finished(refused).

        Boundaries outside the prompt are ignored, and all but the first at one position. Raises
        DuplicateRequestError.
        """
        if request.request_id in self._requests:
            raise DuplicateRequestError(f"a request with the id {request.request_id!r} is still open")
        self._turn_handles.pop(request.request_id, None)
        request.arrival_s = self._clock()
        request.arrival_number = self._stats.num_submitted
        request.boundaries = self._cache.planned_boundaries(request.wanted_boundaries, request.num_prompt_tokens)
        self._stats.num_submitted += 1
        self._requests[request.request_id] = request
        reason = self._admission.reason_to_refuse(request)
        if reason is not None:
            self._end(request, "refused", reason)
            return
        request.fair_start = self._fair_order.start(
            request.tenant, request.num_prompt_tokens, request.sampling.max_new_tokens
        )
        self._preparations.give_way(request.cache_root, request.conversation_id, request.token_ids)
        self._waiting.add(request)
        self._may_admit = True

    def prepare(self, cache_root: str, conversation_id: str | None, token_ids: EncodedTokens) -> None:
        """The next prompt of a conversation will begin so: compute it when there is nothing else to do."""
        self._preparations.add(cache_root, conversation_id, token_ids)

    def abort(self, request_id: str) -> None:
        """End a request whose client is gone, in any state. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._leave(request, commit=True)
            self._end(request, "abort")

    def stop(self, request_id: str, num_repeated_tokens: int | None = None) -> None:
        """Finish a request with reason "stop". Unknown ids are ignored.

        num_repeated_tokens: only so many of its tokens will be repeated, so the turn ends there. Where the live row is
        beyond them, they are computed again from the end of the prompt, as after a suspension, and it finishes then.
        """
        request = self._requests.get(request_id)
        if request is None or request.is_stopped:
            return
        if request.cache is not None and num_repeated_tokens is not None:
            position = request.num_prompt_tokens + num_repeated_tokens
            self._cache.rewind(request.cache, position)
            if request.cache.num_computed_tokens > position and self._admission.can_go_back(request, position):
                self._leave(request, commit=True)
                request.cut(position)
                self._wait_again(request)
                return
        self._finish(request, "stop")

    def end_turn(self, request_id: str, stable_tokens: int, has_tool_call: bool | None = None) -> None:
        """Keep the finished request's turn-end snapshot if it is at or before `stable_tokens`, else drop it.

        has_tool_call: whether a program will answer; None: not known.
        """
        handle = self._turn_handles.pop(request_id, None)
        if handle is not None:
            self._cache.end_turn(handle, stable_tokens, has_tool_call=has_tool_call)
            self._may_admit = True

    def close_conversation(self, cache_root: str, conversation_id: str) -> None:
        """The conversation will not return: what only it uses goes first."""
        self._preparations.close_conversation(cache_root, conversation_id)
        self._cache.close_conversation(cache_root, conversation_id)
        self._may_admit = True

    def end_all(self, reason: FinishReason, message: str | None = None) -> None:
        """End every request (the engine leaves, or cannot go on)."""
        for request in list(self._requests.values()):
            self._leave(request, commit=False)
            self._end(request, reason, message)
        self._preparations.clear()

    def expect(self, cache_root: str, conversation_id: str) -> None:
        """A conversation's next request is on its way: colder tiers may bring its prefix nearer."""
        if self._cache.tiers is not None:
            self._cache.tiers.expect(cache_root, conversation_id)

    def use_idle_time(self) -> bool:
        """There is no step to compute: do what costs running requests nothing. False when there is nothing to do."""
        tiers = self._cache.tiers
        return tiers is not None and tiers.use_idle_time(is_awaited=bool(self._requests))

    def leave(self, limit_s: float) -> None:
        """The engine ends: save what a next one could go on from, in so much time."""
        self._drafting.leave()
        if self._cache.tiers is not None:
            self._cache.tiers.flush(limit_s)
            self._cache.tiers.close()

    def plan(self) -> StepPlan | None:
        """Admit what fits and plan the next step. None when nothing runs; the plan must be applied or failed."""
        tiers = self._cache.tiers
        if tiers is not None and tiers.poll():
            self._may_admit = True
        if self._waiting and (self._may_admit or not (self._running or self._admission.is_load_awaited)):
            self._admit()
        if not self._running:
            item = None if self._waiting else self._preparations.plan_item()
            return None if item is None else self._step_plan((item,))
        self._drafting.choose(self._running)
        stuck = self._planner.make_room(self._running, self._suspend)
        if stuck is not None:
            self._leave(stuck, commit=True)
            self._end(stuck, "error", self._admission.shortage())
            return self.plan()
        return self._step_plan(self._planner.plan_items(self._running))

    def _step_plan(self, items: tuple[StepItem, ...]) -> StepPlan:
        page_copies, row_copies = self._cache.drain_copies()
        self._planned_s = self._clock()
        return StepPlan(
            page_copies=page_copies,
            row_copies=row_copies,
            items=items,
            folds=self._cache.drain_folds(),
            tree_grant=self._drafting.grant(self._running),
        )

    def apply(self, plan: StepPlan, output: StepOutput) -> None:
        """Take over what a step has computed: advance, publish, append tokens, finish."""
        self._opened_since_step.clear()
        stats = self._stats
        stats.num_steps += 1
        self._measure(plan, output)
        if self._preparations.is_running:
            self._preparations.apply(plan.items[0])
        is_replayed = self._cache.has_history
        for item in plan.items:
            request = self._requests.get(item.request_id)
            if request is None or request.cache is None:
                continue
            tokens, reason = request.until_end(output.tokens.get(item.request_id, ()))
            # A token that a draft had right was computed with the one before it, the last of a step never is.
            num_tokens = len(item.token_ids) + max(len(tokens) - 1, 0)
            stats.num_computed_tokens += num_tokens
            self._cache.advance(request.cache, num_tokens, in_history=is_replayed and item.replay is not None)
            if item.draft is not None:
                request.count_draft(item.draft.num_nodes, len(output.accepted.get(item.request_id, ())))
            request.draft = output.drafts.get(item.request_id)
            request.is_just_opened = False
            if item.start < request.num_prompt_tokens or len(item.token_ids) > 1:
                self._publish(request, item)
            else:
                stats.num_decode_tokens += num_tokens
            self._append(request, tokens)
            if request.is_stopped and request.cache.num_computed_tokens == len(request.token_ids):
                reason = "stop"
            if reason is not None:
                self._finish(request, reason)
            elif item.request_id in output.errors:
                self._leave(request, commit=False)
                self._end(request, "error", output.errors[item.request_id])

    def fail_step(self, plan: StepPlan, message: str) -> None:
        """The step failed: its requests end with an error. Others go on; what was to be copied for them is redone."""
        self._stats.num_failed_steps += 1
        self._preparations.fail()
        for item in plan.items:
            request = self._requests.get(item.request_id)
            if request is not None:
                self._leave(request, commit=False)
                self._end(request, "error", message)
        for request in self._opened_since_step:
            if request.status == "running":
                self._leave(request, commit=False)
                self._wait_again(request)
        self._opened_since_step.clear()
        self._cache.distrust({fold.target for fold in plan.folds})

    def drain_events(self) -> list[SchedulerEvent]:
        """Events since the last call, in order."""
        events = self._events
        self._events = []
        return events

    @property
    def max_running(self) -> int:
        """Requests that run at once at most, by whatever resource is short."""
        return self._config.max_running

    def stats(self) -> SchedulerStats:
        """Counters so far and the present gauges; the object is the scheduler's own."""
        stats = self._stats
        stats.num_running = len(self._running)
        stats.num_suspended = sum(request.status == "suspended" for request in self._waiting)
        stats.num_waiting = len(self._waiting) - stats.num_suspended
        stats.num_bypasses = self._admission.num_bypasses
        stats.num_prefix_waits = self._admission.num_prefix_waits
        stats.num_preparations = asdict(self._preparations.counters)
        return stats

    def cache_stats(self) -> CacheStats:
        """The cache's own counts."""
        return self._cache.stats()

    def draft_values(self) -> dict[str, float]:
        """Counters of drafting by name; empty without a budget."""
        return self._drafting.counter_values()

    def _measure(self, plan: StepPlan, output: StepOutput) -> None:
        """What the step cost, for those who weigh what to keep and what to draft."""
        self._drafting.measured(plan, output)
        if self._cost is not None:
            pairs = sum(num_pairs(item.start, item.start + len(item.token_ids)) for item in plan.items)
            self._cost.measured(plan.num_tokens, pairs, self._clock() - self._planned_s)

    def _admit(self) -> None:
        self._may_admit = False
        for request in self._admission.admit(self._running):
            request.status = "running"
            request.num_bypassed = 0
            request.is_just_opened = True
            insort(self._running, request, key=lambda one: one.rank)
            self._opened_since_step.append(request)
            if request.admitted_s is None:
                request.admitted_s = self._clock()
                self._fair_order.admitted(request.fair_start)
                self._stats.num_admitted += 1
                self._stats.num_prompt_tokens += request.num_prompt_tokens
                self._stats.num_cached_tokens += request.num_cached_tokens
                self._events.append(
                    Admitted(
                        request.request_id,
                        request.num_cached_tokens,
                        request.num_matched_tokens,
                        request.num_lost_tokens,
                        request.loss_reason,
                    )
                )
            else:
                self._stats.num_resumptions += 1
        if self._waiting and not self._running and not self._admission.is_load_awaited:
            # Nothing runs, so nothing will change: waiting on would be for ever.
            request = self._waiting[0]
            self._leave(request, commit=False)
            self._end(request, *(("stop", None) if request.is_stopped else ("error", self._admission.shortage())))
            self._may_admit = True

    def _publish(self, request: Request, item: StepItem) -> None:
        """Make a prefill chunk shareable up to its last snapshot, and whole when the known tokens are computed.

        Without recurrent layers there are no snapshots, and pages alone can be shared from a boundary on.
        """
        assert request.cache is not None
        end = item.start + len(item.token_ids)
        if item.exports:
            self._cache.publish_exports(request.cache, request.token_ids)
            self._may_admit = True
        passed_boundary = item.state_row is None and any(item.start < b.position <= end for b in request.boundaries)
        if passed_boundary or end == len(request.token_ids):
            self._cache.commit(request.cache, request.token_ids)
            self._may_admit = True

    def _append(self, request: Request, tokens: Sequence[SampledToken]) -> None:
        request.token_ids.extend([token.token_id for token in tokens])
        if tokens and request.first_token_s is None:
            request.first_token_s = self._clock()
        self._stats.num_generated_tokens += len(tokens)
        self._events += [TokenOut(request.request_id, token) for token in tokens]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End with an answer: the live row becomes the provisional turn-end snapshot."""
        if request.cache is not None and request.num_output_tokens > 0:
            handle = self._cache.finish(request.cache, request.token_ids, keep_turn_end=True)
            request.cache = None
            if handle is not None:
                self._turn_handles[request.request_id] = handle
                if len(self._turn_handles) > self._config.max_turn_handles:
                    self._turn_handles.popitem(last=False)
            self._running.remove(request)
        else:
            self._leave(request, commit=True)
        self._end(request, reason)

    def _suspend(self, request: Request) -> None:
        assert request.cache is not None
        self._cache.suspend(request.cache, request.token_ids)
        request.cache = None
        request.draft = None
        self._running.remove(request)
        request.num_suspensions += 1
        self._stats.num_suspensions += 1
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        request.status = "suspended"
        self._waiting.add(request)

    def _leave(self, request: Request, *, commit: bool) -> None:
        """Take a request out of the queue or out of the running ones, and release what it holds."""
        if request.cache is not None:
            if commit:
                self._cache.commit(request.cache, request.token_ids)
            self._cache.close(request.cache)
            request.cache = None
            request.draft = None
            self._running.remove(request)
        elif request.status in ("waiting", "suspended"):
            self._waiting.remove(request)
        self._may_admit = True

    def _end(self, request: Request, reason: FinishReason, message: str | None = None) -> None:
        """The one place where a request ends."""
        request.status = "finished"
        request.finish_reason = reason
        self._drafting.forget(request.request_id)
        del self._requests[request.request_id]
        self._may_admit = True
        counts = self._stats.num_finished
        counts[reason] = counts.get(reason, 0) + 1
        self._events.append(Finished.of(request, reason, message, self._clock()))
