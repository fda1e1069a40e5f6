"""Pieces of an answer and their sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

DeltaKind = Literal["content", "reasoning", "tool_call", "arguments"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer. tool_call begins call number `index`, with its name as text and the id, if any, that the
    model gave it; `arguments` continues it.

    The arguments of one call, joined, are the JSON text of an object.
    """

    kind: DeltaKind
    text: str
    index: int = 0
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. content is None when there are only tool calls; tool_calls are (name, arguments)."""

    content: str | None
    reasoning: str | None
    tool_calls: list[tuple[str, str]]

    def message(self, call_ids: Sequence[str] = ()) -> dict[str, Any]:
        """The assistant message as the API returns it and clients send it back. call_ids: one for each call."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, (name, arguments) in zip(call_ids, self.tool_calls, strict=True)
            ]
        return message


def append_text(deltas: list[Delta], kind: DeltaKind, text: str, index: int = 0) -> None:
    """Add a piece of text, if there is any; content and reasoning go on in the last delta of their kind."""
    if not text:
        return
    last = deltas[-1] if deltas else None
    if last is not None and last.kind == kind and kind in ("content", "reasoning"):
        deltas[-1] = Delta(kind, last.text + text)
    else:
        deltas.append(Delta(kind, text, index))


def collect(deltas: Iterable[Delta]) -> Answer:
    """The answer that deltas add up to."""
    content: list[str] = []
    reasoning: list[str] = []
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.kind == "content":
            content.append(delta.text)
        elif delta.kind == "reasoning":
            reasoning.append(delta.text)
        elif delta.kind == "tool_call":
            names[delta.index] = delta.text
        else:
            arguments.setdefault(delta.index, []).append(delta.text)
    calls = [(name, "".join(arguments.get(index, ()))) for index, name in sorted(names.items())]
    text = "".join(content)
    return Answer(text if text or not calls else None, "".join(reasoning) or None, calls)
