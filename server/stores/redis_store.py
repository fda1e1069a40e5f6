"""The store in Redis (or Valkey), shared by several servers. What must be atomic is one script on one slot.

Redis may go and come back at any time: calls then raise StoreDownError, at once for a moment after one has failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from turnkeep.server.stores.store import (
    MAX_CHAIN_LENGTH,
    ConversationLockedError,
    Item,
    StoreBounds,
    StoredConversation,
    StoreDownError,
    StoredResponse,
    UnknownConversationError,
)

PREFIX = "turnkeep:1"
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0
REGISTER_TIMEOUT_S = 0.5  # a chat waits for the registry, and can do without it
PAUSE_AFTER_FAILURE_S = 0.5

# KEYS: the response. ARGV: record, its expiry in ms. The record's first byte is "1" while the response runs.
REPLACE_RUNNING = """
local old = redis.call('GETRANGE', KEYS[1], 0, 0)
if old ~= '1' then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# KEYS: conversation, order, items, lock. ARGV: lock token ("" for none), expiry in ms, then id and record of each item.
APPEND = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 'unknown' end
local holder = redis.call('GET', KEYS[4]) or ''
if holder ~= ARGV[1] then return 'locked' end
for i = 3, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[3], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('ZADD', KEYS[2], redis.call('HINCRBY', KEYS[1], 'position', 1), ARGV[i])
  end
end
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[2]) end
return 'done'
"""

# KEYS: conversation, order, items. ARGV: expiry in ms. The items in their order; false when there is no conversation.
ITEMS = """
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[1]) end
local records = {}
for i, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do records[i] = redis.call('HGET', KEYS[3], id) end
return records
"""

# KEYS: conversation. ARGV: the record. The metadata of a conversation that is there.
SET_RECORD = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'record', ARGV[1])
return 1
"""

# KEYS: order, items. ARGV: the item's id.
DELETE_ITEM = """
redis.call('ZREM', KEYS[1], ARGV[1])
return redis.call('HDEL', KEYS[2], ARGV[1])
"""

