"""One answer: its events while it comes in, and what it has cost once it is there. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model makes. `arguments` is its JSON exactly as the model wrote it, valid or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TurnRestarted:
    """The answer broke off and its repetition reads differently: whatever was delivered of this turn is void."""


TurnEvent = TextDelta | ReasoningDelta | ToolCall | TurnRestarted


@dataclass(frozen=True, slots=True)
class TurnStats:
    """What a turn has cost, as the server reports it.

    num_cached_tokens: of the prompt, those the server did not compute again; lost_tokens: those that it had computed
    before and computed again, by why. num_drafted_tokens: proposed ahead of the model and verified by it, of which
    accepted_by_depth were right one token ahead, two, and so on. time_to_first_token_s counts from the first attempt;
    num_attempts: requests sent for it.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    time_to_first_token_s: float = 0.0
    duration_s: float = 0.0
    num_attempts: int = 1
    transport: str = "chat"
    lost_tokens: dict[str, int] = field(default_factory=dict)
    num_drafted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.num_prompt_tokens - self.num_cached_tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A complete answer. finish_reason: "stop", "tool_calls", "length" or "content_filter"."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    response_id: str | None = None
    stats: TurnStats = field(default_factory=TurnStats)
