"""Calls with a head of tags around the name, then a JSON object: Mistral, DeepSeek, Kimi K2.

The head is a pattern; several calls may stand in a section with tags of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from turnkeep.server.parsers.call_scanner import CallScanner, read_calls, read_object
from turnkeep.server.parsers.call_syntax import MAX_NAME_CHARS, BodyScanner, Call, MarkerScanner, Schemas


class HeadedScanner(MarkerScanner):
    """The head of a call up to its first brace, then JSON; with `takes_lists` also JSON that names the calls itself.

    The head has a group `name`, and `id` where calls carry the id that the model gave them. What no_head finds
    cannot be a head, which is known then before the brace comes.
    """

    def __init__(self, head: re.Pattern[str], no_head: re.Pattern[str] | None, *, takes_lists: bool) -> None:
        super().__init__()
        self._head = head
        self._no_head = no_head
        self._takes_lists = takes_lists
        self._name = ""
        self._call_id: str | None = None
        self._json: CallScanner | None = None

    def _step(self) -> bool:
        if self._json is not None:
            end = self._json.feed(self._text)
            self.state = self._json.state
            self._take(end if self.state == "complete" else len(self._text))
            return False
        if self._takes_lists and self._text.lstrip().startswith(("{", "[")):
            self._json = CallScanner("{[")
            return True
        end = self._text.find("{", 0, MAX_NAME_CHARS)
        if end >= 0 and (match := self._head.fullmatch(self._text, 0, end)):
            groups = match.groupdict()
            self._name, self._call_id = groups["name"], groups.get("id")
            self._take(end)
            self._json = CallScanner()
            return True
        is_none = self._no_head is not None and self._no_head.search(self._text)
        if end >= 0 or len(self._text) >= MAX_NAME_CHARS or is_none:
            self.state = "malformed"
        return False

    def read(self, body: str, schemas: Schemas) -> list[Call] | None:
        if not self._name:
            return read_calls(body)
        arguments = read_object(body[body.index("{") :])
        return None if arguments is None else [Call(self._name, arguments, self._call_id)]


@dataclass(frozen=True, slots=True)
class HeadedCalls:
    """head_tags: the tags inside the head; the other fields as in HeadedScanner and CallSyntax."""

    openers: tuple[str, ...]
    closers: tuple[str, ...]
    head: re.Pattern[str]
    head_tags: tuple[str, ...]
    no_head: re.Pattern[str] | None = None
    takes_lists: bool = False
    call_id_chars: int | None = None
    kept_openers: tuple[str, ...] = ()
    needs_closer: bool = False
    bare_starts: str = ""

    @property
    def markup(self) -> tuple[str, ...]:
        return (*self.openers, *self.head_tags, *self.closers)

    def new_scanner(self) -> BodyScanner:
        return HeadedScanner(self.head, self.no_head, takes_lists=self.takes_lists)


# [TOOL_CALLS] and a JSON list, or [TOOL_CALLS]name[ARGS]{...} for each call.
MISTRAL = HeadedCalls(
    ("[TOOL_CALLS]",),
    (),
    re.compile(r"\s*(?P<name>[\w.\-]+)\s*(?:\[CALL_ID\]\s*\w*\s*)?(?:\[ARGS\]\s*)?"),
    ("[CALL_ID]", "[ARGS]"),
    no_head=re.compile(r"[^\w.\-\s\[\]]"),
    takes_lists=True,
    call_id_chars=9,
)
# V3 and R1 write function<sep>NAME and fenced JSON, V3.1 writes NAME<sep>{...}. The section's tags may be missing.
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK = HeadedCalls(
    ("<｜tool▁calls▁begin｜>", _BEGIN),
    (_END, f"```{_END}", "<｜tool▁calls▁end｜>"),
    re.compile(rf"\s*(?:{_BEGIN})?\s*(?:function{_SEP})?(?P<name>[\w.\-]+)\s*(?:{_SEP}|```(?:json)?)\s*"),
    (_SEP,),
)
# The id, functions.NAME:NUMBER, is all that names the tool; the next prompt prints it as it was.
KIMI_K2 = HeadedCalls(
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    re.compile(
        r"\s*(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+)(?::\d+)?)\s*"
        r"<\|tool_call_argument_begin\|>\s*"
    ),
    ("<|tool_call_argument_begin|>",),
)
