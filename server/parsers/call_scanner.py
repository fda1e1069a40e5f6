"""Finds the end of a tool call's JSON while its text arrives, and reads the call.

Each character is looked at once. What is accepted is JSON, except that strings may hold raw line breaks, which models
write; such arguments are written anew as strict JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

MAX_DEPTH = 64
OUTSIDE = re.compile(r'["{}\[\]]|[^\s:,0-9+\-.eEtrufalsn]')
INSIDE = re.compile(r'["\\]')
SPACE = re.compile(r"[ \t\r\n]*")


class CallScanner:
    """Scans for one JSON object. state: "open" (needs more), "complete" or "malformed"."""

    def __init__(self) -> None:
        self.state: Literal["open", "complete", "malformed"] = "open"
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, start: int = 0) -> int:
        """Scan more text. Returns where scanning ended: behind the object when complete, else the text's length or
        the position of the character that cannot be."""
        position = start
        while position < len(text):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            if self._depth == 0:
                position = _skip_space(text, position)
                if position == len(text):
                    return position
                if text[position] != "{":
                    self.state = "malformed"
                    return position
                self._depth = 1
                position += 1
                continue
            match = (INSIDE if self._in_string else OUTSIDE).search(text, position)
            if match is None:
                return len(text)
            position = match.end()
            self._step(match[0])
            if self.state != "open":
                return position
        return position

    def _step(self, character: str) -> None:
        if character == '"':
            self._in_string = not self._in_string
        elif character == "\\" and self._in_string:
            self._escaped = True
        elif character in "{[":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                self.state = "malformed"
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self.state = "complete"
        else:
            self.state = "malformed"


def read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call object; the arguments as the JSON text the model wrote. None if it is no call.

    Arguments are an object under "arguments" or "parameters", or a string holding one; a call without any has {}.
    """
    strict = True
    try:
        spans = _member_spans(text, strict)
    except (ValueError, RecursionError):
        strict = False
        try:
            spans = _member_spans(text, strict)
        except (ValueError, RecursionError):
            return None
    name = spans.get("name", (None, ""))[0]
    if not isinstance(name, str) or not name:
        return None
    value, raw = spans.get("arguments", spans.get("parameters", ({}, "{}")))
    if isinstance(value, str):
        try:
            value, raw = json.loads(value, parse_constant=_refuse_constant), value
        except (ValueError, RecursionError):
            return None
    if value is None:
        value, raw = {}, "{}"
    if not isinstance(value, dict):
        return None
    return name, raw if strict else json.dumps(value, ensure_ascii=False)


def _member_spans(text: str, strict: bool) -> dict[str, tuple[Any, str]]:
    """Members of a JSON object, each as its value and its own text. Raises ValueError."""
    decoder = json.JSONDecoder(strict=strict, parse_constant=_refuse_constant)
    position = _skip_space(text, 0)
    if text[position : position + 1] != "{":
        raise ValueError("not an object")
    members: dict[str, tuple[Any, str]] = {}
    position = _skip_space(text, position + 1)
    while text[position : position + 1] != "}" or members:
        key, position = decoder.raw_decode(text, position)
        position = _skip_space(text, position)
        if not isinstance(key, str) or text[position : position + 1] != ":":
            raise ValueError("not a member")
        start = _skip_space(text, position + 1)
        value, position = decoder.raw_decode(text, start)
        members[key] = (value, text[start:position])
        position = _skip_space(text, position)
        if text[position : position + 1] == "}":
            break
        if text[position : position + 1] != ",":
            raise ValueError("no comma between members")
        position = _skip_space(text, position + 1)
    if _skip_space(text, position + 1) != len(text):
        raise ValueError("text after the object")
    return members


def _skip_space(text: str, position: int) -> int:
    return SPACE.match(text, position).end()  # type: ignore[union-attr]  # matches the empty text too


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
