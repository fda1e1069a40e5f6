"""Calls as JSON objects, one or a list of them: hermes, granite, nemotron, llama, and bare JSON."""

from __future__ import annotations

from dataclasses import dataclass

from turnkeep.server.parsers.call_scanner import CallScanner, read_calls
from turnkeep.server.parsers.call_syntax import BodyScanner, Call, Schemas


class JsonScanner(CallScanner):
    """A JSON body; what it means does not depend on the tools' schemas."""

    num_taken = 0  # an opener inside of it breaks it soon

    def read(self, body: str, schemas: Schemas) -> list[Call] | None:
        return read_calls(body)


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Name and arguments in a JSON object between tags, or bare. starts: "{" and, where lists of calls occur, "["."""

    openers: tuple[str, ...]
    closers: tuple[str, ...] = ()
    needs_closer: bool = True
    starts: str = "{"
    bare_starts: str = ""
    kept_openers: tuple[str, ...] = ()
    call_id_chars: int | None = None

    @property
    def markup(self) -> tuple[str, ...]:
        return (*self.openers, *(closer for closer in self.closers if len(closer) > 1))

    def new_scanner(self) -> BodyScanner:
        return JsonScanner(self.starts)


HERMES = JsonCalls(("<tool_call>",), ("</tool_call>",))
GRANITE = JsonCalls(("<|tool_call|>", "<tool_call>"), ("</tool_call>",), needs_closer=False, starts="{[")
NEMOTRON = JsonCalls(("<TOOLCALL>",), ("</TOOLCALL>",), starts="{[")
LLAMA3_JSON = JsonCalls(("<|python_tag|>",), (";",), needs_closer=False, bare_starts="{")
BARE_JSON = JsonCalls((), (";", ","), needs_closer=False, starts="{[", bare_starts="{[")
