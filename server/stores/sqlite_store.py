"""The store in one SQLite file, or in memory. All statements run in one worker thread, each call one transaction.

Several servers may share the file. It is readable by its owner only.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from turnkeep.server.stores.store import (
    MAX_CHAIN_LENGTH,
    ConversationLockedError,
    Item,
    StoreBounds,
    StoredConversation,
    StoreDownError,
    StoredResponse,
    StoreOpenError,
    UnknownConversationError,
)

T = TypeVar("T")

FILE_NAME = "turnkeep.sqlite3"
SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 5.0
WRITES_PER_TRIM = 64

SCHEMA = """
CREATE TABLE responses (
  tenant TEXT NOT NULL, id TEXT NOT NULL, previous_id TEXT, used_s REAL NOT NULL, is_running INTEGER NOT NULL,
  num_bytes INTEGER NOT NULL, record BLOB NOT NULL, PRIMARY KEY (tenant, id));
CREATE INDEX responses_used ON responses (used_s);
CREATE TABLE conversations (
  tenant TEXT NOT NULL, id TEXT NOT NULL, used_s REAL NOT NULL, num_bytes INTEGER NOT NULL, record BLOB NOT NULL,
  lock_token TEXT, lock_until_s REAL NOT NULL DEFAULT 0, PRIMARY KEY (tenant, id));
CREATE INDEX conversations_used ON conversations (used_s);
CREATE TABLE items (
  position INTEGER PRIMARY KEY AUTOINCREMENT, tenant TEXT NOT NULL, conversation_id TEXT NOT NULL, id TEXT NOT NULL,
  record BLOB NOT NULL, UNIQUE (tenant, conversation_id, id),
  FOREIGN KEY (tenant, conversation_id) REFERENCES conversations (tenant, id) ON DELETE CASCADE);
CREATE INDEX items_of_conversation ON items (tenant, conversation_id, position);
CREATE TABLE registry (
  root TEXT NOT NULL, id TEXT NOT NULL, started_s REAL NOT NULL, used_s REAL NOT NULL, PRIMARY KEY (root, id));
CREATE INDEX registry_used ON registry (used_s);
"""

CHAIN = """
WITH RECURSIVE chain (id, depth) AS (
  SELECT :id, 0 UNION ALL
  SELECT responses.previous_id, depth + 1 FROM chain JOIN responses USING (id)
  WHERE tenant = :tenant AND previous_id IS NOT NULL AND depth < :max_length)
