"""The clients: those of the openai package, on which every call of it still works, with conversations on top."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import openai

from turnkeep.clients.async_conversation import AsyncConversation
from turnkeep.clients.conversation import Conversation
from turnkeep.clients.conversation_state import OnPrefixBreak
from turnkeep.clients.history import History
from turnkeep.clients.retry import RetryPolicy
from turnkeep.clients.tools import Toolish, ToolSet
from turnkeep.clients.turn_driver import Transport

DEFAULT_URL = "http://127.0.0.1:8000/v1"
# Reading waits long: a long prompt has to be computed before the first token.
DEFAULT_TIMEOUT = openai.Timeout(600.0, connect=5.0)


class Turnkeep(openai.OpenAI):
    """`openai.OpenAI` with the bundled server's address as default (or TURNKEEP_BASE_URL), and conversations."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, **options: Any) -> None:
        super().__init__(**_settings(base_url, api_key, options))

    def conversation(
        self,
        *,
        model: str | None = None,
        system: str | None = None,
        tools: Iterable[Toolish] | ToolSet | None = None,
        conversation_id: str | None = None,
        transport: Transport | None = None,
        on_prefix_break: OnPrefixBreak = "raise",
        retries: RetryPolicy | None = None,
    ) -> Conversation:
        """A new conversation. model None: the server's first; transport None: the best that the server offers.

        Raises InvalidTool, and openai.APIError where the server has to be asked and cannot be.
        """
        return Conversation(
            self,
            model=model if model is not None else self.models.list().data[0].id,
            system=system,
            tools=ToolSet.of(tools),
            conversation_id=conversation_id,
            transport=transport,
            on_prefix_break=on_prefix_break,
            retries=retries,
        )

    def load_conversation(self, saved: str, *, tools: Iterable[Toolish] | ToolSet | None = None) -> Conversation:
        """Go on with what `Conversation.to_json` saved. tools: the functions, where it had some.

        Raises ValueError for a damaged text, PrefixBroken for one that was altered, or for other tools.
        """
        return Conversation(self, **_saved_state(saved, tools))


class AsyncTurnkeep(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI`, likewise."""

    def __init__(self, base_url: str | None = None, api_key: str | None = None, **options: Any) -> None:
        super().__init__(**_settings(base_url, api_key, options))

    async def conversation(
        self,
        *,
        model: str | None = None,
        system: str | None = None,
        tools: Iterable[Toolish] | ToolSet | None = None,
        conversation_id: str | None = None,
        transport: Transport | None = None,
        on_prefix_break: OnPrefixBreak = "raise",
        retries: RetryPolicy | None = None,
    ) -> AsyncConversation:
        """See `Turnkeep.conversation`."""
        return AsyncConversation(
            self,
            model=model if model is not None else (await self.models.list()).data[0].id,
            system=system,
            tools=ToolSet.of(tools),
            conversation_id=conversation_id,
            transport=transport,
            on_prefix_break=on_prefix_break,
            retries=retries,
        )

    def load_conversation(self, saved: str, *, tools: Iterable[Toolish] | ToolSet | None = None) -> AsyncConversation:
        """See `Turnkeep.load_conversation`."""
        return AsyncConversation(self, **_saved_state(saved, tools))


def _settings(base_url: str | None, api_key: str | None, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "base_url": base_url or os.environ.get("TURNKEEP_BASE_URL") or DEFAULT_URL,
        "api_key": api_key or os.environ.get("TURNKEEP_API_KEY") or "none",
        "timeout": DEFAULT_TIMEOUT,
        **options,
    }


def _saved_state(saved: str, tools: Iterable[Toolish] | ToolSet | None) -> dict[str, Any]:
    try:
        data = json.loads(saved)
        history = History.from_dict(data["history"])
        state = {name: data[name] for name in ("model", "conversation_id", "parent_id")}
        base_system = data["base_system"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"this is not a saved conversation: {error}") from None
    tool_set = ToolSet.of(history.tools if tools is None else tools)
    history.tools = tool_set.specifications()
    history.check_extends([])
    return {**state, "system": base_system, "tools": tool_set, "history": history}
