"""What the scheduler tells of its requests. Each submitted request gets exactly one Finished."""

from __future__ import annotations

from dataclasses import dataclass

from turnkeep.cache.loss_reason import LossReason
from turnkeep.scheduler.request import FinishReason, Request
from turnkeep.scheduler.step_plan import SampledToken


@dataclass(slots=True, frozen=True)
class Admitted:
    """The request runs for the first time; num_cached_tokens of its prompt were not computed again."""

    request_id: str
    num_cached_tokens: int
    num_matched_tokens: int
    num_lost_tokens: int = 0  # computed before, as far as the engine knows, and computed again
    loss_reason: LossReason = "none"


@dataclass(slots=True)
class TokenOut:
    """One newly generated token (not frozen: made once per token, and a frozen one costs three times as much)."""

    request_id: str
    token: SampledToken


@dataclass(slots=True, frozen=True)
class Finished:
    """The one end of a request. message says why, for "refused" and "error"."""

    request_id: str
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_suspensions: int
    queue_s: float
    message: str | None = None
    num_draft_nodes: int = 0  # verified, of which so many were right by levels below the root
    accepted_by_depth: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: Request, reason: FinishReason, message: str | None, now_s: float) -> Finished:
        """The end of a request at `now_s`."""
        return cls(
            request_id=request.request_id,
            reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            num_suspensions=request.num_suspensions,
            num_draft_nodes=request.num_draft_nodes,
            accepted_by_depth=tuple(request.accepted_by_depth),
            queue_s=(now_s if request.admitted_s is None else request.admitted_s) - request.arrival_s,
            message=message,
        )


SchedulerEvent = Admitted | TokenOut | Finished
