"""Limits of the scheduler: set once when the engine starts."""

from __future__ import annotations

from dataclasses import dataclass

from turnkeep.scheduler.drafts import TreeGrant


@dataclass(slots=True, frozen=True)
class SchedulerConfig:
    """The first three come from the machine and the model, the rest have working defaults."""

    max_running: int  # requests that hold a live state row and take part in steps
    max_step_tokens: int  # a step's decodes and prefill chunks together; one prefill token a step is always granted
    max_model_len: int  # tokens of prompt and output
    vocab_size: int | None = None  # None: token ids are not checked
    decode_reserve_tokens: int = 64  # room to grow that is kept free for every running request at admission
    max_bypassed: int = 32  # admissions of later requests that one which does not fit puts up with
    max_candidates: int = 8  # waiting requests that one admission round looks past
    min_shared_tokens: int = 32  # a shared prefix shorter than this is computed twice rather than waited for
    max_prefix_waits: int = 2  # requests that one request may wait for in turn
    tree_grant: TreeGrant | None = None  # what drafts may be proposed for a step; None: none
    drafts_from_tokens: bool = False  # the drafter looks at the tokens of a request, so it is told those reused
    max_turn_handles: int = 4096  # finished requests whose end of turn may still be announced

    def __post_init__(self) -> None:
        for name in ("max_running", "max_step_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
