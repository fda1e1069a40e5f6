"""Calls as <function=NAME> with a <parameter=KEY> for each argument: Qwen3-Coder, Qwen3.5, Nemotron 3.

Values are raw text; what type they have is for the tool's schema to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnkeep.server.parsers.call_scanner import write_arguments
from turnkeep.server.parsers.call_syntax import MAX_NAME_CHARS, BodyScanner, Call, MarkerScanner, Schemas

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# The last two end a value whose own end tag is missing.
VALUE_ENDS = (PARAMETER_END, f"\n{PARAMETER}", f"\n{FUNCTION_END}\n</tool_call>")
WORDS = {"True": True, "False": False, "None": None}


class XmlScanner(MarkerScanner):
    """States: at the function tag, between parameters, in a value."""

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._is_named = False
        self._key: str | None = None
        self._value: list[str] = []
        self._values: dict[str, str] = {}

    def _step(self) -> bool:
        if self._key is not None:
            return self._step_value(self._key)
        word = PARAMETER if self._is_named else FUNCTION
        if self._is_named and self._take_word(FUNCTION_END):
            self.state = "complete"
            return False
        text = self._text.lstrip()
        if not text.startswith(word):
            if not (word.startswith(text) or (self._is_named and FUNCTION_END.startswith(text))):
                self.state = "malformed"
            return False
        end = text.find(">", 0, len(word) + MAX_NAME_CHARS)
        name = text[len(word) : end if end >= 0 else len(word) + MAX_NAME_CHARS]
        if "<" in name or "\n" in name or end == len(word) or (end < 0 and len(name) == MAX_NAME_CHARS):
            self.state = "malformed"
            return False
        if end < 0:
            return False
        self._text = text[end + 1 :]
        if self._is_named:
            self._key = name.strip()
        else:
            self._name, self._is_named = name.strip(), True
        return True

    def _step_value(self, key: str) -> bool:
        position, marker = self._find(VALUE_ENDS)
        self._value.append(self._take(position))
        if marker is None:
            return False
        if marker == PARAMETER_END:
            self._take(len(marker))
        # One line break on either side belongs to the tags.
        self._values[key] = "".join(self._value).removeprefix("\n").removesuffix("\n")
        self._key, self._value = None, []
        return True

    def read(self, body: str, schemas: Schemas) -> list[Call] | None:
        if not self._name:
            return None
        properties = schemas.get(self._name, {}).get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        arguments = {key: typed_value(text, known.get(key)) for key, text in self._values.items()}
        written = write_arguments(arguments)
        return None if written is None else [(self._name, written)]


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """<tool_call> around it is often left out by models, in front or behind."""

    openers: tuple[str, ...] = ("<tool_call>", FUNCTION)
    kept_openers: tuple[str, ...] = (FUNCTION,)
    closers: tuple[str, ...] = ("</tool_call>",)
    needs_closer: bool = False
    bare_starts: str = ""
    call_id_chars: int | None = None

    @property
    def markup(self) -> tuple[str, ...]:
        return ("<tool_call>", "</tool_call>", FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)

    def new_scanner(self) -> BodyScanner:
        return XmlScanner()


def typed_value(text: str, schema: Any) -> Any:
    """A value as its schema wants it. A string where strings are allowed or nothing is known; a text that does not
    fit the type stays the text it is."""
    types = _types_of(schema)
    word = text.strip()
    if "null" in types and word in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    if word in WORDS:
        word = json.dumps(WORDS[word])
    try:
        value = json.loads(word, parse_constant=_refuse_constant)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return value if any(_has_type(value, name) for name in types) else text


def _types_of(schema: Any) -> set[str]:
    """The JSON types that a schema allows by name; empty when it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {name for name in kind if isinstance(name, str)}
    choices = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(choices, list) and choices:
        found = [_types_of(choice) for choice in choices]
        return set().union(*found) if all(found) else set()
    values = schema.get("enum")
    if isinstance(values, list) and values and not any(isinstance(value, str) for value in values):
        return {"number", "boolean", "null", "object", "array"}
    return set()


def _has_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    types: dict[str, tuple[type, ...]] = {
        "integer": (int,), "number": (int, float), "object": (dict,), "array": (list,), "null": (type(None),),
    }  # fmt: skip
    return isinstance(value, types.get(name, ()))


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
