"""What happens while one turn is served, in the terms of every API shape: text and tool calls, no wire format.

chat_service produces these; the shapes (chat_answers, later others) turn them into bodies and chunks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

EndReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call. The first piece has id and name and no arguments; the rest only arguments."""

    index: int  # dense from 0 within the choice
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class TokenText:
    token: str
    bytes: tuple[int, ...] | None  # None: a part of a character
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token and the most likely ones, most likely first."""

    chosen: TokenText
    top: tuple[TokenText, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A choice was admitted; sent once per turn, for the first one. `prompt_ids` are what the engine was given."""

    prompt_ids: list[int]
    num_cached_tokens: int
    num_declared_tokens: int = 0


@dataclass(slots=True)
class TurnDelta:
    """New output of one choice. Any part may be empty, but not all of them."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.tool_calls or self.token_ids or self.logprobs)


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice is complete. The counts are the usage of this choice."""

    index: int
    reason: EndReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    stop_string: str | None = None  # the one that ended it, where one did
    num_declared_tokens: int = 0  # of the prompt, up to the last place that the client has marked for caching
    lost_tokens: Mapping[str, int] = field(default_factory=dict)  # by reason: computed before and computed again
    num_drafted_tokens: int = 0  # verified, of which so many were right by how far ahead they were
    accepted_by_depth: tuple[int, ...] = ()


def num_written_tokens(num_cached_tokens: int, num_declared_tokens: int) -> int:
    """What APIs with cache marks count as written to the cache: up to the last mark, what was not there yet."""
    return max(0, num_declared_tokens - num_cached_tokens)


TurnEvent = TurnStarted | TurnDelta | ChoiceEnded


@dataclass(slots=True)
class Usage:
    """Token counts of an answer: each prompt once, the output of all choices."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    lost_tokens: Mapping[str, int] = field(default_factory=dict)
    num_drafted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()

    def add(self, ended: ChoiceEnded, *, is_first_of_prompt: bool) -> None:
        """The choices of one prompt share it: it is counted once, with what the first of them could reuse."""
        if is_first_of_prompt:
            self.num_prompt_tokens += ended.num_prompt_tokens
            self.num_cached_tokens += ended.num_cached_tokens
            self.lost_tokens = Counter(self.lost_tokens) + Counter(ended.lost_tokens)
        self.num_output_tokens += ended.num_output_tokens
        self.num_reasoning_tokens += ended.num_reasoning_tokens
        self.num_drafted_tokens += ended.num_drafted_tokens
        both = zip_longest(self.accepted_by_depth, ended.accepted_by_depth, fillvalue=0)
        self.accepted_by_depth = tuple(left + right for left, right in both)
