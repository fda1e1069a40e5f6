"""Redis goes away and comes back."""

from __future__ import annotations

import asyncio
import time

import pytest
from redis_server import RedisServer

from turnkeep.server.stores import RedisStore, StoreBounds, StoreDownError, StoredResponse
from turnkeep.server.stores.redis_store import PAUSE_AFTER_FAILURE_S, REGISTER_TIMEOUT_S


def response(id: str) -> StoredResponse:
    return StoredResponse(id=id, created_s=0.0, status="completed", input_items=[], body={"id": id, "output": []})


async def test_a_store_heals_when_redis_comes_back(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url)
    await store.put_response("", response("a"))
    redis_server.stop()
    with pytest.raises(StoreDownError):
        await store.find_response("", "a")
    started_s = time.monotonic()
    with pytest.raises(StoreDownError, match="a moment ago"):
        await store.find_response("", "a")
    assert time.monotonic() - started_s < PAUSE_AFTER_FAILURE_S
    redis_server.start()
    store._down_until_s = 0.0  # as if the pause were over
    await store.put_response("", response("b"))
    assert await store.find_response("", "b") == response("b")
    await store.close()


async def test_the_least_recently_used_responses_go(redis_server: RedisServer) -> None:
    now_s = iter(range(100, 1000))
    store = RedisStore(redis_server.url, bounds=StoreBounds(max_responses=3), clock=lambda: float(next(now_s)))
    await store._redis.flushall()
    for number in range(3):
        await store.put_response("", response(f"r{number}"))
    await store.chain("", "r0")
    await store.put_response("", response("r3"))
    kept = [number for number in range(4) if await store.find_response("", f"r{number}") is not None]
    assert kept == [0, 2, 3]
    await store.close()


async def test_what_is_stored_expires_in_redis(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, bounds=StoreBounds(ttl_s=1000, registry_ttl_s=10))
    await store.put_response("", response("a"))
    await store.register("root", "c", 5.0)
    assert 990_000 < await store._redis.pttl("turnkeep:1:r::a") <= 1_000_000
    assert 9_000 < await store._redis.pttl("turnkeep:1:g:root:c") <= 10_000
    await store.close()


async def test_a_redis_that_does_not_answer_costs_a_chat_little() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    store = RedisStore(f"redis://127.0.0.1:{port}/0")
    started_s = time.monotonic()
    with pytest.raises(StoreDownError):
        await store.register("root", "conversation", 1.0)
    with pytest.raises(StoreDownError, match="a moment ago"):
        await store.register("root", "conversation", 1.0)
    assert time.monotonic() - started_s < 2 * REGISTER_TIMEOUT_S
    await store.close()
    silent.close()
    await silent.wait_closed()
