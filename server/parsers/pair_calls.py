"""Calls of the GLM family: the name, then <arg_key> and <arg_value> for each argument, between call tags.

Values are raw text where the tool's schema wants a string, else JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from turnkeep.server.parsers.call_scanner import write_arguments
from turnkeep.server.parsers.call_syntax import MAX_NAME_CHARS, BodyScanner, Call, MarkerScanner, Schemas
from turnkeep.server.parsers.xml_calls import typed_value

OPENER, CLOSER = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"\s*([\w.\-]+)\s*")
NO_NAME = re.compile(r"\s*[^\w.\-\s]|\s*[\w.\-]+\s+[^\s<]")


class PairScanner(MarkerScanner):
    """States: the name up to the first tag, before a key or value, in one."""

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._key: str | None = None
        self._end = ""  # the tag that ends the key or value at hand
        self._parts: list[str] = []
        self._values: dict[str, str] = {}

    def _step(self) -> bool:
        if not self._name:
            return self._step_name()
        if self._end:
            return self._step_inside()
        word, end = (KEY, KEY_END) if self._key is None else (VALUE, VALUE_END)
        begun = self._take_word(word)
        if begun:
            self._end = end
            return True
        text = self._text.lstrip()
        if self._key is None and CLOSER.startswith(text[: len(CLOSER)]):
            self.state = "complete" if text.startswith(CLOSER) else "open"  # the closer itself is the parser's
        elif begun is False:
            self.state = "malformed"
        return False

    def _step_name(self) -> bool:
        end = self._text.find("<", 0, MAX_NAME_CHARS)
        match = NAME.fullmatch(self._text, 0, end) if end >= 0 else None
        if match:
            self._name = match[1]
            self._take(end)
            return True
        if end >= 0 or len(self._text) >= MAX_NAME_CHARS or NO_NAME.match(self._text):
            self.state = "malformed"
        return False

    def _step_inside(self) -> bool:
        position, marker = self._find((self._end,))
        self._parts.append(self._take(position))
        if marker is None:
            return False
        self._take(len(marker))
        text = "".join(self._parts)
        if self._key is None:
            self._key = text.strip()
        else:
            self._values[self._key] = text
            self._key = None
        self._end, self._parts = "", []
        return True

    def read(self, body: str, schemas: Schemas) -> list[Call] | None:
        properties = schemas.get(self._name, {}).get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        written = write_arguments({key: typed_value(text, known.get(key)) for key, text in self._values.items()})
        return None if written is None else [Call(self._name, written)]


@dataclass(frozen=True, slots=True)
class PairCalls:
    openers: tuple[str, ...] = (OPENER,)
    closers: tuple[str, ...] = (CLOSER,)
    kept_openers: tuple[str, ...] = ()
    needs_closer: bool = True
    bare_starts: str = ""
    call_id_chars: int | None = None

    @property
    def markup(self) -> tuple[str, ...]:
        return (OPENER, CLOSER, KEY, KEY_END, VALUE, VALUE_END)

    def new_scanner(self) -> BodyScanner:
        return PairScanner()
