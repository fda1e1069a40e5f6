"""What every store promises, on SQLite and on a real Redis server."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from turnkeep.server.stores import (
    ConversationLockedError,
    Store,
    StoredConversation,
    StoredResponse,
    UnknownConversationError,
)

MakeStore = Callable[[], Store]


def response(id: str, **fields: Any) -> StoredResponse:
    body = {"id": id, "output": [{"type": "message", "id": f"msg_{id}", "text": "ü\0\u2028"}]}
    values = {"status": "completed", "created_s": 1.5, "input_items": [{"id": f"in_{id}"}], "body": body}
    return StoredResponse(id=id, **{**values, **fields})


def items(*ids: str) -> list[dict[str, Any]]:
    return [{"id": id, "type": "message", "content": id} for id in ids]


async def add_conversation(store: Store, *ids: str, tenant: str = "") -> str:
    id = f"conv_{secrets.token_hex(8)}"
    await store.create_conversation(tenant, StoredConversation(id=id, created_s=7.0, metadata={"a": "b"}), items(*ids))
    return id


def new_id() -> str:
    return f"resp_{secrets.token_hex(8)}"


async def test_a_response_comes_back_as_it_was_stored(store: Store) -> None:
    stored = response(new_id(), tag="t", previous_id="p", conversation_id="c", is_background=True, lease_until_s=2.0)
    await store.put_response("tenant", stored)
    assert await store.find_response("tenant", stored.id) == stored
    assert await store.delete_response("tenant", stored.id)
    assert await store.find_response("tenant", stored.id) is None
    assert not await store.delete_response("tenant", stored.id)


async def test_tenants_do_not_see_each_other(store: Store) -> None:
    one, conversation = response(new_id()), await add_conversation(store, "a", tenant="first")
    await store.put_response("first", one)
    assert await store.find_response("second", one.id) is None
    assert await store.chain("second", one.id) == []
    assert not await store.delete_response("second", one.id)
    assert not await store.replace_running("second", one)
    assert await store.find_conversation("second", conversation) is None
    assert not await store.delete_conversation("second", conversation)
    assert not await store.delete_item("second", conversation, "a")
    with pytest.raises(UnknownConversationError):
        await store.items("second", conversation)
    with pytest.raises(UnknownConversationError):
        await store.append_items("second", conversation, items("b"), lock=None)
    with pytest.raises(UnknownConversationError):
        await store.lock_conversation("second", conversation, "token", 5)
    assert await store.items("first", conversation) == items("a")


async def test_a_chain_holds_all_ancestors_of_one_branch(store: Store) -> None:
    root, left, right, leaf = (new_id() for _ in range(4))
    for id, previous in ((root, None), (left, root), (right, root), (leaf, right)):
        await store.put_response("", response(id, previous_id=previous))
    assert [one.id for one in await store.chain("", leaf)] == [root, right, leaf]
    assert [one.id for one in await store.chain("", left)] == [root, left]
    await store.delete_response("", right)
    assert await store.chain("", leaf) == []
    assert [one.id for one in await store.chain("", left)] == [root, left]


async def test_a_chain_of_many_turns_is_read_as_a_whole(store: Store) -> None:
    ids = [new_id() for _ in range(300)]
    for previous, id in zip([None, *ids], ids, strict=False):
        await store.put_response("", response(id, previous_id=previous))
    assert [one.id for one in await store.chain("", ids[-1])] == ids


async def test_only_a_running_response_is_replaced(store: Store) -> None:
    id = new_id()
    assert not await store.replace_running("", response(id))
    await store.put_response("", response(id, status="queued"))
    assert await store.replace_running("", response(id, status="in_progress"))
    assert await store.replace_running("", response(id, status="cancelled"))
    assert not await store.replace_running("", response(id, status="completed"))
    found = await store.find_response("", id)
    assert found is not None
    assert found.status == "cancelled"


async def test_conversations_keep_their_items_in_order(store: Store) -> None:
    id = await add_conversation(store, "a", "b")
    await store.append_items("", id, items("c", "d"), lock=None)
    await store.append_items("", id, items("d", "e"), lock=None)  # sent twice: the same item
    assert [item["id"] for item in await store.items("", id)] == ["a", "b", "c", "d", "e"]
    assert await store.delete_item("", id, "b")
    assert not await store.delete_item("", id, "b")
    await store.append_items("", id, items("f"), lock=None)
    assert await store.items("", id) == items("a", "c", "d", "e", "f")
    found = await store.set_metadata("", id, {"x": "y"})
    assert (
        found == await store.find_conversation("", id) == StoredConversation(id=id, created_s=7.0, metadata={"x": "y"})
    )
    assert await store.delete_conversation("", id)
    assert await store.find_conversation("", id) is None
    assert await store.set_metadata("", id, {}) is None
    with pytest.raises(UnknownConversationError):
        await store.items("", id)


async def test_an_empty_conversation_has_no_items(store: Store) -> None:
    assert await store.items("", await add_conversation(store)) == []


async def test_one_turn_at_a_time_holds_a_conversation(store: Store) -> None:
    id = await add_conversation(store)
    await store.lock_conversation("", id, "first", 60)
    await store.lock_conversation("", id, "first", 60)  # prolonged
    with pytest.raises(ConversationLockedError):
        await store.lock_conversation("", id, "second", 60)
    for lock in (None, "second"):
        with pytest.raises(ConversationLockedError):
            await store.append_items("", id, items("a"), lock=lock)
    await store.unlock_conversation("", id, "second")
    await store.append_items("", id, items("b"), lock="first")
    await store.unlock_conversation("", id, "first")
    with pytest.raises(ConversationLockedError):
        await store.append_items("", id, items("c"), lock="first")
    await store.lock_conversation("", id, "second", 60)
    assert await store.items("", id) == items("b")


async def test_one_of_many_servers_gets_the_lock(make_store: MakeStore) -> None:
    stores = [make_store() for _ in range(3)]
    for one in stores:
        await one.open()
    id = await add_conversation(stores[0])
    tries = [one.lock_conversation("", id, f"{index}", 60) for index, one in enumerate(stores * 4)]
    results = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(result is None for result in results) == 1
    assert all(result is None or isinstance(result, ConversationLockedError) for result in results)
    for one in stores:
        await one.close()


async def test_appends_of_many_servers_are_never_mixed(make_store: MakeStore) -> None:
    stores = [make_store() for _ in range(3)]
    for one in stores:
        await one.open()
    id = await add_conversation(stores[0])
    batches = [[f"{batch}-{index}" for index in range(5)] for batch in range(12)]
    appends = [stores[n % 3].append_items("", id, items(*batch), lock=None) for n, batch in enumerate(batches)]
    await asyncio.gather(*appends)
    found = [item["id"] for item in await stores[0].items("", id)]
    assert sorted([found[start : start + 5] for start in range(0, 60, 5)]) == sorted(batches)
    for one in stores:
        await one.close()


async def test_a_tagged_conversation_began_when_any_server_saw_it_first(make_store: MakeStore) -> None:
    first, second = make_store(), make_store()
    await first.open()
    await second.open()
    id = secrets.token_hex(8)
    assert await first.register("root", id, 123.456) == 123.456
    assert await second.register("root", id, 999.0) == 123.456
    assert await second.register("other", id, 999.0) == 999.0
    await first.close()
    await second.close()


async def test_closing_twice_does_no_harm(make_store: MakeStore) -> None:
    made = make_store()
    await made.open()
    await made.close()
    await made.close()
