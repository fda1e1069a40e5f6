"""Stored responses, conversations and the registry of tagged conversations: SQLite by default, Redis when given."""

from __future__ import annotations

from pathlib import Path

from turnkeep.server.stores.redis_store import RedisStore
from turnkeep.server.stores.sqlite_store import SqliteStore
from turnkeep.server.stores.store import (
    ConversationLockedError,
    Item,
    Store,
    StoreBounds,
    StoredConversation,
    StoreDownError,
    StoredResponse,
    StoreOpenError,
    UnknownConversationError,
)

__all__ = [
    "ConversationLockedError",
    "Item",
    "RedisStore",
    "SqliteStore",
    "Store",
    "StoreBounds",
    "StoreDownError",
    "StoreOpenError",
    "StoredConversation",
    "StoredResponse",
    "UnknownConversationError",
    "make_store",
]


def make_store(state_dir: str | None, redis_url: str | None) -> Store:
    """The store that the settings ask for; without any, one in memory. Raises StoreOpenError for an unusable URL."""
    if redis_url is not None:
        try:
            return RedisStore(redis_url)
        except ValueError as error:
            raise StoreOpenError(0, f"the Redis URL cannot be used: {error}") from None
    return SqliteStore(Path(state_dir) if state_dir is not None else None)
