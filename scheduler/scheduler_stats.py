"""Counters and gauges of the scheduler, by name."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnkeep.scheduler.request import FinishReason


@dataclass(slots=True)
class SchedulerStats:
    """num_running, num_waiting and num_suspended are as of now, the rest is monotonic."""

    num_running: int = 0
    num_waiting: int = 0  # without the suspended ones
    num_suspended: int = 0
    num_steps: int = 0
    num_submitted: int = 0
    num_admitted: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=dict)
    num_suspensions: int = 0
    num_resumptions: int = 0  # of suspended requests
    num_bypasses: int = 0
    num_prefix_waits: int = 0
    num_preparations: dict[str, int] = field(default_factory=dict)  # preparation.PreparationCounters
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of those, reused
    num_computed_tokens: int = 0  # by steps: prefill and decode
    num_decode_tokens: int = 0
    num_generated_tokens: int = 0
    num_failed_steps: int = 0
