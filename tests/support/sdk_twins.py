"""The sync and the async SDK behind one face, so that every test runs on both."""

from __future__ import annotations

import asyncio
from typing import Any

from turnkeep.clients.agent import run_agent, run_agent_async
from turnkeep.clients.async_conversation import AsyncConversation
from turnkeep.clients.client import AsyncTurnkeep, Turnkeep
from turnkeep.clients.conversation import Conversation


class Twin:
    """One of the two. Methods of clients and conversations are called through `call`."""

    def __init__(self, kind: str) -> None:
        self.is_async = kind == "async"
        self._made: list[Any] = []

    def client(self, url: str, **options: Any) -> Any:
        kind = AsyncTurnkeep if self.is_async else Turnkeep
        return self.keep(kind(base_url=f"{url}/v1", **options))

    def keep(self, closable: Any) -> Any:
        """Close it at the end of the test."""
        self._made.append(closable)
        return closable

    async def close(self) -> None:
        for closable in reversed(self._made):
            await self.call(closable.close)

    async def call(self, method: Any, *args: Any, **options: Any) -> Any:
        result = await method(*args, **options) if self.is_async else await asyncio.to_thread(method, *args, **options)
        if isinstance(result, AsyncConversation | Conversation):
            self.keep(result)
        return result

    async def run_agent(self, conversation: Any, text: str, **options: Any) -> Any:
        if self.is_async:
            return await run_agent_async(conversation, text, **options)
        return await asyncio.to_thread(run_agent, conversation, text, **options)

    async def events(self, stream: Any, limit: int | None = None) -> list[Any]:
        """The events of a stream, at most `limit`; then it is closed."""
        if self.is_async:
            found = []
            async with stream as events:
                async for event in events:
                    found.append(event)
                    if len(found) == limit:
                        break
            return found
        return await asyncio.to_thread(_read, stream, limit)


def _read(stream: Any, limit: int | None) -> list[Any]:
    found = []
    with stream as events:
        for event in events:
            found.append(event)
            if len(found) == limit:
                break
    return found
