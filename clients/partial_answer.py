"""An answer while it comes in, over however many attempts: what is delivered is never delivered again. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from turnkeep.clients.turn import ReasoningDelta, TextDelta, TurnEvent, TurnRestarted


@dataclass(slots=True)
class PartialAnswer:
    """What one attempt has brought so far."""

    text: str = ""
    reasoning: str = ""
    call_pieces: dict[int, dict[str, str]] = field(default_factory=dict)
    items: list[dict[str, Any]] | None = None  # of the Responses API, once the response is complete
    response_id: str | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    lost_tokens: dict[str, int] = field(default_factory=dict)
    num_drafted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()

    def read_usage(self, usage: dict[str, Any], prompt: str, output: str) -> None:
        """What it has cost; the transports count the same things under names of their own."""
        self.num_prompt_tokens = usage.get(f"{prompt}_tokens") or 0
        self.num_generated_tokens = usage.get(f"{output}_tokens") or 0
        details = usage.get(f"{prompt}_tokens_details") or {}
        self.num_cached_tokens = details.get("cached_tokens") or 0
        self.lost_tokens = details.get("lost_tokens") or {}
        details = usage.get(f"{output}_tokens_details") or {}
        drafted = (details.get(f"{kind}_prediction_tokens") or 0 for kind in ("accepted", "rejected"))
        self.num_drafted_tokens = sum(drafted)
        self.accepted_by_depth = tuple(details.get("accepted_by_depth") or ())

    def add_text(self, text: str) -> None:
        self.text += text

    def add_reasoning(self, text: str) -> None:
        self.reasoning += text

    def add_call_piece(self, piece: dict[str, Any]) -> None:
        """One entry of a chunk's tool_calls: the first of an index names the call, all add to its arguments."""
        function = piece.get("function") or {}
        call = self.call_pieces.setdefault(piece.get("index") or 0, {"id": "", "name": "", "arguments": ""})
        call["id"] = call["id"] or piece.get("id") or ""
        call["name"] = call["name"] or function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""


@dataclass(slots=True)
class Delivery:
    """What the caller has been given of this turn. A later attempt delivers only what goes beyond it."""

    text: str = ""
    reasoning: str = ""

    def events(self, answer: PartialAnswer, *, is_complete: bool) -> list[TurnEvent]:
        """What is new in `answer`. Until a repetition has caught up with what was delivered, there is nothing."""
        events: list[TurnEvent] = []
        if self._contradicts(answer, is_complete=is_complete):
            events.append(TurnRestarted())
            self.text = self.reasoning = ""
        if len(answer.reasoning) > len(self.reasoning):
            events.append(ReasoningDelta(answer.reasoning[len(self.reasoning) :]))
            self.reasoning = answer.reasoning
        if len(answer.text) > len(self.text):
            events.append(TextDelta(answer.text[len(self.text) :]))
            self.text = answer.text
        return events

    def _contradicts(self, answer: PartialAnswer, *, is_complete: bool) -> bool:
        for delivered, now in ((self.reasoning, answer.reasoning), (self.text, answer.text)):
            shared = min(len(delivered), len(now))
            if delivered[:shared] != now[:shared] or (is_complete and len(now) < len(delivered)):
                return True
        # Text follows reasoning: text again, with reasoning short of what was delivered, is another answer.
        return bool(answer.text) and len(answer.reasoning) < len(self.reasoning)
