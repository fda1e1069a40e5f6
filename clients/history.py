"""What a conversation has said: append-only, kept exactly as it was received, and able to become a JSON text.

Pure. The canonical form of a message is that of Chat Completions; what the Responses API returned for a turn is kept
beside it, item by item, so that either API can be sent the history byte for byte.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from turnkeep.clients.errors import PrefixBroken
from turnkeep.clients.turn import Turn, TurnStats

FORMAT = 1

Message = dict[str, Any]


@dataclass(slots=True)
class TurnRecord:
    """One turn: messages[start:end] are what was sent, messages[end] is the answer.

    items: the answer as the Responses API gave it; response_id: where a server may be asked to go on from.
    """

    start: int
    end: int
    response_id: str | None = None
    items: list[dict[str, Any]] | None = None
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class History:
    """Messages and turns of one conversation. `system` and `tools` stand before them in every prompt."""

    system: str | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[TurnRecord] = field(default_factory=list)
    _sent: list[str] = field(default_factory=list)  # digests of what the last request held, in order

    @property
    def last_response_id(self) -> str | None:
        """The response that the next one may continue; None when the newest turn was not stored."""
        return self.turns[-1].response_id if self.turns else None

    def add_turn(self, sent: list[Message], turn: Turn, items: list[dict[str, Any]] | None) -> None:
        """A turn that is complete."""
        start = len(self.messages)
        self.messages.extend(copy.deepcopy(sent))
        self.messages.append(answer_message(turn))
        self.turns.append(
            TurnRecord(start, start + len(sent), turn.response_id, copy.deepcopy(items), stats=asdict(turn.stats))
        )
        self._sent = self.digests(())

    def pending_calls(self) -> list[str]:
        """Ids of the newest answer's tool calls, which want results before anything else is said."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return []
        return [call["id"] for call in self.messages[-1].get("tool_calls", ())]

    def digests(self, new: list[Message] | tuple[Message, ...]) -> list[str]:
        """One digest for the tools, one for the system text and one a message, as a request would hold them."""
        parts = [self.tools, self.system, *self.messages, *new]
        return [hashlib.sha256(_canonical(part)).hexdigest() for part in parts]

    def check_extends(self, new: list[Message]) -> None:
        """Raises PrefixBroken unless a request with `new` begins with everything the last one held."""
        digests = self.digests(new)
        for index, sent in enumerate(self._sent):
            if index >= len(digests) or digests[index] != sent:
                raise PrefixBroken(("tools", "system")[index] if index < 2 else f"message {index - 2}")

    def accept_break(self) -> None:
        """What the conversation holds now is what coming requests are compared with."""
        self._sent = self.digests(())

    def rewind(self, num_turns: int) -> None:
        """Forget the newest turns. Raises ValueError for more than there are."""
        if not 0 <= num_turns <= len(self.turns):
            raise ValueError(f"cannot go back {num_turns} turns: the conversation has {len(self.turns)}")
        if num_turns:
            self.messages = self.messages[: self.turns[-num_turns].start]
            del self.turns[-num_turns:]
            self.accept_break()

    def replace(self, messages: list[Message]) -> None:
        """Start over from `messages` (a compacted history)."""
        self.messages = copy.deepcopy(messages)
        self.turns = []
        self.accept_break()

    def fork(self) -> History:
        """An independent copy."""
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return {
            "format": FORMAT,
            "system": self.system,
            "tools": copy.deepcopy(self.tools),
            "messages": copy.deepcopy(self.messages),
            "turns": [asdict(turn) for turn in self.turns],
            "sent": list(self._sent),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> History:
        """What to_dict gave. Raises ValueError for anything else, PrefixBroken when a message was altered since."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("this is not a saved conversation, or of a version that this one cannot read")
        try:
            turns = [TurnRecord(**turn) for turn in data["turns"]]
            history = cls(data["system"], data["tools"], data["messages"], turns, list(data["sent"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the saved conversation is damaged: {error!r}") from None
        history.check_extends([])
        return history


def sendable(text: Any) -> Any:
    """A text that UTF-8 can hold: a lone surrogate (file names and cut strings have them) becomes U+FFFD."""
    if not isinstance(text, str):
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def answer_message(turn: Turn) -> Message:
    """An answer as the message that goes back: reasoning and arguments byte for byte."""
    message: Message = {"role": "assistant", "content": turn.text}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    return message


def stats_of(record: TurnRecord) -> TurnStats:
    """The statistics of a turn of the history. A file of another version may have more or fewer of them."""
    values = {one.name: record.stats[one.name] for one in fields(TurnStats) if one.name in record.stats}
    return TurnStats(**{**values, "accepted_by_depth": tuple(values.get("accepted_by_depth", ()))})


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
