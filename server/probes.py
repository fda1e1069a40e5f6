"""Messages that might come next in a conversation, and short stand-ins for long conversations.

Boundaries are found by rendering these; what they contain is chosen to be hostile to templates and tokenizers: empty,
blank, starting with line breaks, digits, JSON, combining characters. Pure data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnkeep.server.chat_messages import Message

MAX_WHOLE_TURN = 8  # messages; longer turns are shortened to their user message and their last rounds
KEPT_TAIL = 6


@dataclass(frozen=True, slots=True)
class Probe:
    """A continuation with a name for statistics."""

    name: str
    messages: tuple[Message, ...]


def _user(content: str = "A") -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str = "", *, reasoning: str | None = None, calls: int = 0) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(index) for index in range(calls)]
    return message


def _call_id(index: int) -> str:
    return f"call{index:05d}"  # some templates take only nine letters and digits


def _call(index: int) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"x": 1}}
    return {"id": _call_id(index), "type": "function", "function": function}


def _tool(index: int = 0, content: str = "A") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": _call_id(index), "name": "look"}


# After the newest user message: the answers an agent might give, each with what follows it.
ANSWER_PROBES: tuple[Probe, ...] = (
    Probe("answer", (_assistant("A"), _user())),
    Probe("reasoned answer", (_assistant("A", reasoning="R"), _user())),
    Probe("tool call", (_assistant(calls=1), _tool())),
    Probe("reasoned tool call", (_assistant(reasoning="\n R", calls=1), _tool())),
    Probe("finished tool loop", (_assistant(reasoning="R", calls=1), _tool(), _assistant("A", reasoning="R"), _user())),
    Probe("empty answer", (_assistant(""), _user())),
    Probe("line break first", (_assistant("\n\n A"), _user("\nA"))),
    Probe("blank ends", (_assistant(" A \n"), _user(" A\r\n"))),
    Probe("json", (_assistant('{"a":1}'), _user("1"))),
    Probe("digits", (_assistant("1"), _user("é"))),
    Probe("markup", (_assistant("<x>"), _user("<x>"))),
    Probe("accent", (_assistant("é"), _user(""))),
    Probe("two calls", (_assistant("A", calls=2), _tool(0), _tool(1, "\nB"))),
    Probe("spoken tool call", (_assistant("A", reasoning="R", calls=1), _tool(), _assistant("B"), _user())),
    Probe("late system", (_assistant("A"), {"role": "system", "content": "S"}, _user())),
)

# After a tool result: what goes on in the same turn.
LOOP_PROBES: tuple[Probe, ...] = (
    Probe("next call", (_assistant(calls=1), _tool())),
    Probe("reasoned next call", (_assistant(reasoning="\n R", calls=1), _tool())),
    Probe("spoken next call", (_assistant("\n\n A", reasoning="R", calls=1), _tool())),
    Probe("two next calls", (_assistant("1", calls=2), _tool(0), _tool(1, "\nB"))),
)

# After the trunk: other conversations that begin alike.
OPENING_PROBES: tuple[Probe, ...] = (
    Probe("letter", (_user("A"),)),
    Probe("line break", (_user("\n\n 1"),)),
    Probe("json", (_user('{"a":1}'),)),
    Probe("second turn", (_user("é"), _assistant("A"), _user("B"))),
)

# In place of the newest user message: what else might have been asked.
FORK_PROBES: tuple[Probe, ...] = tuple(Probe("other", (_user(start),)) for start in ("A", "\n\n {1", "é"))

HOSTILE_STARTS = ("A", "\n\n {1", "")  # contents of the message that is expected after an answer


def continuations(answer: Message) -> list[list[Message]]:
    """What the answer asks for, in variants: a result for each of its tool calls, else a user message."""
    calls = answer.get("tool_calls") or []
    if not calls:
        return [[_user(start)] for start in HOSTILE_STARTS]
    return [[_result(call, start) for call in calls] for start in HOSTILE_STARTS]


def _result(call: dict[str, Any], content: str) -> Message:
    # Without a name: clients send none, and the template must not see one that the next request lacks.
    message: Message = {"role": "tool", "content": content}
    if "id" in call:
        message["tool_call_id"] = call["id"]
    return message


def shorten(messages: Sequence[Message]) -> list[Message]:
    """A short conversation that ends like this one: the leading system messages and the last two turns, each cut down
    to its user message and its last rounds. Whole messages only; a tool result stays with its call."""
    num_leading = count_leading_system(messages)
    users = [i for i in range(num_leading, len(messages)) if messages[i]["role"] == "user"]
    start = users[-2] if len(users) > 2 else num_leading
    turns: list[list[Message]] = []
    for index in range(start, len(messages)):
        if messages[index]["role"] == "user" or not turns:
            turns.append([])
        turns[-1].append(messages[index])
    result = list(messages[:num_leading])
    for turn in turns:
        result += _shorten_turn(turn)
    return result


def _shorten_turn(turn: list[Message]) -> list[Message]:
    if len(turn) <= MAX_WHOLE_TURN or turn[0]["role"] != "user":
        return turn
    for index in range(len(turn) - KEPT_TAIL, len(turn)):
        if turn[index]["role"] == "assistant":
            return [turn[0], *turn[index:]]
    return turn


def count_leading_system(messages: Sequence[Message]) -> int:
    """Number of system messages at the start."""
    for index, message in enumerate(messages):
        if message["role"] != "system":
            return index
    return len(messages)


def find_last_user(messages: Sequence[Message]) -> int | None:
    """Index of the newest user message."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index]["role"] == "user":
            return index
    return None
