"""Calls as a list of Python calls with keyword arguments, between tags: LFM2 and others. Nothing is ever run."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import Any

from turnkeep.server.parsers.call_scanner import MAX_DEPTH, write_arguments
from turnkeep.server.parsers.call_syntax import BodyScanner, Call, MarkerScanner, Schemas

QUOTES = ("'", '"')
WORDS = {"true": True, "false": False, "null": None}


class PythonScanner(MarkerScanner):
    """Brackets outside of strings until the list is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._quote = ""

    def _step(self) -> bool:
        if self._depth == 0:
            begun = self._take_word("[")
            self._depth = int(begun is True)
            if begun is False:
                self.state = "malformed"
            return begun is True
        markers = ("\\", self._quote) if self._quote else (*QUOTES, "[", "]", "(", ")", "{", "}")
        position, marker = self._find(markers)
        if marker == "\\" and position + 1 == len(self._text):
            return False  # what it escapes is yet to come
        self._take(position + (2 if marker == "\\" else len(marker or "")))
        if marker is None:
            return False
        if marker in QUOTES:
            self._quote = "" if self._quote else marker
        elif marker != "\\":
            self._depth += 1 if marker in "[({" else -1
            if self._depth == 0:
                self.state = "complete"
            elif self._depth > MAX_DEPTH:
                self.state = "malformed"
        return True

    def read(self, body: str, schemas: Schemas) -> list[Call] | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes that Python does not know
                tree = ast.parse(body.strip(), mode="eval").body
            calls = [_read_call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        found = [Call(name, written) for name, value in calls if (written := write_arguments(value)) is not None]
        return found if found and len(found) == len(calls) else None


def _read_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Raises ValueError for anything but a name called with keywords."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keywords")
    arguments = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    if len(arguments) != len(node.keywords):
        raise ValueError("not only keywords")
    return _name(node.func), arguments


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _value(node: ast.expr) -> Any:
    """A literal as JSON has it. Raises ValueError."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key that is no text")
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    value = ast.literal_eval(node)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError("no value that JSON has")


@dataclass(frozen=True, slots=True)
class PythonCalls:
    openers: tuple[str, ...] = ("<|tool_call_start|>",)
    closers: tuple[str, ...] = ("<|tool_call_end|>",)
    kept_openers: tuple[str, ...] = ()
    needs_closer: bool = True
    bare_starts: str = ""
    call_id_chars: int | None = None

    @property
    def markup(self) -> tuple[str, ...]:
        return (*self.openers, *self.closers)

    def new_scanner(self) -> BodyScanner:
        return PythonScanner()
