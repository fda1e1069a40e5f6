"""Splits generated text into content, reasoning and tool calls while it arrives.

Reasoning stands between two tags; what a call looks like is its syntax's to say. A call is delivered when it is
complete: until then it may turn out to be no call, and a client must never be handed broken JSON as a call. What is no
call stays text; a call that the length limit cuts is neither a call nor text. The text is looked at once;
pieces may be split anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from turnkeep.server.parsers.call_syntax import CallSyntax, Schemas
from turnkeep.server.parsers.deltas import Delta, append_text

State = Literal["content", "reasoning", "call"]

BLOCK_CHARS = 2048
LONG_CALL_CHARS = 2048
MIN_HALF_TAG_CHARS = 4  # so much of a tag at the end of an answer that was cut is no text
MAX_FUTILE_CALLS = 8  # after so many long texts that were no call after all, no more are looked for: time stays linear


class OutputParser:
    """Parser of one answer; made by OutputFormat.new_parser. push() pieces in order, then finish() once.

    After finish: finish_reason for the API, truncated_call (the length limit cut a call), num_unknown_tools.
    """

    def __init__(
        self,
        *,
        think_tags: tuple[str, str] | None,
        syntax: CallSyntax,
        tool_names: frozenset[str] | None,
        schemas: Schemas,
        is_reasoning: bool,
        first_prefix: str,
        reasoning_prefix: str,
        reasoning_suffix: str,
        content_prefix: str,
        call_separator: str | None,
        hides_calls: bool = False,
    ) -> None:
        self.finish_reason: str = "stop"
        self.truncated_call: bool = False
        self.num_calls: int = 0
        self.num_unknown_tools: int = 0
        self._think, self._think_end = think_tags or ("", "")
        self._syntax = syntax
        self._schemas = schemas
        self._call_ends = tuple(closer for closer in syntax.closers if len(closer) > 1)
        self._tags = [tag for tag in (self._think, self._think_end, *syntax.openers, *self._call_ends) if tag]
        self._tag_starts = frozenset(tag[0] for tag in self._tags)
        self._bare_starts = "" if tool_names is None else syntax.bare_starts
        self._tool_names = tool_names
        self._reasoning_prefix = reasoning_prefix
        self._reasoning_suffix = reasoning_suffix
        self._content_prefix = content_prefix
        self._call_separator = call_separator
        self._hides_calls = hides_calls
        self._state: State = "reasoning" if is_reasoning else "content"
        self._text = ""  # not yet decided; short, except for blanks
        self._prefix = first_prefix if is_reasoning else ""  # to be taken away from the front of what follows
        self._has_content = False
        self._after_call = False
        self._keeps_call_end = False  # the end tag of a call that was none is text, like its start tag
        self._scanner = syntax.new_scanner()
        self._opener = ""
        self._call_parts: list[str] = []  # the text behind the opener
        self._call_origin: State = "content"
        self._num_futile = 0
        self._before_call = ""
        self._deltas: list[Delta] = []
        self._backlog: deque[str] = deque()  # text to look at after _text, in blocks, so that no step copies much
        self._is_final = False
        self._is_cut = False  # by the length limit

    def push(self, text: str) -> list[Delta]:
        """Deltas that the next piece of text completes."""
        may_begin_bare = self._bare_starts and not self._has_content
        if self._state != "call" and not (self._prefix or self._after_call or self._backlog or may_begin_bare):
            plain = self._text + text
            # The usual piece: no tag can begin in it, and it does not end in blanks, which may belong to a tag.
            if plain and len(plain) <= BLOCK_CHARS and not plain[-1].isspace() and self._tag_starts.isdisjoint(plain):
                self._text = ""
                if self._state == "content":
                    self._has_content = True
                return [Delta(self._state, plain)]
        self._backlog.extend(_blocks(text))
        return self._run()

    def finish(self, reason: str) -> list[Delta]:
        """The rest. reason: why generation ended ("stop", "length", ...)."""
        self._is_final = True
        self._is_cut = is_cut = reason == "length"
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
        if self._begins_bare():
            return True
        position, tag = _first_of(self._text, self._tags)
        if tag is None:
            self._deliver_content(self._text[: self._num_ready(self._tags)])
            return False
        before, self._text = self._text[:position], self._text[position + len(tag) :]
        if tag in self._syntax.openers and self._tool_names is not None:
            if self._num_futile < MAX_FUTILE_CALLS:
                self._begin_call(before, tag)
            else:
                self._emit_content(before + tag)
        elif tag in self._call_ends and self._keeps_call_end:
            self._keeps_call_end = False
            self._emit_content(before + tag)
        elif tag in self._syntax.kept_openers:  # no calls are allowed: the body is text, and this is a part of it
            self._emit_content(before + tag)
        elif tag == self._think:
            self._emit_content(before if before.strip() or self._has_content else "")
            self._state, self._prefix = "reasoning", self._reasoning_prefix
        else:  # a tag that means nothing here
            self._emit_content(before)
        return True

    def _begins_bare(self) -> bool:
        """Begin a call that has no tag, where one may stand."""
        if not self._bare_starts or (self._has_content and not self._after_call):
            return False
        rest = self._text.lstrip()
        if not rest or rest[0] not in self._bare_starts:
            return False
        before, self._text = self._text[: len(self._text) - len(rest)], rest[1:]
        self._begin_call(before, rest[0])
        return True

    def _step_reasoning(self) -> bool:
        if not self._take_prefix():
            return False
        searches_calls = self._tool_names is not None and self._num_futile < MAX_FUTILE_CALLS
        tags = [self._think_end, *(self._syntax.openers if searches_calls else ())]
        position, tag = _first_of(self._text, tags)
        if tag is None:
            num_ready = self._num_ready(tags)
            append_text(self._deltas, "reasoning", self._text[:num_ready])
            self._text = self._text[num_ready:]
            return False
        before, self._text = self._text[:position], self._text[position + len(tag) :]
        if tag != self._think_end:
            self._begin_call(before, tag)
        else:
            append_text(self._deltas, "reasoning", before.removesuffix(self._reasoning_suffix))
            self._state, self._prefix = "content", self._content_prefix
        return True

    def _num_ready(self, tags: Sequence[str]) -> int:
        """How much of the text can be delivered: not blanks at its end (they may belong to a tag), nor half a tag."""
        if self._at_end and not self._is_cut:
            return len(self._text)
        longest = max(map(len, tags), default=1) - 1
        end = len(self._text)
        for length in range(min(longest, end), 0, -1):
            tail = self._text[end - length :]
            if any(tag.startswith(tail) for tag in tags):
                if self._at_end and length < MIN_HALF_TAG_CHARS:
                    break
                end -= length
                break
        return end if self._at_end else len(self._text[:end].rstrip())

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
        append_text(self._deltas, "content", text)

    def _begin_call(self, before: str, opener: str) -> None:
        """A call's opener was seen after the undelivered text `before`; how that ends is settled with the call."""
        self._call_origin = self._state
        self._before_call = before
        self._state = "call"
        self._scanner = self._syntax.new_scanner()
        self._opener = opener
        self._call_parts = []
        if self._is_opener_kept:
            self._scanner.feed(opener)
        text, self._text = self._text, ""
        self._scan_call(text)

    @property
    def _is_opener_kept(self) -> bool:
        """Whether the opener is a part of the call's body."""
        return self._opener in self._syntax.kept_openers or self._is_bare

    @property
    def _is_bare(self) -> bool:
        return self._opener not in self._syntax.openers

    def _scan_call(self, text: str) -> None:
        end = self._scanner.feed(text)
        self._call_parts.append(text)
        if self._scanner.state == "complete":
            fed = "".join(self._call_parts)
            end += len(fed) - len(text)
            self._call_parts = [fed[:end]]
            self._text = fed[end:]

    def _step_call(self) -> bool:
        if self._scanner.state == "open":
            if not self._at_end:
                return False
            if self._is_cut and self._is_surely_call:
                self._drop_call()
                return True
            self._num_futile += 1
            self._reject_call()
            return True
        if self._scanner.state == "malformed":
            self._reject_call()
            return True
        following = self._text.lstrip()
        tags = (*self._syntax.closers, *self._syntax.openers)
        if following.startswith(tags) or (self._at_end and not following):
            self._accept_call(following)
            return True
        if any(tag.startswith(following) for tag in tags) and not self._at_end:
            return False
        if self._syntax.needs_closer:
            self._reject_call()
        else:
            self._accept_call(following)
        return True

    def _accept_call(self, following: str) -> None:
        body = (self._opener if self._is_opener_kept else "") + "".join(self._call_parts)
        calls = self._scanner.read(body, self._schemas)
        if calls is None:
            self._reject_call()
            return
        names = self._tool_names or frozenset()
        # Thinking aloud about calls is no call, and JSON may be the answer.
        if (self._call_origin == "reasoning" or self._is_bare) and not all(call.name in names for call in calls):
            self._reject_call()
            return
        if self._call_origin == "reasoning":
            append_text(self._deltas, "reasoning", self._before_call.removesuffix(self._reasoning_suffix))
        else:
            self._emit_content(self._content_before_call())
        for call in () if self._hides_calls else calls:
            self._deltas.append(Delta("tool_call", call.name, self.num_calls, call.call_id))
            append_text(self._deltas, "arguments", call.arguments, self.num_calls)
            self.num_calls += 1
            self.num_unknown_tools += call.name not in names
        self._state, self._after_call = "content", True
        closer = next((closer for closer in self._syntax.closers if following.startswith(closer)), "")
        self._text = following.removeprefix(closer)

    def _content_before_call(self) -> str:
        """The content in front of a call without the blanks that belong to the call."""
        before = self._before_call
        if self._call_separator is None or not (before.strip() or self._has_content):
            return before.rstrip()
        return before.removesuffix(self._call_separator)

    @property
    def _is_surely_call(self) -> bool:
        """Whether a call that is not complete is one all the same: JSON may be the answer, and to think of calls in
        tags is no call."""
        if self._call_origin == "reasoning":
            return False
        body = "".join(self._call_parts)
        return not self._is_bare or any(f'"{name}"' in body for name in self._tool_names or ())

    def _drop_call(self) -> None:
        """The length limit cut it: a client could not act on it, and sent back as text it would spoil the history."""
        self._emit_content(self._content_before_call())
        self._state, self._text, self._call_parts = "content", "", []

    def _reject_call(self) -> None:
        """It was no call: its opener is text, and what follows is looked at again."""
        self._num_futile += self._scanner.num_taken > LONG_CALL_CHARS
        self._backlog.appendleft(self._text)
        self._backlog.extendleft(reversed(self._call_parts))
        self._text = ""
        self._call_parts = []
        self._state = self._call_origin
        if self._state == "reasoning":
            append_text(self._deltas, "reasoning", self._before_call + self._opener)
        else:
            self._emit_content(self._before_call + self._opener)
            self._keeps_call_end = True


def _blocks(text: str) -> Iterator[str]:
    return (text[start : start + BLOCK_CHARS] for start in range(0, len(text), BLOCK_CHARS))


def _first_of(text: str, tags: Sequence[str]) -> tuple[int, str | None]:
    """The tag that begins first in a text, and where."""
    best: tuple[int, str | None] = (-1, None)
    for tag in tags:
        position = text.find(tag)
        if position >= 0 and (best[1] is None or position < best[0]):
            best = (position, tag)
    return best
