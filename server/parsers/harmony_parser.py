"""The channels of gpt-oss: analysis is reasoning, final is content, and commentary to a function is a call.

An output is a row of messages, each a header and a body between control tokens. As in OutputParser, a call is delivered
when it is complete, and what is no call stays text.
"""

from __future__ import annotations

import re
from typing import Literal

from turnkeep.server.parsers.call_scanner import read_object
from turnkeep.server.parsers.deltas import Delta, append_text

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKUP = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
BODY_ENDS = (END, CALL, RETURN, START, CHANNEL)
MAX_HEADER_CHARS = 512
BLOCK_CHARS = 2048
RECIPIENT = re.compile(r"to=([^\s<]+)")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w*)")

Kind = Literal["content", "reasoning", "call"]


class HarmonyParser:
    """Has the face of OutputParser. prompt_text: its end tells in which header or body the output begins."""

    def __init__(self, prompt_text: str, *, tool_names: frozenset[str] | None, hides_calls: bool = False) -> None:
        self.finish_reason: str = "stop"
        self.truncated_call: bool = False
        self.num_calls: int = 0
        self.num_unknown_tools: int = 0
        self._tool_names = tool_names
        self._hides_calls = hides_calls
        self._kind: Kind | None = None  # of the body that is open; None: in a header
        self._name = ""
        self._text = ""
        self._body: list[str] = []
        self._deltas: list[Delta] = []
        self._is_final = False
        self._is_cut = False
        tail = prompt_text[prompt_text.rfind(START) :] if START in prompt_text else ""
        if MESSAGE in tail and not tail.endswith((END, CALL, RETURN)):
            self._open_body(tail[: tail.index(MESSAGE)])
        else:
            self._text = tail if MESSAGE not in tail else ""

    def push(self, text: str) -> list[Delta]:
        """Deltas that the next piece of text completes."""
        for start in range(0, max(len(text), 1), BLOCK_CHARS):  # in blocks, so that no step copies much
            self._text += text[start : start + BLOCK_CHARS]
            while self._step_header() if self._kind is None else self._step_body(self._kind):
                pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self, reason: str) -> list[Delta]:
        """The rest. reason: why generation ended ("stop", "length", ...)."""
        self._is_final, self._is_cut = True, reason == "length"
        deltas = self.push("")
        if self._kind == "call":
            num_calls = self.num_calls
            self._close_call()
            self.truncated_call = self._is_cut and self.num_calls == num_calls
            deltas += self._deltas
            self._deltas = []
        if reason == "length" or self.num_calls == 0:
            self.finish_reason = "length" if reason == "length" else "stop"
        else:
            self.finish_reason = "tool_calls"
        return deltas

    def _step_header(self) -> bool:
        """Read on to the start of a body. Text that is too long for a header is an answer without one."""
        position = self._text.find(MESSAGE)
        if 0 <= position <= MAX_HEADER_CHARS:
            header, self._text = self._text[:position], self._text[position + len(MESSAGE) :]
            self._open_body(header)
            return True
        if len(self._text) >= MAX_HEADER_CHARS + len(MESSAGE) or self._is_final:
            self._kind = "content"
            self._text = _without_header(self._text[:MAX_HEADER_CHARS]) + self._text[MAX_HEADER_CHARS:]
            return bool(self._text)
        return False

    def _open_body(self, header: str) -> None:
        # A header that was begun anew counts from there.
        header = header[max(header.rfind(START), 0) :]
        recipient, channel = RECIPIENT.search(header), CHANNEL_NAME.search(header)
        self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "content"
        self._body = []
        if recipient is not None and self._tool_names is not None:
            name = recipient[1].removeprefix("functions.")
            if recipient[1].startswith("functions.") or name in self._tool_names:
                self._kind, self._name = "call", name

    def _step_body(self, kind: Kind) -> bool:
        position, marker = _first_of(self._text, BODY_ENDS)
        num_ready = position if marker is not None else self._num_ready()
        piece, self._text = self._text[:num_ready], self._text[num_ready:]
        if kind == "call":
            self._body.append(piece)
        else:
            append_text(self._deltas, kind, piece.replace(MESSAGE, "").replace(CONSTRAIN, ""))
        if marker is None:
            return False
        if kind == "call":
            self._close_call()
        self._kind = None
        if marker in (END, CALL, RETURN):
            self._text = self._text[len(marker) :]
        return True

    def _num_ready(self) -> int:
        """How much of the text holds surely no part of a marker."""
        if self._is_final and not self._is_cut:
            return len(self._text)
        start = self._text.rfind("<")
        is_part = start >= 0 and any(marker.startswith(self._text[start:]) for marker in MARKUP)
        return start if is_part else len(self._text)

    def _close_call(self) -> None:
        """The body of a call has ended: deliver it if it is one, else it is content."""
        body = "".join(self._body)
        arguments = read_object(body) if body.strip() else "{}"
        self._kind = None
        is_whole = arguments is not None and bool(body.strip() or not self._is_cut)
        if self._hides_calls or (self._is_cut and self._is_final and not is_whole):
            return  # not allowed, or cut by the length limit
        if arguments is None:
            append_text(self._deltas, "content", body)
            return
        append_text(self._deltas, "tool_call", self._name, self.num_calls)
        append_text(self._deltas, "arguments", arguments, self.num_calls)
        self.num_calls += 1
        self.num_unknown_tools += self._name not in (self._tool_names or ())


def _without_header(text: str) -> str:
    """What is left of a header that leads to no body: text of its own, if it is not only the header's parts."""
    rest = re.sub(r"<\|start\|>\s*assistant|<\|channel\|>\s*\w*|<\|constrain\|>\s*\w*", "", text)
    for marker in MARKUP:
        rest = rest.replace(marker, "")
    return rest if RECIPIENT.sub("", rest).strip() else ""


def _first_of(text: str, markers: tuple[str, ...]) -> tuple[int, str | None]:
    best: tuple[int, str | None] = (-1, None)
    for marker in markers:
        position = text.find(marker)
        if position >= 0 and (best[1] is None or position < best[0]):
            best = (position, marker)
    return best
