"""Calls of the Mistral family: [TOOL_CALLS] and a JSON list, or [TOOL_CALLS]name[ARGS]{...} for each call."""

from __future__ import annotations

import re
from dataclasses import dataclass

from turnkeep.server.parsers.call_scanner import CallScanner, read_calls, read_object
from turnkeep.server.parsers.call_syntax import MAX_NAME_CHARS, BodyScanner, Call, MarkerScanner, Schemas

OPENER, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
HEAD = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?")
NO_HEAD = re.compile(r"[^\w.\-\s\[\]]")


class MistralScanner(MarkerScanner):
    """The head of a named call, then JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._json: CallScanner | None = None

    def _step(self) -> bool:
        if self._json is not None:
            end = self._json.feed(self._text)
            self.state = self._json.state
            self._take(end if self.state == "complete" else len(self._text))
            return False
        if self._text.lstrip().startswith(("{", "[")):
            self._json = CallScanner("{[")
            return True
        end = self._text.find("{", 0, MAX_NAME_CHARS)
        if end >= 0 and (match := HEAD.fullmatch(self._text, 0, end)):
            self._name = match[1]
            self._take(end)
            self._json = CallScanner()
            return True
        if end >= 0 or len(self._text) >= MAX_NAME_CHARS or NO_HEAD.search(self._text):
            self.state = "malformed"
        return False

    def read(self, body: str, schemas: Schemas) -> list[Call] | None:
        if not self._name:
            return read_calls(body)
        arguments = read_object(body[body.index("{") :])
        return None if arguments is None else [(self._name, arguments)]


@dataclass(frozen=True, slots=True)
class MistralCalls:
    openers: tuple[str, ...] = (OPENER,)
    kept_openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    needs_closer: bool = False
    bare_starts: str = ""
    call_id_chars: int | None = 9

    @property
    def markup(self) -> tuple[str, ...]:
        return (OPENER, CALL_ID, ARGS)

    def new_scanner(self) -> BodyScanner:
        return MistralScanner()
