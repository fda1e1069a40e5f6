"""Finds the end of tool calls' JSON while its text arrives, and reads the calls.

Each character is looked at once. What is accepted is JSON, except that strings may hold raw line breaks, which models
write; such arguments are written anew as strict JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from turnkeep.server.parsers.call_syntax import Call

MAX_DEPTH = 64
OUTSIDE = re.compile(r'["{}\[\]]|[^\s:,0-9+\-.eEtrufalsn]')
INSIDE = re.compile(r'["\\]')
SPACE = re.compile(r"[ \t\r\n]*")


class CallScanner:
    """Scans for one JSON object, or list where `starts` has its bracket. state: "open" (needs more), "complete" or
    "malformed"."""

    def __init__(self, starts: str = "{") -> None:
        self._starts = starts
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
                if text[position] not in self._starts:
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


def read_calls(text: str) -> list[Call] | None:
    """The calls of an object or of a list of them, as read_call() gives each. None if one is no call, or none is
    there."""
    if text.lstrip()[:1] != "[":
        call = read_call(text)
        return None if call is None else [call]
    try:
        spans = _item_spans(text, strict=True)
    except (ValueError, RecursionError):
        try:
            spans = _item_spans(text, strict=False)
        except (ValueError, RecursionError):
            return None
    calls = [read_call(span) for span in spans]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def read_object(text: str) -> str | None:
    """The JSON text of an object as the model wrote it, or written anew where strings hold raw line breaks."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        return text.strip() if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        pass
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return write_arguments(value) if isinstance(value, dict) else None


def write_arguments(arguments: dict[str, Any]) -> str | None:
    """Strict JSON text of arguments; None for numbers that JSON cannot carry."""
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can carry
        return json.dumps(arguments)
    except (ValueError, RecursionError):
        return None
    return text


def read_call(text: str) -> Call | None:
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
    written = raw if strict else write_arguments(value)
    return None if written is None else Call(name, written)


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


def _item_spans(text: str, strict: bool) -> list[str]:
    """The texts of a JSON list's items. Raises ValueError."""
    decoder = json.JSONDecoder(strict=strict, parse_constant=_refuse_constant)
    position = _skip_space(text, _skip_space(text, 0) + 1)
    items: list[str] = []
    while text[position : position + 1] != "]" or items:
        start = position
        _, position = decoder.raw_decode(text, start)
        items.append(text[start:position])
        position = _skip_space(text, position)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            raise ValueError("no comma between items")
        position = _skip_space(text, position + 1)
    if _skip_space(text, position + 1) != len(text):
        raise ValueError("text after the list")
    return items


def _skip_space(text: str, position: int) -> int:
    return SPACE.match(text, position).end()  # type: ignore[union-attr]  # matches the empty text too


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
