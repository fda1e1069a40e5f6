"""Splits generated text into content, reasoning and tool calls while it arrives.

A call is delivered when it is complete: until then it may turn out to be no call, and a client must never be handed
broken JSON as a call. What is no call stays text. The text is looked at once; pieces may be split anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from turnkeep.server.parsers.call_scanner import CallScanner, read_call
from turnkeep.server.parsers.deltas import Delta, DeltaKind

State = Literal["content", "reasoning", "call"]

BLOCK_CHARS = 2048


class OutputParser:
    """Parser of one answer; made by OutputFormat.new_parser. push() pieces in order, then finish() once.

    After finish: finish_reason for the API, truncated_call (the length limit cut a call), num_unknown_tools.
    """

    def __init__(
        self,
        *,
        think_tags: tuple[str, str] | None,
        call_tags: tuple[str, str],
        tool_names: frozenset[str] | None,
        is_reasoning: bool,
        first_prefix: str,
        reasoning_prefix: str,
        reasoning_suffix: str,
        content_prefix: str,
        call_separator: str | None,
    ) -> None:
        self.finish_reason: str = "stop"
        self.truncated_call: bool = False
        self.num_calls: int = 0
        self.num_unknown_tools: int = 0
        self._think, self._think_end = think_tags or ("", "")
        self._call, self._call_end = call_tags
        self._tag_starts = frozenset(tag[0] for tag in (self._think, self._think_end, *call_tags) if tag)
        self._tool_names = tool_names
        self._reasoning_prefix = reasoning_prefix
        self._reasoning_suffix = reasoning_suffix
        self._content_prefix = content_prefix
        self._call_separator = call_separator
        self._state: State = "reasoning" if is_reasoning else "content"
        self._text = ""  # not yet decided; short, except for blanks
        self._prefix = first_prefix if is_reasoning else ""  # to be taken away from the front of what follows
        self._has_content = False
        self._after_call = False
        self._keeps_call_end = False  # the end tag of a call that was none is text, like its start tag
        self._scanner = CallScanner()
        self._call_parts: list[str] = []
        self._call_origin: State = "content"
        self._before_call = ""
        self._deltas: list[Delta] = []
        self._backlog: deque[str] = deque()  # text to look at after _text, in blocks, so that no step copies much
        self._is_final = False

    def push(self, text: str) -> list[Delta]:
        """Deltas that the next piece of text completes."""
        if self._state != "call" and not (self._prefix or self._after_call or self._backlog):
            plain = self._text + text
            # The usual piece: no tag can begin in it, and it does not end in blanks, which may belong to a tag.
            if plain and len(plain) <= BLOCK_CHARS and not plain[-1].isspace() and _holds_none(plain, self._tag_starts):
                self._text = ""
                if self._state == "content":
                    self._has_content = True
                return [Delta(self._state, plain)]
        self._backlog.extend(_blocks(text))
        return self._run()

    def finish(self, reason: str) -> list[Delta]:
        """The rest. reason: why generation ended ("stop", "length", ...)."""
        self._is_final = True
        is_cut = reason == "length"
        if self._state == "call" and self._scanner.state == "open":
            self.truncated_call = is_cut
        deltas = self._run()
        if is_cut or self.num_calls == 0:
            self.finish_reason = "length" if is_cut else "stop"
        else:
            self.finish_reason = "tool_calls"
        return deltas

    def _run(self) -> list[Delta]:
        steps = {"content": self._step_content, "reasoning": self._step_reasoning, "call": self._step_call}
        while True:
            if steps[self._state]():
                continue
            if not self._backlog:
                break
            block = self._backlog.popleft()
            if self._state == "call" and self._scanner.state == "open":
                self._scan_call(block)
            else:
                self._text += block
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def _at_end(self) -> bool:
        """Whether nothing comes after the text at hand."""
        return self._is_final and not self._backlog

    def _take_prefix(self) -> bool:
        """Take the expected prefix away. False: more text is needed to tell whether it is there."""
        if self._prefix and not self._at_end and len(self._text) < len(self._prefix):
            if self._prefix.startswith(self._text):
                return False
        elif self._prefix and self._text.startswith(self._prefix):
            self._text = self._text[len(self._prefix) :]
        self._prefix = ""
        return True

    def _step_content(self) -> bool:
        if not self._take_prefix():
            return False
        tags = [tag for tag in (self._think, self._think_end, self._call, self._call_end) if tag]
        position, tag = _first_of(self._text, tags)
        if tag is None:
            self._deliver_content(self._text[: self._num_ready(tags)])
            return False
        before, self._text = self._text[:position], self._text[position + len(tag) :]
        if tag == self._call and self._tool_names is not None:
            self._begin_call(before)
        elif tag == self._call_end and self._keeps_call_end:
            self._keeps_call_end = False
            self._emit_content(before + tag)
        elif tag == self._think:
            self._emit_content(before if before.strip() or self._has_content else "")
            self._state, self._prefix = "reasoning", self._reasoning_prefix
        else:  # a tag that means nothing here
            self._emit_content(before)
        return True

    def _step_reasoning(self) -> bool:
        if not self._take_prefix():
            return False
        tags = [self._think_end] if self._tool_names is None else [self._think_end, self._call]
        position, tag = _first_of(self._text, tags)
        if tag is None:
            num_ready = self._num_ready(tags)
            self._emit("reasoning", self._text[:num_ready])
            self._text = self._text[num_ready:]
            return False
        before, self._text = self._text[:position], self._text[position + len(tag) :]
        if tag == self._call:
            self._begin_call(before)
        else:
            self._emit("reasoning", before.removesuffix(self._reasoning_suffix))
            self._state, self._prefix = "content", self._content_prefix
        return True

    def _num_ready(self, tags: Sequence[str]) -> int:
        """How much of the text can be delivered: not blanks at its end (they may belong to a tag), nor half a tag."""
        if self._at_end:
            return len(self._text)
        longest = max(map(len, tags)) - 1
        end = len(self._text)
        for length in range(min(longest, end), 0, -1):
            tail = self._text[end - length :]
            if any(tag.startswith(tail) for tag in tags):
                end -= length
                break
        return len(self._text[:end].rstrip())

    def _deliver_content(self, text: str) -> None:
        self._text = self._text[len(text) :]
        self._emit_content(text)

    def _emit_content(self, text: str) -> None:
        if self._after_call and text:
            if not text.strip():
                return  # blanks around calls belong to the markup
            text = text if self._has_content else text.lstrip()
            self._after_call = False
        self._has_content = self._has_content or bool(text)
        self._emit("content", text)

    def _emit(self, kind: DeltaKind, text: str, index: int = 0) -> None:
        if not text:
            return
        last = self._deltas[-1] if self._deltas else None
        if last is not None and last.kind == kind and kind in ("content", "reasoning"):
            self._deltas[-1] = Delta(kind, last.text + text)
        else:
            self._deltas.append(Delta(kind, text, index))

    def _begin_call(self, before: str) -> None:
        """A call tag was seen after the undelivered text `before`; how that ends is settled with the call."""
        self._call_origin = self._state
        self._before_call = before
        self._state = "call"
        self._scanner = CallScanner()
        self._call_parts = []
        text, self._text = self._text, ""
        self._scan_call(text)

    def _scan_call(self, text: str) -> None:
        end = self._scanner.feed(text)
        if self._scanner.state == "complete":
            self._call_parts.append(text[:end])
            self._text = text[end:]
        else:
            self._call_parts.append(text)

    def _step_call(self) -> bool:
        if self._scanner.state == "open":
            if not self._at_end:
                return False
            self._reject_call()
            return True
        if self._scanner.state == "malformed":
            self._reject_call()
            return True
        following = self._text.lstrip()
        tags = (self._call_end, self._call)
        if following.startswith(tags) or (self._at_end and not following):
            self._accept_call(following)
            return True
        if any(tag.startswith(following) for tag in tags) and not self._at_end:
            return False
        self._reject_call()
        return True

    def _accept_call(self, following: str) -> None:
        call = read_call("".join(self._call_parts))
        if call is None:
            self._reject_call()
            return
        name, arguments = call
        is_declared = self._tool_names is not None and name in self._tool_names
        if self._call_origin == "reasoning":
            if not is_declared:  # thinking aloud about calls
                self._reject_call()
                return
            self._emit("reasoning", self._before_call.removesuffix(self._reasoning_suffix))
        else:
            self._emit_content(self._content_before_call())
        self._emit("tool_call", name, self.num_calls)
        self._emit("arguments", arguments, self.num_calls)
        self.num_calls += 1
        self.num_unknown_tools += not is_declared
        self._state, self._after_call = "content", True
        self._text = following.removeprefix(self._call_end)

    def _content_before_call(self) -> str:
        """The content in front of a call without the blanks that belong to the call."""
        before = self._before_call
        if self._call_separator is None or not (before.strip() or self._has_content):
            return before.rstrip()
        return before.removesuffix(self._call_separator)

    def _reject_call(self) -> None:
        """It was no call: its tag is text, and what follows is looked at again."""
        self._backlog.appendleft(self._text)
        self._backlog.extendleft(reversed(self._call_parts))
        self._text = ""
        self._call_parts = []
        self._state = self._call_origin
        if self._state == "reasoning":
            self._emit("reasoning", self._before_call + self._call)
        else:
            self._emit_content(self._before_call + self._call)
            self._keeps_call_end = True


def _blocks(text: str) -> Iterator[str]:
    return (text[start : start + BLOCK_CHARS] for start in range(0, len(text), BLOCK_CHARS))


def _holds_none(text: str, characters: frozenset[str]) -> bool:
    return all(character not in text for character in characters)


def _first_of(text: str, tags: Sequence[str]) -> tuple[int, str | None]:
    """The tag that begins first in a text, and where."""
    best: tuple[int, str | None] = (-1, None)
    for tag in tags:
        position = text.find(tag)
        if position >= 0 and (best[1] is None or position < best[0]):
            best = (position, tag)
    return best
