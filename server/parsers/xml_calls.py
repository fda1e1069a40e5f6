"""Calls as <function=NAME> with a <parameter=KEY> for each argument: Qwen3-Coder, Qwen3.5, Nemotron 3, Seed-OSS; and
with other tags MiniMax.

Values are raw text; what type they have is for the tool's schema to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnkeep.server.parsers.call_scanner import write_arguments
from turnkeep.server.parsers.call_syntax import MAX_NAME_CHARS, BodyScanner, Call, MarkerScanner, Schemas

WORDS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True, slots=True)
class XmlTags:
    """The tags of one family. call, call_end: around a call, or around several; models often leave one of them out.

    function and parameter begin a tag that goes on with a name and ends with name_end. line_breaks: one line break on
    either side of a value belongs to its tags.
    """

    call: str
    call_end: str
    function: str
    function_end: str
    parameter: str
    parameter_end: str
    name_end: str = ">"
    line_breaks: bool = False

    @property
    def value_ends(self) -> tuple[str, ...]:
        """The last two end a value whose own end tag is missing."""
        return self.parameter_end, f"\n{self.parameter}", f"\n{self.function_end}\n{self.call_end}"


class XmlScanner(MarkerScanner):
    """States: at the function tag, between parameters, in a value."""

    def __init__(self, tags: XmlTags) -> None:
        super().__init__()
        self._tags = tags
        self._name = ""
        self._is_named = False
        self._key: str | None = None
        self._value: list[str] = []
        self._values: dict[str, str] = {}

    def _step(self) -> bool:
        if self._key is not None:
            return self._step_value(self._key)
        tags = self._tags
        word = tags.parameter if self._is_named else tags.function
        if self._is_named and self._take_word(tags.function_end):
            self.state = "complete"
            return False
        text = self._text.lstrip()
        if not text.startswith(word):
            if not (word.startswith(text) or (self._is_named and tags.function_end.startswith(text))):
                self.state = "malformed"
            return False
        end = text.find(tags.name_end, len(word), len(word) + MAX_NAME_CHARS)
        name = text[len(word) : end if end >= 0 else len(word) + MAX_NAME_CHARS]
        if "<" in name or "\n" in name or end == len(word) or (end < 0 and len(name) == MAX_NAME_CHARS):
            self.state = "malformed"
            return False
        if end < 0:
            return False
        self._text = text[end + len(tags.name_end) :]
        if self._is_named:
            self._key = name.strip()
        else:
            self._name, self._is_named = name.strip(), True
        return True

    def _step_value(self, key: str) -> bool:
        position, marker = self._find(self._tags.value_ends)
        self._value.append(self._take(position))
        if marker is None:
            return False
        if marker == self._tags.parameter_end:
            self._take(len(marker))
        value = "".join(self._value)
        self._values[key] = value.removeprefix("\n").removesuffix("\n") if self._tags.line_breaks else value
        self._key, self._value = None, []
        return True

    def read(self, body: str, schemas: Schemas) -> list[Call] | None:
        if not self._name:
            return None
        properties = schemas.get(self._name, {}).get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        arguments = {key: typed_value(text, known.get(key)) for key, text in self._values.items()}
        written = write_arguments(arguments)
        return None if written is None else [Call(self._name, written)]


@dataclass(frozen=True, slots=True)
class XmlCalls:
    tags: XmlTags
    needs_closer: bool = False
    bare_starts: str = ""
    call_id_chars: int | None = None

    @property
    def openers(self) -> tuple[str, ...]:
        return self.tags.call, self.tags.function

    @property
    def kept_openers(self) -> tuple[str, ...]:
        return (self.tags.function,)

    @property
    def closers(self) -> tuple[str, ...]:
        return (self.tags.call_end,)

    @property
    def markup(self) -> tuple[str, ...]:
        tags = self.tags
        around = (tags.call, tags.call_end, tags.function, tags.function_end)
        return (*around, tags.parameter, tags.parameter_end)

    def new_scanner(self) -> BodyScanner:
        return XmlScanner(self.tags)


_FUNCTION = ("<function=", "</function>", "<parameter=", "</parameter>")
QWEN3_CODER = XmlCalls(XmlTags("<tool_call>", "</tool_call>", *_FUNCTION, line_breaks=True))
SEED_OSS = XmlCalls(XmlTags("<seed:tool_call>", "</seed:tool_call>", *_FUNCTION))
MINIMAX = XmlCalls(
    XmlTags(
        *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', "</invoke>"),
        *('<parameter name="', "</parameter>", '">'),
    )
)


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