# KEYS: conversation, lock. ARGV: token, lease in ms.
LOCK = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 'unknown' end
local holder = redis.call('GET', KEYS[2])
if holder and holder ~= ARGV[1] then return 'locked' end
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[2])
return 'done'
"""

# KEYS: lock. ARGV: token.
UNLOCK = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"

# KEYS: the registry's entry. ARGV: now, expiry in ms.
REGISTER = """
redis.call('SET', KEYS[1], ARGV[1], 'NX')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('GET', KEYS[1])
"""


class RedisStore:
    """url: redis://[user:password@]host:port/number, rediss:// or unix://. Expiry is Redis' own; how much it may hold
    is its own `maxmemory` (with an LRU policy), and the number of stored responses is bounded here."""

    def __init__(self, url: str, *, bounds: StoreBounds | None = None, clock: Callable[[], float] = time.time) -> None:
        """Raises ValueError for a URL of another form."""
        self._bounds = bounds or StoreBounds()
        self._clock = clock
        self._ttl_ms = int(self._bounds.ttl_s * 1000)
        self._down_until_s = 0.0
        self._redis: Redis = Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=ANSWER_TIMEOUT_S,
            # Once more, at once: a connection may have been closed while it was idle.
            retry=Retry(NoBackoff(), 1),
        )

    async def open(self) -> None:
        """Never fails: a Redis that is not there yet may come."""

    async def close(self) -> None:
        await self._redis.aclose()

    async def check(self) -> None:
        await self._ask(self._redis.ping())

    async def put_response(self, tenant: str, response: StoredResponse) -> None:
        key = _response_key(tenant, response.id)
        await self._ask(self._redis.set(key, _packed(response), px=self._ttl_ms))
        await self._bound_responses(key)

    async def replace_running(self, tenant: str, response: StoredResponse) -> bool:
        return bool(
            await self._script(REPLACE_RUNNING, [_response_key(tenant, response.id)], [_packed(response), self._ttl_ms])
        )

    async def find_response(self, tenant: str, response_id: str) -> StoredResponse | None:
        record = await self._ask(self._redis.get(_response_key(tenant, response_id)))
        return None if record is None else msgspec.json.decode(record[1:], type=StoredResponse)

    async def chain(self, tenant: str, response_id: str) -> list[StoredResponse]:
        found: list[StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            record = await self._ask(self._redis.getex(_response_key(tenant, next_id), px=self._ttl_ms))
            if record is None or len(found) == MAX_CHAIN_LENGTH:
                return []
            found.append(msgspec.json.decode(record[1:], type=StoredResponse))
            next_id = found[-1].previous_id
        await self._note_use([_response_key(tenant, one.id) for one in found])
        return found[::-1]

    async def delete_response(self, tenant: str, response_id: str) -> bool:
        key = _response_key(tenant, response_id)
        await self._ask(self._redis.zrem(_USED, key))
        return bool(await self._ask(self._redis.delete(key)))

    async def create_conversation(self, tenant: str, conversation: StoredConversation, items: Sequence[Item]) -> None:
        key = _conversation_key(tenant, conversation.id)
        record: dict[Any, Any] = {"record": msgspec.json.encode(conversation), "position": len(items)}
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=record)
            for position, item in enumerate(items):
                pipe.zadd(f"{key}:order", {item["id"]: position})
                pipe.hset(f"{key}:items", item["id"], msgspec.json.encode(item))
            for name in (key, f"{key}:order", f"{key}:items"):
                pipe.pexpire(name, self._ttl_ms)
            await self._ask(pipe.execute())

    async def find_conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        record = await self._ask(self._redis.hget(_conversation_key(tenant, conversation_id), "record"))
        return None if record is None else msgspec.json.decode(record, type=StoredConversation)

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: dict[str, str]
    ) -> StoredConversation | None:
        conversation = await self.find_conversation(tenant, conversation_id)
        if conversation is None:
            return None
        conversation.metadata = metadata
        key = _conversation_key(tenant, conversation_id)
        is_there = await self._script(SET_RECORD, [key], [msgspec.json.encode(conversation)])
        return conversation if is_there else None

    async def delete_conversation(self, tenant: str, conversation_id: str) -> bool:
        key = _conversation_key(tenant, conversation_id)
        deleted = await self._ask(self._redis.delete(key, f"{key}:order", f"{key}:items", f"{key}:lock"))
        return bool(deleted)

    async def items(self, tenant: str, conversation_id: str) -> list[Item]:
        key = _conversation_key(tenant, conversation_id)
        records = await self._script(ITEMS, [key, f"{key}:order", f"{key}:items"], [self._ttl_ms])
        if records is None:
            raise UnknownConversationError
        return [msgspec.json.decode(record) for record in records]

    async def append_items(self, tenant: str, conversation_id: str, items: Sequence[Item], *, lock: str | None) -> None:
        key = _conversation_key(tenant, conversation_id)
        values: list[Any] = [lock or "", self._ttl_ms]
        for item in items:
            values += [item["id"], msgspec.json.encode(item)]
        _check(await self._script(APPEND, [key, f"{key}:order", f"{key}:items", f"{key}:lock"], values))

    async def delete_item(self, tenant: str, conversation_id: str, item_id: str) -> bool:
        key = _conversation_key(tenant, conversation_id)
        return bool(await self._script(DELETE_ITEM, [f"{key}:order", f"{key}:items"], [item_id]))

    async def lock_conversation(self, tenant: str, conversation_id: str, token: str, lease_s: float) -> None:
        key = _conversation_key(tenant, conversation_id)
        _check(await self._script(LOCK, [key, f"{key}:lock"], [token, int(lease_s * 1000)]))

    async def unlock_conversation(self, tenant: str, conversation_id: str, token: str) -> None:
        await self._script(UNLOCK, [f"{_conversation_key(tenant, conversation_id)}:lock"], [token])

    async def register(self, root: str, conversation_id: str, now_s: float) -> float:
        expiry_ms = int(self._bounds.registry_ttl_s * 1000)
        key = f"{PREFIX}:g:{root}:{conversation_id}"
        return float(await self._ask(self._redis.eval(REGISTER, 1, key, repr(now_s), expiry_ms), REGISTER_TIMEOUT_S))

    async def _bound_responses(self, key: str) -> None:
        """Note the use of a response and drop the least recently used beyond the limit."""
        await self._note_use([key])
        num_over = await self._ask(self._redis.zcard(_USED)) - self._bounds.max_responses
        if num_over > 0:
            oldest = await self._ask(self._redis.zpopmin(_USED, num_over))
            for old_key, _ in oldest:
                await self._ask(self._redis.delete(old_key))

    async def _note_use(self, keys: Sequence[str]) -> None:
        await self._ask(self._redis.zadd(_USED, {key: self._clock() for key in keys}))

    async def _script(self, script: str, keys: list[str], values: list[Any]) -> Any:
        return await self._ask(self._redis.eval(script, len(keys), *keys, *values))

    async def _ask(self, command: Any, timeout_s: float | None = None) -> Any:
        """The answer of one command. Raises StoreDownError, without waiting right after a failure."""
        if time.monotonic() < self._down_until_s:
            if hasattr(command, "close"):
                command.close()
            raise StoreDownError("Redis was not reachable a moment ago")
        try:
            async with asyncio.timeout(timeout_s):
                return await cast(Awaitable[Any], command)
        except (RedisError, OSError, TimeoutError) as error:
            self._down_until_s = time.monotonic() + PAUSE_AFTER_FAILURE_S
            raise StoreDownError(f"Redis: {error}") from error


_USED = f"{PREFIX}:used"


def _response_key(tenant: str, response_id: str) -> str:
    return f"{PREFIX}:r:{tenant}:{response_id}"


def _conversation_key(tenant: str, conversation_id: str) -> str:
    """The keys of one conversation share a hash tag, so that a cluster keeps them together."""
    return f"{PREFIX}:c:{{{tenant}:{conversation_id}}}"


def _packed(response: StoredResponse) -> bytes:
    return (b"1" if response.is_running else b"0") + msgspec.json.encode(response)


def _check(result: bytes) -> None:
    if result == b"unknown":
        raise UnknownConversationError
    if result == b"locked":
        raise ConversationLockedError
