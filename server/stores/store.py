"""What the server keeps beyond one request: stored responses, conversations with their items, and when a tagged
conversation began. The interface and its records; sqlite_store.py and redis_store.py implement it.

Everything lies under a tenant: an id of another tenant is an id that does not exist. Items are plain JSON objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

Item = dict[str, Any]

DAY_S = 86400.0
MAX_CHAIN_LENGTH = 4096  # turns that one response can be reached over by previous_response_id


class StoreDownError(Exception):
    """The store cannot be reached or cannot write. It may be well again at the next call."""


class StoreOpenError(OSError):
    """The store cannot be used at all; the message says what to do."""

    def __str__(self) -> str:
        return str(self.strerror or super().__str__())


class UnknownConversationError(Exception):
    """There is no conversation of this id."""


class ConversationLockedError(Exception):
    """Another turn of the conversation runs."""


@dataclass(frozen=True, slots=True)
class StoreBounds:
    """When something is forgotten: after ttl_s without use, or earlier, least recently used first, beyond a limit."""

    max_responses: int = 200_000
    max_conversations: int = 50_000
    max_bytes: int = 4 * 2**30  # of stored responses, and as much of items
    ttl_s: float = 30 * DAY_S
    registry_ttl_s: float = DAY_S


class StoredResponse(msgspec.Struct, kw_only=True):
    """One turn. `body` is the response object as clients see it; its `output` and `input_items` are what this turn
    added to the conversation. tag: the conversation id that steers retention, for the next turn of the chain.

    lease_until_s: while a response runs in the background, the time after which its server must be taken for dead.
    """

    id: str
    created_s: float
    status: str
    is_background: bool = False
    previous_id: str | None = None
    conversation_id: str | None = None
    tag: str | None = None
    lease_until_s: float = 0.0
    input_items: list[Item]
    body: dict[str, Any]

    @property
    def is_running(self) -> bool:
        return self.status in ("queued", "in_progress")

    @property
    def output(self) -> list[Item]:
        output: list[Item] = self.body["output"]
        return output


class StoredConversation(msgspec.Struct, kw_only=True):
    id: str
    created_s: float
    metadata: dict[str, str]


class Store(Protocol):
    """Every method may raise StoreDownError. Writes are atomic: done as a whole or not at all."""

    async def open(self) -> None:
        """Before anything else. Raises StoreOpenError when it can never work."""

    async def close(self) -> None:
        """Idempotent."""

    async def check(self) -> None:
        """Raises StoreDownError when nothing could be written now."""

    async def put_response(self, tenant: str, response: StoredResponse) -> None:
        """Store or replace."""

    async def replace_running(self, tenant: str, response: StoredResponse) -> bool:
        """Replace the stored response if it is there and still runs. False: it was cancelled or deleted meanwhile."""

    async def find_response(self, tenant: str, response_id: str) -> StoredResponse | None: ...

    async def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        """The response and all it continues, oldest first; reading it counts as use. Empty when one of them is gone."""

    async def delete_response(self, tenant: str, response_id: str) -> bool: ...

    async def create_conversation(
        self, tenant: str, conversation: StoredConversation, items: Sequence[Item]
    ) -> None: ...

    async def find_conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None: ...

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: dict[str, str]
    ) -> StoredConversation | None:
        """The conversation as it is then; None when there is none."""

    async def delete_conversation(self, tenant: str, conversation_id: str) -> bool:
        """With its items."""

    async def items(self, tenant: str, conversation_id: str) -> list[Item]:
        """All items, oldest first. Raises UnknownConversationError."""

    async def append_items(self, tenant: str, conversation_id: str, items: Sequence[Item], *, lock: str | None) -> None:
        """All of them or none. lock: the token of the turn that appends; None: only while no turn runs.

        Raises UnknownConversationError, ConversationLockedError.
        """

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> bool: ...

    async def lock_conversation(self, tenant: str, conversation_id: str, token: str, lease_s: float) -> None:
        """Take (or with the same token prolong) the right to be the one turn that runs.

        Raises UnknownConversationError, ConversationLockedError. The lock ends by itself after lease_s.
        """

    async def unlock_conversation(self, tenant: str, conversation_id: str, token: str) -> None:
        """Nothing happens when the token does not hold the lock."""

    async def register(self, root: str, conversation_id: str, now_s: float) -> float:
        """When the tagged conversation was first seen by any server; now_s when this is the first time."""
