"""What the scheduler tells of its requests. Each submitted request gets exactly one Finished."""

from __future__ import annotations

from dataclasses import dataclass

from turnkeep.cache.loss_reason import LossReason
from turnkeep.scheduler.request import FinishReason
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
    num_draft_nodes: int = 0  # verified, of which so many were right
    num_accepted_nodes: int = 0


SchedulerEvent = Admitted | TokenOut | Finished
