"""What a scripted engine reads of a prompt: the last user or tool message and the tools, from token ids alone.

Prompts are cut at the control tokens that open messages, by id: text that merely spells such a token is text.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

THINK, THINK_END = "<think>", "</think>"
TOOL_ROLES = {"tool": "tool", "ipython": "tool", "function": "tool"}
TOOL_RESULT_MARK = "<tool_response>"  # templates that show results in a message of the user
REMEMBERED_TOOL_TEXTS = 64


@dataclass(frozen=True, slots=True)
class OfferedTool:
    name: str
    parameters: Any


@dataclass(frozen=True, slots=True)
class PromptView:
    """The last user or tool message. opens_reasoning: the prompt ends inside a reasoning block."""

    role: str
    text: str
    tools: tuple[OfferedTool, ...]
    opens_reasoning: bool


@dataclass(frozen=True, slots=True)
class _Segment:
    role: str
    start: int  # of its text, in tokens
    end: int


class PromptReader:
    """Reads prompts of one tokenizer: <|user|>-like tokens, <|im_start|> or <|start_header_id|> headers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._roles = {added[f"<|{role}|>"]: role for role in _ROLES if f"<|{role}|>" in added}
        self._header = next((added[name] for name in _HEADERS if name in added), None)
        self._header_end = added.get("<|end_header_id|>")
        self._ends = np.array([added[name] for name in _ENDS if name in added], dtype=np.int32)
        opening = [*self._roles, *([] if self._header is None else [self._header])]
        self._opening = np.array(opening, dtype=np.int32)
        self._tools: OrderedDict[bytes, tuple[OfferedTool, ...]] = OrderedDict()

    def read(self, prompt_ids: npt.NDArray[np.int32]) -> PromptView:
        """A prompt that has no such tokens is one message of the user, without tools."""
        tail = self._decode(prompt_ids[-8:]).rstrip()
        opens_reasoning = tail.endswith(THINK)
        segments = self._segments(prompt_ids)
        spoken = [one for one in segments if one.role in ("user", "tool")]
        if not spoken:
            return PromptView("user", self._decode(prompt_ids), (), opens_reasoning)
        last = spoken[-1]
        text = self._decode(prompt_ids[last.start : last.end]).strip("\n")
        role = "tool" if last.role == "tool" or text.lstrip().startswith(TOOL_RESULT_MARK) else "user"
        return PromptView(role, text, self._offered(prompt_ids[: spoken[0].start]), opens_reasoning)

    def _segments(self, ids: npt.NDArray[np.int32]) -> list[_Segment]:
        starts = np.flatnonzero(np.isin(ids, self._opening)).tolist()
        ends = np.flatnonzero(np.isin(ids, self._ends))
        segments = []
        for index, position in enumerate(starts):
            following = starts[index + 1] if index + 1 < len(starts) else len(ids)
            role = self._roles.get(int(ids[position]))
            start = position + 1
            if role is None:
                role, start = self._read_header(ids, start, following)
            behind = int(np.searchsorted(ends, start))
            end = min(int(ends[behind]), following) if behind < len(ends) else following
            segments.append(_Segment(TOOL_ROLES.get(role, role), start, end))
        return segments

    def _read_header(self, ids: npt.NDArray[np.int32], start: int, limit: int) -> tuple[str, int]:
        """The role that a header spells, and where the text behind it starts."""
        name = ""
        for position in range(start, min(limit, start + 16)):
            if ids[position] == self._header_end:
                return name.strip(), position + 1
            name += self._decode(ids[position : position + 1])
            if self._header_end is None and "\n" in name:
                return name.partition("\n")[0].strip(), position + 1
        return name.strip(), min(limit, start + 16)

    def _offered(self, ids: npt.NDArray[np.int32]) -> tuple[OfferedTool, ...]:
        key = ids.tobytes()
        found = self._tools.get(key)
        if found is None:
            found = self._tools[key] = tools_in(self._decode(ids))
            if len(self._tools) > REMEMBERED_TOOL_TEXTS:
                self._tools.popitem(last=False)
        return found

    def _decode(self, ids: npt.NDArray[np.int32]) -> str:
        text: str = self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        return text


_ROLES = ("system", "user", "assistant", "tool")
_HEADERS = ("<|im_start|>", "<|start_header_id|>")
_ENDS = ("<|end|>", "<|im_end|>", "<|eot_id|>")


def tools_in(text: str) -> tuple[OfferedTool, ...]:
    """The tools that a system text lists, each as a JSON object that starts a line."""
    start = max(text.rfind("<tools>"), text.rfind("\nTools:"), 0)
    decoder = json.JSONDecoder()
    tools = []
    position = text.find("{", start)
    while position >= 0:
        end = position + 1
        if position == 0 or text[position - 1] in "\n>":
            try:
                value, end = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                value = None
            tool = value.get("function", value) if isinstance(value, dict) else None
            if isinstance(tool, dict) and isinstance(tool.get("name"), str):
                tools.append(OfferedTool(tool["name"], tool.get("parameters")))
        position = text.find("{", end)
    return tuple(tools)
