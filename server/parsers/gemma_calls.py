"""Calls of the Gemma family: call:NAME{key:value,...} with strings between quotation tags, between call tags."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from turnkeep.server.parsers.call_scanner import MAX_DEPTH, write_arguments
from turnkeep.server.parsers.call_syntax import MAX_NAME_CHARS, BodyScanner, Call, MarkerScanner, Schemas

HEAD = re.compile(r"\s*call:\s*([\w.\-]+)\s*")
KEY = re.compile(r"\s*([^\s:,{}\[\]]+)\s*:")
BARE = re.compile(r"[^,{}\[\]]*")
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
WORDS = {"true": True, "false": False, "null": None}


class GemmaScanner(MarkerScanner):
    """The head, then brackets outside of quoted strings until they are closed."""

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote
        self._name = ""
        self._depth = 0
        self._is_quoted = False

    def _step(self) -> bool:
        if not self._name:
            return self._step_head()
        if self._is_quoted:
            position, marker = self._find((self._quote,))
            self._take(position + len(marker or ""))
            self._is_quoted = marker is None
            return marker is not None
        position, marker = self._find((self._quote, "{", "}", "[", "]"))
        self._take(position + len(marker or ""))
        if marker is None:
            return False
        if marker == self._quote:
            self._is_quoted = True
        elif marker in "{[":
            self._depth += 1
        else:
            self._depth -= 1
        if self._depth > MAX_DEPTH:
            self.state = "malformed"
        elif self._depth == 0:
            self.state = "complete"
        return True

    def _step_head(self) -> bool:
        end = self._text.find("{", 0, MAX_NAME_CHARS)
        if end >= 0 and (match := HEAD.fullmatch(self._text, 0, end)):
            self._name = match[1]
            self._take(end)
            return True
        head = self._text.lstrip()
        if end >= 0 or len(self._text) >= MAX_NAME_CHARS or not ("call:".startswith(head[:5])):
            self.state = "malformed"
        return False

    def read(self, body: str, schemas: Schemas) -> list[Call] | None:
        reader = _ValueReader(body[body.index("{") :], self._quote)
        try:
            arguments = reader.value()
        except (ValueError, RecursionError):
            return None
        written = write_arguments(arguments) if reader.is_at_end else None
        return None if written is None else [Call(self._name, written)]


class _ValueReader:
    """Reads the family's notation of values: keys without quotation, strings between quotation tags."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._position = 0

    @property
    def is_at_end(self) -> bool:
        return not self._text[self._position :].strip()

    def value(self) -> Any:
        """The value at this position. Raises ValueError."""
        self._skip_space()
        if self._text.startswith(self._quote, self._position):
            return self._string()
        first = self._text[self._position : self._position + 1]
        if first == "{":
            return self._object()
        if first == "[":
            return self._list()
        match = BARE.match(self._text, self._position)
        word = match[0].strip() if match else ""
        if not word or self._quote in word:
            raise ValueError("no value")
        self._position += len(match[0]) if match else 0
        if word in WORDS:
            return WORDS[word]
        return json.loads(word) if NUMBER.fullmatch(word) else word

    def _string(self) -> str:
        start = self._position + len(self._quote)
        end = self._text.find(self._quote, start)
        if end < 0:
            raise ValueError("a string without an end")
        self._position = end + len(self._quote)
        return self._text[start:end]

    def _object(self) -> dict[str, Any]:
        members: dict[str, Any] = {}
        self._position += 1
        while not self._is_closed("}", first=not members):
            key = self._key()
            members[key] = self.value()
        return members

    def _key(self) -> str:
        self._skip_space()
        if self._text.startswith(self._quote, self._position):
            key = self._string()
            self._skip_space()
            if self._text[self._position : self._position + 1] != ":":
                raise ValueError("no colon")
            self._position += 1
            return key
        match = KEY.match(self._text, self._position)
        if match is None:
            raise ValueError("no key")
        self._position = match.end()
        return match[1]

    def _list(self) -> list[Any]:
        items: list[Any] = []
        self._position += 1
        while not self._is_closed("]", first=not items):
            items.append(self.value())
        return items

    def _is_closed(self, bracket: str, *, first: bool) -> bool:
        """Whether the bracket follows, which is taken; else the comma before another item is."""
        self._skip_space()
        character = self._text[self._position : self._position + 1]
        if character == bracket:
            self._position += 1
            return True
        if first:
            return False
        if character != ",":
            raise ValueError("no comma")
        self._position += 1
        return False

    def _skip_space(self) -> None:
        while self._text[self._position : self._position + 1].isspace():
            self._position += 1


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    openers: tuple[str, ...]
    closers: tuple[str, ...]
    quote: str
    kept_openers: tuple[str, ...] = ()
    needs_closer: bool = True
    bare_starts: str = ""
    call_id_chars: int | None = None

    @property
    def markup(self) -> tuple[str, ...]:
        return (*self.openers, *self.closers, self.quote)

    def new_scanner(self) -> BodyScanner:
        return GemmaScanner(self.quote)


GEMMA = GemmaCalls(("<|tool_call>",), ("<tool_call|>",), '<|"|>')
FUNCTION_GEMMA = GemmaCalls(("<start_function_call>",), ("<end_function_call>",), "<escape>")
