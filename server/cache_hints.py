"""What clients say about caching: which places of a prompt later prompts will repeat, and for how long to keep them.

Hints steer what is kept, never what a prompt says or what is reused. What cannot be read is passed over: a hint must
not cost an answer. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnkeep.server.chat_messages import part_text

if TYPE_CHECKING:
    from turnkeep.server.chat_completions import ChatCompletionRequest

MAX_MARKS = 4  # the newest ones count, as with OpenAI and Anthropic
MAX_RETENTION_S = 86400.0
MARK_FIELDS = ("prompt_cache_breakpoint", "cache_control")  # OpenAI's and Anthropic's word for the same
DURATION = re.compile(r"([0-9]{1,6})([smhd])")
UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A place in a conversation: behind so many characters of a message's content, or behind the whole message
    (None)."""

    message: int
    num_chars: int | None = None


def cache_marks(messages: Sequence[Mapping[str, Any]]) -> tuple[CacheMark, ...]:
    """The newest marks of checked messages, in order: on a message, or on a text part of its content."""
    marks: dict[CacheMark, None] = {}
    for index, message in enumerate(messages):
        marks.update((CacheMark(index, end), None) for end in _marked_ends(message))
    return tuple(marks)[-MAX_MARKS:]


def _marked_ends(message: Mapping[str, Any]) -> Iterator[int | None]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    num_chars = 0
    for number, part in enumerate(parts, 1):
        num_chars += len(part_text(part, "content"))
        if _mark_of(part) is not None:
            # What an agent wrote is more than its content, and is repeated as a whole.
            is_whole = number == len(parts) or message["role"] == "assistant"
            yield None if is_whole else num_chars
    if _mark_of(message) is not None:
        yield None


def _mark_of(value: object) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    return next((value[name] for name in MARK_FIELDS if isinstance(value.get(name), Mapping)), None)


def retention_s(request: ChatCompletionRequest) -> float:
    """Seconds for which the client asks to keep what the request leaves: the longest of what it says, at most a day.
    0: it says nothing."""
    wishes = [_duration_s(request.prompt_cache_retention)]
    if isinstance(request.prompt_cache_options, Mapping):
        wishes.append(_duration_s(request.prompt_cache_options.get("ttl")))
    tools = request.tools if isinstance(request.tools, list) else []
    contents = (message.get("content") for message in request.messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    for marked in (*request.messages, *parts, *tools):
        mark = _mark_of(marked)
        if mark is not None:
            wishes.append(_duration_s(mark.get("ttl")))
    return min(max(wishes), MAX_RETENTION_S)


def _duration_s(value: object) -> float:
    """Seconds of "5m", "24h" and their like; 0 for anything else ("in_memory" asks for nothing)."""
    found = DURATION.fullmatch(value) if isinstance(value, str) else None
    return float(found[1]) * UNIT_S[found[2]] if found else 0.0
