"""What a sync and an async conversation share: the history, the settings, the beginning and the end of a turn. Pure."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import getrandbits
from typing import Any, Literal
from urllib.parse import quote

from turnkeep.clients.errors import PrefixBroken, TurnkeepError
from turnkeep.clients.history import History, Message, sendable, stats_of
from turnkeep.clients.options import TurnOptions
from turnkeep.clients.retry import RetryPolicy
from turnkeep.clients.tools import ToolSet
from turnkeep.clients.turn import ToolCall, Turn, TurnStats
from turnkeep.clients.turn_driver import Transport, TurnDriver

OnPrefixBreak = Literal["raise", "warn", "ignore"]
PARENT_HEADER = "X-Parent-Conversation-Id"
FINAL_HEADER = "X-Conversation-Final"
MAX_ID_CHARACTERS = 256

SUMMARY_HEADING = "Summary of the conversation so far:"
SUMMARY_TASK = (
    "Write a summary of this conversation from which it can be continued without its text: what I want, what was found "
    "out, what was done, what is still to do, and every name, number and identifier that may be needed. Write only it."
)


class ConversationState:
    """Settings and history; `transport` None: not yet known, the first turn finds out."""

    def __init__(
        self,
        *,
        model: str,
        system: str | None = None,
        tools: ToolSet | None = None,
        conversation_id: str | None = None,
        parent_id: str | None = None,
        transport: Transport | None = None,
        on_prefix_break: OnPrefixBreak = "raise",
        retries: RetryPolicy | None = None,
        history: History | None = None,
    ) -> None:
        self.model = model
        self.conversation_id = _checked_id(conversation_id or f"conv-{uuid.uuid4().hex}")
        self.parent_id = parent_id
        self.tools = tools or ToolSet(())
        self.transport: Transport | None = transport
        self.retries = retries or RetryPolicy()
        self._on_prefix_break: OnPrefixBreak = on_prefix_break
        self._history = history if history is not None else History(sendable(system), self.tools.specifications())
        self._base_system = sendable(system)
        self._knows_server = False
        self._has_extensions = False
        self._is_busy = False
        self._is_closed = False

    @property
    def _cache_path(self) -> str:
        """Of the server's report about this conversation."""
        return f"/conversations/{quote(self.conversation_id, safe='')}/cache"

    @property
    def messages(self) -> list[Message]:
        """A copy of all messages so far, in the form of Chat Completions."""
        return self._history.fork().messages

    @property
    def system(self) -> str | None:
        """The system text as it is sent."""
        return self._history.system

    @property
    def num_turns(self) -> int:
        """Complete turns, tool results counted as turns of their own."""
        return len(self._history.turns)

    @property
    def stats(self) -> list[TurnStats]:
        """What every turn has cost, oldest first."""
        return [stats_of(turn) for turn in self._history.turns]

    def rewind(self, num_turns: int = 1) -> None:
        """Forget the newest turns, so that another one takes their place. Raises ValueError for more than there are."""
        self._require_idle()
        self._history.rewind(num_turns)

    def to_json(self) -> str:
        """Everything needed to go on in another process (functions of tools are named, not saved)."""
        self._require_idle()
        return json.dumps(
            {
                "conversation_id": self.conversation_id,
                "parent_id": self.parent_id,
                "model": self.model,
                "base_system": self._base_system,
                "history": self._history.to_dict(),
            },
            ensure_ascii=False,
        )

    def _new_state(self, name: str | None) -> dict[str, Any]:
        """Arguments for a conversation that starts as a copy of this one."""
        self._require_idle()
        return {
            "model": self.model,
            "system": self._base_system,
            "tools": self.tools,
            "conversation_id": _child_id(self.conversation_id, name),
            "parent_id": self.conversation_id,
            "transport": self.transport,
            "on_prefix_break": self._on_prefix_break,
            "retries": self.retries,
            "history": self._history.fork(),
        }

    def _sub_agent_state(self, name: str, system: str | None, tools: ToolSet | None) -> dict[str, Any]:
        """Arguments for a conversation of its own that counts as a child of this one."""
        state = self._new_state(name)
        tools = tools if tools is not None else self.tools
        history = History(sendable(system) if system is not None else self._base_system, tools.specifications())
        return {**state, "system": history.system, "tools": tools, "history": history}

    def _start_turn(self, new: list[Message], options: TurnOptions, clock: Callable[[], float]) -> TurnDriver:
        """Raises PrefixBroken, or RuntimeError while another turn is running or after close()."""
        self._require_idle()
        self._history.tools = self.tools.specifications()
        try:
            self._history.check_extends(new)
        except PrefixBroken as broken:
            if self._on_prefix_break == "raise":
                raise
            if self._on_prefix_break == "warn":
                warnings.warn(str(broken), stacklevel=4)
            self._history.accept_break()
        if options.seed is None and self._has_extensions:
            # A repetition of a turn that broke off then samples the same tokens again.
            options = options.with_seed(getrandbits(31))
        self._is_busy = True
        return TurnDriver(
            self._history,
            new,
            options,
            model=self.model,
            transport=self.transport or "chat",
            headers=self._headers(),
            extra=self._extra_fields(),
            retries=self.retries,
            clock=clock,
        )

    def _finish_turn(self, driver: TurnDriver) -> Turn:
        turn = driver.turn()
        self.transport = driver.lasting_transport
        self._history.add_turn(driver.new, turn, driver.items)
        return turn

    def _note_server(self, models: Iterable[Any], *, has_websockets: bool) -> None:
        """Choose the transport by what kind of server it is. Any but ours is used by what all servers have."""
        self._knows_server = True
        self._has_extensions = any(getattr(model, "owned_by", None) == "turnkeep" for model in models)
        if self.transport is None:
            best: Transport = "websocket" if has_websockets else "responses"
            self.transport = best if self._has_extensions else "chat"

    def _headers(self) -> dict[str, str]:
        headers = {"X-Conversation-Id": self.conversation_id}
        if self.parent_id is not None:
            headers[PARENT_HEADER] = self.parent_id
        return headers

    def _extra_fields(self) -> dict[str, Any]:
        return {"prompt_cache_key": self.conversation_id}

    def _prompt_messages(self, new: list[Message]) -> list[Message]:
        first = [] if self._history.system is None else [{"role": "system", "content": self._history.system}]
        return [*first, *self._history.messages, *new]

    def _user_message(self, text: str) -> list[Message]:
        """Raises ValueError while tool calls wait for their results."""
        pending = self._history.pending_calls()
        if pending:
            raise ValueError(f"the last answer called tools: submit the results of {', '.join(pending)} first")
        return [{"role": "user", "content": sendable(text)}]

    def _result_messages(self, results: Mapping[str, str]) -> list[Message]:
        """One message a call, in the order of the calls. Raises ValueError for missing or unknown ids."""
        pending = self._history.pending_calls()
        missing = [call_id for call_id in pending if call_id not in results]
        unknown = [call_id for call_id in results if call_id not in pending]
        if missing or unknown or not pending:
            raise ValueError(f"tool results: missing {missing}, unknown {unknown}, expected {pending}")
        return [{"role": "tool", "tool_call_id": call_id, "content": sendable(results[call_id])} for call_id in pending]

    def _use_summary(self, summary: str) -> None:
        """The summary takes the place of all messages, behind the system text: every template can show it there.

        Raises TurnkeepError for an empty one, which would forget everything.
        """
        if not summary.strip():
            raise TurnkeepError("the model wrote no summary (max_tokens too small?); the conversation is as before")
        parts = [part for part in (self._base_system, f"{SUMMARY_HEADING}\n\n{summary.strip()}") if part]
        self._history.system = "\n\n".join(parts)
        self._history.replace([])

    def _require_idle(self) -> None:
        if self._is_closed:
            raise RuntimeError("this conversation is closed")
        if self._is_busy:
            raise RuntimeError("a turn of this conversation is still running")


def results_by_call(calls: Sequence[ToolCall], outputs: Iterable[str]) -> dict[str, str]:
    """Call id -> output, for submit_tool_results."""
    return {call.id: output for call, output in zip(calls, outputs, strict=True)}


def _checked_id(conversation_id: str) -> str:
    """What a header can hold and the server takes for an id; it would pass over any other. Raises ValueError."""
    fits = conversation_id.isascii() and conversation_id.isprintable() and len(conversation_id) <= MAX_ID_CHARACTERS
    is_path = "/" in conversation_id or "\\" in conversation_id or conversation_id in (".", "..")
    if not fits or is_path or conversation_id != conversation_id.strip():
        raise ValueError(
            f"a conversation's id is at most {MAX_ID_CHARACTERS} characters of printable ASCII, without slashes and "
            f"without blanks around it, not {conversation_id!r}"
        )
    return conversation_id


def _child_id(parent: str, name: str | None) -> str:
    return f"{parent[:200]}.{name or uuid.uuid4().hex[:8]}"
