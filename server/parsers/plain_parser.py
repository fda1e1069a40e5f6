"""The parser of a bare text that is continued: everything is content, and no markup means anything."""

from __future__ import annotations

from turnkeep.server.parsers.deltas import Delta


class PlainParser:
    """Has the face of OutputParser. finish_reason is valid after finish."""

    def __init__(self) -> None:
        self.finish_reason: str = "stop"

    def push(self, text: str) -> list[Delta]:
        return [Delta("content", text)] if text else []

    def finish(self, reason: str) -> list[Delta]:
        self.finish_reason = "length" if reason == "length" else "stop"
        return []
