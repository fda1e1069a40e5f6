"""/v1/conversations and their items over HTTP: what is kept of a conversation, and its end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from turnkeep.server import errors
from turnkeep.server.chat_completions import decode_request
from turnkeep.server.chat_service import ChatService
from turnkeep.server.conversations import cache_root
from turnkeep.server.http_guard import TENANT, json_response
from turnkeep.server.item_lists import item_list, item_page
from turnkeep.server.request_body import read_body
from turnkeep.server.responses.input_items import id_prefix, read_items, with_ids
from turnkeep.server.responses.plan import (
    CONVERSATION_ID,
    conversation_locked,
    conversation_not_found,
    store_is_down,
)
from turnkeep.server.responses.shapes import check_metadata
from turnkeep.server.stores import (
    ConversationLockedError,
    Item,
    Store,
    StoredConversation,
    StoreDownError,
    UnknownConversationError,
)

T = TypeVar("T")

MAX_ITEMS_AT_ONCE = 20


class CreateConversation(msgspec.Struct):
    items: list[Any] | None = None
    metadata: dict[str, str] | None = None


class UpdateConversation(msgspec.Struct):
    metadata: dict[str, str] | None


class AppendItems(msgspec.Struct):
    items: list[Any]


class ConversationsEndpoint:
    """The handlers; one instance serves all requests. Ids of other tenants do not exist."""

    def __init__(self, chat: ChatService, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self._chat = chat
        self._store = store
        self._clock = clock

    async def create(self, request: web.Request) -> web.Response:
        body = await read_body(request, _parser(CreateConversation)) if request.can_read_body else CreateConversation()
        items = _new_items(body.items or [])
        conversation = StoredConversation(
            id=f"conv_{secrets.token_hex(16)}", created_s=self._clock(), metadata=check_metadata(body.metadata)
        )
        await _kept(self._store.create_conversation(request[TENANT], conversation, items))
        return json_response(_shown(conversation))

    async def retrieve(self, request: web.Request) -> web.Response:
        return json_response(_shown(await self._find(request)))

    async def update(self, request: web.Request) -> web.Response:
        """Replace the metadata."""
        body = await read_body(request, _parser(UpdateConversation))
        id, metadata = _id(request), check_metadata(body.metadata)
        conversation = await _kept(self._store.set_metadata(request[TENANT], id, metadata))
        if conversation is None:
            raise conversation_not_found(id)
        return json_response(_shown(conversation))

    async def delete(self, request: web.Request) -> web.Response:
        """Forget a conversation with its items; what the engine keeps for it alone is freed."""
        id, tenant = _id(request), request[TENANT]
        if not await _kept(self._store.delete_conversation(tenant, id)):
            raise conversation_not_found(id)
        self._chat.close_conversation(cache_root(tenant or None, None), id)
        return json_response({"id": id, "object": "conversation.deleted", "deleted": True})

    async def list_items(self, request: web.Request) -> web.Response:
        return json_response(item_page(await self._items(request), request.query))

    async def append_items(self, request: web.Request) -> web.Response:
        body = await read_body(request, _parser(AppendItems))
        items = _new_items(body.items)
        if not items:
            raise errors.bad_request("items must not be empty.", "items")
        id = _id(request)
        try:
            await _kept(self._store.append_items(request[TENANT], id, items, lock=None))
        except UnknownConversationError:
            raise conversation_not_found(id) from None
        except ConversationLockedError:
            raise conversation_locked() from None
        return json_response(item_list(items))

    async def item(self, request: web.Request) -> web.Response:
        item_id = request.match_info["item_id"]
        found = next((item for item in await self._items(request) if item["id"] == item_id), None)
        if found is None:
            raise _item_not_found(item_id)
        return json_response(found)

    async def delete_item(self, request: web.Request) -> web.Response:
        """Answers with the conversation. The next turn finds its prompt changed from there on."""
        conversation, item_id = await self._find(request), request.match_info["item_id"]
        if not await _kept(self._store.delete_item(request[TENANT], conversation.id, item_id)):
            raise _item_not_found(item_id)
        return json_response(_shown(conversation))

    async def _find(self, request: web.Request) -> StoredConversation:
        id = _id(request)
        conversation = await _kept(self._store.find_conversation(request[TENANT], id))
        if conversation is None:
            raise conversation_not_found(id)
        return conversation

    async def _items(self, request: web.Request) -> list[Item]:
        id = _id(request)
        try:
            return await _kept(self._store.items(request[TENANT], id))
        except UnknownConversationError:
            raise conversation_not_found(id) from None


def add_conversations(app: web.Application, endpoint: ConversationsEndpoint) -> None:
    router, path = app.router, "/v1/conversations"
    router.add_post(path, endpoint.create)
    router.add_get(f"{path}/{{id}}", endpoint.retrieve)
    router.add_post(f"{path}/{{id}}", endpoint.update)
    router.add_delete(f"{path}/{{id}}", endpoint.delete)
    router.add_get(f"{path}/{{id}}/items", endpoint.list_items)
    router.add_post(f"{path}/{{id}}/items", endpoint.append_items)
    router.add_get(f"{path}/{{id}}/items/{{item_id}}", endpoint.item)
    router.add_delete(f"{path}/{{id}}/items/{{item_id}}", endpoint.delete_item)


def _parser(shape: type[T]) -> Callable[[bytes], T]:
    decoder = msgspec.json.Decoder(shape)
    return lambda body: decode_request(decoder, body)


def _new_items(given: list[Any]) -> list[Item]:
    """Checked items with ids. Raises ApiError 400."""
    if len(given) > MAX_ITEMS_AT_ONCE:
        raise errors.bad_request(f"items holds at most {MAX_ITEMS_AT_ONCE} items at once.", "items")
    items = read_items(given, "items")
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            raise errors.bad_request("A conversation is given items, not references.", f"items[{index}].type")
    return with_ids(items, lambda item, _: f"{id_prefix(item)}_{secrets.token_hex(16)}")


async def _kept(work: Awaitable[T]) -> T:
    try:
        return await work
    except StoreDownError:
        raise store_is_down() from None


def _id(request: web.Request) -> str:
    """Raises ApiError 404 for what can be no id of ours."""
    id = request.match_info["id"]
    if CONVERSATION_ID.fullmatch(id) is None:
        raise conversation_not_found(id)
    return id


def _item_not_found(item_id: str) -> errors.ApiError:
    return errors.not_found(f"Item with id '{errors.shorten(item_id, 80)}' not found.")


def _shown(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": int(conversation.created_s),
        "metadata": conversation.metadata,
    }
