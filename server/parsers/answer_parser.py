"""The face of every parser of one answer."""

from __future__ import annotations

from typing import Protocol

from turnkeep.server.parsers.deltas import Delta


class AnswerParser(Protocol):
    """push() pieces in order, then finish() once. After it: finish_reason for the API, truncated_call (the length
    limit cut a call), num_calls, num_unknown_tools."""

    finish_reason: str
    truncated_call: bool
    num_calls: int
    num_unknown_tools: int

    def push(self, text: str) -> list[Delta]:
        """Deltas that the next piece of text completes."""
        ...

    def finish(self, reason: str) -> list[Delta]:
        """The rest. reason: why generation ended ("stop", "length", ...)."""
        ...
