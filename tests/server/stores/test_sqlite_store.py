"""What belongs to the file: modes, restarts, bounds, damage."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from turnkeep.server.stores import (
    ConversationLockedError,
    SqliteStore,
    StoreBounds,
    StoredConversation,
    StoreDownError,
    StoredResponse,
    StoreOpenError,
    UnknownConversationError,
    make_store,
)
from turnkeep.server.stores.sqlite_store import FILE_NAME, WRITES_PER_TRIM


class Clock(Protocol):
    now_s: float

    def __call__(self) -> float: ...


def response(id: str, *, status: str = "completed", text: str = "", previous_id: str | None = None) -> StoredResponse:
    body: dict[str, Any] = {"id": id, "output": [{"id": "o", "text": text}]}
    return StoredResponse(id=id, created_s=0.0, status=status, input_items=[], body=body, previous_id=previous_id)


@asynccontextmanager
async def opened(folder: Path | None, **options: Any) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(folder, **options)
    await store.open()
    yield store
    await store.close()


async def test_only_the_owner_can_read_the_state(tmp_path: Path) -> None:
    folder = tmp_path / "outer" / "state"
    async with opened(folder) as store:
        await store.put_response("", response("a"))
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert FILE_NAME in modes
    assert set(modes.values()) == {0o600}


async def test_everything_survives_a_restart(tmp_path: Path, clock: Clock) -> None:
    async with opened(tmp_path, clock=clock) as store:
        await store.put_response("", response("a", text="x"))
        await store.create_conversation("", StoredConversation(id="c", created_s=1.0, metadata={}), [{"id": "i"}])
        await store.register("root", "c", clock())
        await store.lock_conversation("", "c", "token", 60)
    async with opened(tmp_path, clock=clock) as store:
        found = await store.find_response("", "a")
        assert found is not None
        assert found.output[0]["text"] == "x"
        assert await store.items("", "c") == [{"id": "i"}]
        assert await store.register("root", "c", clock() + 1) == clock()
        with pytest.raises(ConversationLockedError):
            await store.lock_conversation("", "c", "other", 60)


async def test_a_lock_ends_with_its_lease(tmp_path: Path, clock: Clock) -> None:
    async with opened(tmp_path, clock=clock) as store:
        await store.create_conversation("", StoredConversation(id="c", created_s=1.0, metadata={}), [])
        await store.lock_conversation("", "c", "dead", 30)
        clock.now_s += 31
        with pytest.raises(ConversationLockedError):
            await store.append_items("", "c", [{"id": "late"}], lock="dead")
        await store.append_items("", "c", [{"id": "i"}], lock=None)
        await store.lock_conversation("", "c", "next", 30)
        assert await store.items("", "c") == [{"id": "i"}]


async def test_what_is_not_used_expires_and_a_chain_lives_as_long_as_its_newest_turn(clock: Clock) -> None:
    async with opened(None, clock=clock, bounds=StoreBounds(ttl_s=100, registry_ttl_s=50)) as store:
        await store.put_response("", response("old"))
        await store.put_response("", response("root"))
        await store.put_response("", response("leaf", previous_id="root"))
        await store.create_conversation("", StoredConversation(id="c", created_s=1.0, metadata={}), [{"id": "i"}])
        await store.register("root", "c", clock())
        clock.now_s += 80
        assert len(await store.chain("", "leaf")) == 2
        assert await store.register("root", "c", clock()) == clock()
        clock.now_s += 80
        assert await store.find_response("", "old") is None
        assert await store.find_conversation("", "c") is None
        for number in range(WRITES_PER_TRIM):
            await store.put_response("", response(f"{number}"))
        assert len(await store.chain("", "leaf")) == 2
        assert await store.chain("", "old") == []
        with pytest.raises(UnknownConversationError):
            await store.items("", "c")


async def test_the_least_recently_used_go_beyond_the_bounds_but_nothing_that_runs(clock: Clock) -> None:
    bounds = StoreBounds(max_responses=10, max_conversations=3)
    async with opened(None, clock=clock, bounds=bounds) as store:
        await store.put_response("", response("running", status="in_progress"))
        for number in range(2 * WRITES_PER_TRIM):
            clock.now_s += 1
            await store.put_response("", response(f"r{number}"))
            conversation = StoredConversation(id=f"c{number}", created_s=1.0, metadata={})
            await store.create_conversation("", conversation, [])
            if number == 0:
                await store.lock_conversation("", "c0", "token", 1e6)
        num_kept = sum([await store.find_response("", f"r{n}") is not None for n in range(2 * WRITES_PER_TRIM)])
        assert 9 <= num_kept <= 10 + WRITES_PER_TRIM
        assert await store.find_response("", "r0") is None
        assert await store.find_response("", "running") is not None
        assert await store.find_conversation("", "c0") is not None
        assert await store.find_conversation("", "c1") is None


async def test_bytes_are_bounded(clock: Clock) -> None:
    async with opened(None, clock=clock, bounds=StoreBounds(max_bytes=100_000)) as store:
        for number in range(2 * WRITES_PER_TRIM):
            clock.now_s += 1
            await store.put_response("", response(f"r{number}", text="x" * 10_000))
        kept = [number for number in range(2 * WRITES_PER_TRIM) if await store.find_response("", f"r{number}")]
    assert kept == list(range(2 * WRITES_PER_TRIM - len(kept), 2 * WRITES_PER_TRIM))
    assert 9 <= len(kept) <= 10


@pytest.mark.parametrize("damage", ["not a database", "a newer version", "a file in place of the folder"])
async def test_a_state_file_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "state"
    if damage == "a file in place of the folder":
        folder.write_text("")
    else:
        folder.mkdir()
        if damage == "not a database":
            (folder / FILE_NAME).write_bytes(b"no database at all, but long enough to be looked at" * 40)
        else:
            database = sqlite3.connect(folder / FILE_NAME)
            database.execute("PRAGMA user_version = 99")
            database.close()
    store = SqliteStore(folder)
    with pytest.raises(StoreOpenError, match="state"):
        await store.open()
    await store.close()


async def test_a_database_that_stays_locked_is_a_store_that_is_down(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("turnkeep.server.stores.sqlite_store.BUSY_TIMEOUT_S", 0.01)
    async with opened(tmp_path) as store:
        other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreDownError):
            await store.put_response("", response("a"))
        other.execute("COMMIT")
        other.close()
        await store.put_response("", response("a"))


async def test_a_closed_store_is_down(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        pass
    with pytest.raises(StoreDownError):
        await asyncio.wait_for(store.find_response("", "a"), 1)


def test_a_redis_url_of_another_form_is_refused() -> None:
    with pytest.raises(StoreOpenError, match="Redis URL"):
        make_store(None, "http://127.0.0.1:1")