SELECT chain.id, record FROM chain LEFT JOIN responses ON tenant = :tenant AND responses.id = chain.id
ORDER BY depth DESC
"""


class SqliteStore:
    """folder None: in memory, gone with the process. The clock gives Unix seconds."""

    def __init__(
        self, folder: Path | None, *, bounds: StoreBounds | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._bounds = bounds or StoreBounds()
        self._clock = clock
        self._database: sqlite3.Connection | None = None
        self._num_writes = 0
        # One thread: a connection belongs to one, and statements must not take the event loop's time.
        self._worker: ThreadPoolExecutor | None = None

    async def open(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="turnkeep-store")
        try:
            await asyncio.get_running_loop().run_in_executor(self._worker, self._open)
        except BaseException:
            self._worker.shutdown(wait=False)
            self._worker = None
            raise

    async def close(self) -> None:
        if self._worker is None:
            return
        await asyncio.get_running_loop().run_in_executor(self._worker, self._close)
        self._worker.shutdown()
        self._worker = None

    def _open(self) -> None:
        path = ":memory:" if self._folder is None else str(self._folder / FILE_NAME)
        try:
            if self._folder is not None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                # SQLite gives its side files the mode of the main one.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                os.chmod(path, 0o600)
            database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise StoreOpenError(0, f"the state folder {self._folder} cannot be used: {error}") from None
        try:
            _prepare(database)
        except sqlite3.Error as error:
            database.close()
            raise StoreOpenError(0, f"{path} cannot be used as the state file: {error}") from None
        except StoreOpenError:
            database.close()
            raise
        self._database = database
        self._trim()

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    async def check(self) -> None:
        if self._worker is None:
            raise StoreDownError("the store is closed")

    async def put_response(self, tenant: str, response: StoredResponse) -> None:
        record = msgspec.json.encode(response)

        def work(database: sqlite3.Connection) -> None:
            row = (tenant, response.id, response.previous_id, self._clock(), response.is_running, len(record), record)
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        await self._write(work)

    async def replace_running(self, tenant: str, response: StoredResponse) -> bool:
        record = msgspec.json.encode(response)

        def work(database: sqlite3.Connection) -> bool:
            changed = database.execute(
                "UPDATE responses SET used_s = ?, is_running = ?, num_bytes = ?, record = ? "
                "WHERE tenant = ? AND id = ? AND is_running",
                (self._clock(), response.is_running, len(record), record, tenant, response.id),
            )
            return changed.rowcount == 1

        return await self._write(work)

    async def find_response(self, tenant: str, response_id: str) -> StoredResponse | None:
        def work(database: sqlite3.Connection) -> bytes | None:
            oldest_s = self._clock() - self._bounds.ttl_s
            query = "SELECT record FROM responses WHERE tenant = ? AND id = ? AND used_s >= ?"
            row = database.execute(query, (tenant, response_id, oldest_s)).fetchone()
            return None if row is None else row[0]

        record = await self._read(work)
        return None if record is None else msgspec.json.decode(record, type=StoredResponse)

    async def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        def work(database: sqlite3.Connection) -> list[bytes]:
            names = {"id": response_id, "tenant": tenant, "max_length": MAX_CHAIN_LENGTH}
            rows = database.execute(CHAIN, names).fetchall()
            if any(record is None for _, record in rows) or len(rows) > MAX_CHAIN_LENGTH:
                return []
            now_s = self._clock()
            used = [(now_s, tenant, id) for id, _ in rows]
            database.executemany("UPDATE responses SET used_s = ? WHERE tenant = ? AND id = ?", used)
            return [record for _, record in rows]

        return [msgspec.json.decode(record, type=StoredResponse) for record in await self._write(work)]

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        def work(database: sqlite3.Connection) -> bool:
            query = "DELETE FROM responses WHERE tenant = ? AND id = ?"
            return database.execute(query, (tenant, response_id)).rowcount == 1

        return await self._write(work)

    async def create_conversation(self, tenant: str, conversation: StoredConversation, items: Sequence[Item]) -> None:
        record = msgspec.json.encode(conversation)

        def work(database: sqlite3.Connection) -> None:
            database.execute(
                "INSERT INTO conversations (tenant, id, used_s, num_bytes, record) VALUES (?, ?, ?, ?, ?)",
                (tenant, conversation.id, self._clock(), len(record), record),
            )
            self._add_items(database, tenant, conversation.id, items)

        await self._write(work)

    async def find_conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        def work(database: sqlite3.Connection) -> bytes | None:
            query = "SELECT record FROM conversations WHERE tenant = ? AND id = ? AND used_s >= ?"
            row = database.execute(query, (tenant, conversation_id, self._clock() - self._bounds.ttl_s)).fetchone()
            return None if row is None else row[0]

        record = await self._read(work)
        return None if record is None else msgspec.json.decode(record, type=StoredConversation)

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: dict[str, str]
    ) -> StoredConversation | None:
        def work(database: sqlite3.Connection) -> StoredConversation | None:
            query = "SELECT record FROM conversations WHERE tenant = ? AND id = ?"
            row = database.execute(query, (tenant, conversation_id)).fetchone()
            if row is None:
                return None
            conversation = msgspec.json.decode(row[0], type=StoredConversation)
            conversation.metadata = metadata
            database.execute(
                "UPDATE conversations SET record = ?, used_s = ? WHERE tenant = ? AND id = ?",
                (msgspec.json.encode(conversation), self._clock(), tenant, conversation_id),
            )
            return conversation

        return await self._write(work)

    async def delete_conversation(self, tenant: str, conversation_id: str) -> bool:
        def work(database: sqlite3.Connection) -> bool:
            query = "DELETE FROM conversations WHERE tenant = ? AND id = ?"
            return database.execute(query, (tenant, conversation_id)).rowcount == 1

        return await self._write(work)

    async def items(self, tenant: str, conversation_id: str) -> list[Item]:
        def work(database: sqlite3.Connection) -> list[bytes]:
            where = "WHERE tenant = ? AND id = ?"
            used = database.execute(
                f"UPDATE conversations SET used_s = ? {where}", (self._clock(), tenant, conversation_id)
            )
            if used.rowcount == 0:
                raise UnknownConversationError
            query = "SELECT record FROM items WHERE tenant = ? AND conversation_id = ? ORDER BY position"
            return [record for (record,) in database.execute(query, (tenant, conversation_id))]

        return [msgspec.json.decode(record) for record in await self._write(work)]

    async def append_items(self, tenant: str, conversation_id: str, items: Sequence[Item], *, lock: str | None) -> None:
        def work(database: sqlite3.Connection) -> None:
            self._check_lock(database, tenant, conversation_id, lock)
            self._add_items(database, tenant, conversation_id, items)

        await self._write(work)

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> bool:
        def work(database: sqlite3.Connection) -> bool:
            query = "DELETE FROM items WHERE tenant = ? AND conversation_id = ? AND id = ?"
            return database.execute(query, (tenant, conversation_id, item_id)).rowcount == 1

        return await self._write(work)

    async def lock_conversation(self, tenant: str, conversation_id: str, token: str, lease_s: float) -> None:
        def work(database: sqlite3.Connection) -> None:
            self._check_lock(database, tenant, conversation_id, token, may_be_free=True)
            now_s = self._clock()
            database.execute(
                "UPDATE conversations SET lock_token = ?, lock_until_s = ?, used_s = ? WHERE tenant = ? AND id = ?",
                (token, now_s + lease_s, now_s, tenant, conversation_id),
            )

        await self._write(work)

    async def unlock_conversation(self, tenant: str, conversation_id: str, token: str) -> None:
        def work(database: sqlite3.Connection) -> None:
            query = "UPDATE conversations SET lock_token = NULL WHERE tenant = ? AND id = ? AND lock_token = ?"
            database.execute(query, (tenant, conversation_id, token))

        await self._write(work)

    async def register(self, root: str, conversation_id: str, now_s: float) -> float:
        def work(database: sqlite3.Connection) -> float:
            row = database.execute(
                "INSERT INTO registry VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET used_s = excluded.used_s, "
                "started_s = iif(used_s < ?, excluded.started_s, started_s) RETURNING started_s",
                (root, conversation_id, now_s, now_s, now_s - self._bounds.registry_ttl_s),
            ).fetchone()
            return float(row[0])

        return await self._write(work)

    def _check_lock(
        self,
        database: sqlite3.Connection,
        tenant: str,
        conversation_id: str,
        token: str | None,
        *,
        may_be_free: bool = False,
    ) -> None:
        """Raises unless the token holds the lock (without a token, or with may_be_free: unless nobody else does)."""
        query = "SELECT lock_token, lock_until_s FROM conversations WHERE tenant = ? AND id = ?"
        row = database.execute(query, (tenant, conversation_id)).fetchone()
        if row is None:
            raise UnknownConversationError
        holder = row[0] if row[1] > self._clock() else None
        if holder != token and not (holder is None and may_be_free):
            raise ConversationLockedError

    def _add_items(
        self, database: sqlite3.Connection, tenant: str, conversation_id: str, items: Sequence[Item]
    ) -> None:
        rows = [(tenant, conversation_id, item["id"], msgspec.json.encode(item)) for item in items]
        insert = "INSERT OR IGNORE INTO items (tenant, conversation_id, id, record) VALUES (?, ?, ?, ?)"
        database.executemany(insert, rows)
        database.execute(
            "UPDATE conversations SET num_bytes = num_bytes + ?, used_s = ? WHERE tenant = ? AND id = ?",
            (sum(len(row[3]) for row in rows), self._clock(), tenant, conversation_id),
        )

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def transaction() -> T:
            database = self._connection()
            database.execute("BEGIN IMMEDIATE")
            try:
                result = work(database)
                database.execute("COMMIT")
            except BaseException:
                database.execute("ROLLBACK")
                raise
            self._num_writes += 1
            if self._num_writes % WRITES_PER_TRIM == 0:
                self._trim()
            return result

        return await self._run(transaction)

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await self._run(lambda: work(self._connection()))

    async def _run(self, work: Callable[[], T]) -> T:
        if self._worker is None:
            raise StoreDownError("the store is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._worker, work)
        except sqlite3.Error as error:
            raise StoreDownError(str(error)) from error

    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            raise StoreDownError("the store is closed")
        return self._database

    def _trim(self) -> None:
        """Forget what expired, then the least recently used beyond the limits; never what runs at the moment."""
        database, bounds, now_s = self._connection(), self._bounds, self._clock()
        tables = {
            "responses": ("is_running", bounds.max_responses),
            "conversations": (f"lock_token IS NOT NULL AND lock_until_s > {now_s}", bounds.max_conversations),
        }
        for table, (is_in_use, max_rows) in tables.items():
            # A response whose server died in the middle of it expires like any other.
            database.execute(f"DELETE FROM {table} WHERE used_s < ?", (now_s - bounds.ttl_s,))
            num_rows, num_bytes = database.execute(f"SELECT count(*), sum(num_bytes) FROM {table}").fetchone()
            if num_rows <= max_rows and (num_bytes or 0) <= bounds.max_bytes:
                continue
            database.execute(
                f"DELETE FROM {table} WHERE NOT ({is_in_use}) AND rowid IN (SELECT rowid FROM (SELECT rowid, "
                "row_number() OVER newest AS num, sum(num_bytes) OVER newest AS num_bytes "
                f"FROM {table} WINDOW newest AS (ORDER BY used_s DESC, rowid DESC)) WHERE num > ? OR num_bytes > ?)",
                (max_rows, bounds.max_bytes),
            )
        database.execute("DELETE FROM registry WHERE used_s < ?", (now_s - bounds.registry_ttl_s,))


def _prepare(database: sqlite3.Connection) -> None:
    """Settings and, in a new file, the tables."""
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute("PRAGMA foreign_keys = ON")
    database.execute("BEGIN IMMEDIATE")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        for statement in SCHEMA.split(";\n"):
            database.execute(statement)
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    database.execute("COMMIT")
    if version not in (0, SCHEMA_VERSION):
        raise StoreOpenError(
            0, f"the state file has version {version}, this program needs {SCHEMA_VERSION}; choose another --state-dir"
        )
