"""A scripted conversation in OpenAI message form: user messages and what the agent is expected to do with them.

Plain data. Knows nothing about how conversations are written, rendered or scored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """A call that the agent is expected to make: tool name and arguments, in schema order."""

    name: str
    arguments: dict[str, Any]


@dataclass
class Turn:
    """One user message and everything the agent is expected to do until its final answer.

    `messages` are the assistant and tool messages (reasoning in `reasoning_content`). `expected_facts` are
    strings that the final answer has to contain. `told_turns_ago` and `mentioned_turns_ago` are set where the turn
    needs a fact told earlier: turns since it was told and since it was last said by anyone.
    """

    index: int
    kind: str
    user: str
    messages: list[Message] = field(default_factory=list)
    expected_calls: list[ToolCall] = field(default_factory=list)
    expected_facts: list[str] = field(default_factory=list)
    told_turns_ago: int | None = None
    mentioned_turns_ago: int | None = None

    @property
    def answer(self) -> str:
        """The expected final answer."""
        return str(self.messages[-1]["content"])


@dataclass
class Conversation:
    """A whole scripted conversation. A live run needs `OrderDesk(seed)` for its tool results to agree."""

    seed: int
    system: str | None
    tools: list[dict[str, Any]] | None
    turns: list[Turn]

    def messages(self, num_turns: int | None = None) -> list[Message]:
        """OpenAI messages of the first `num_turns` turns (all by default), the system message included."""
        result: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns[:num_turns]:
            result.append({"role": "user", "content": turn.user})
            result.extend(turn.messages)
        return result
