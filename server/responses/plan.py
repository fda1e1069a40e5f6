"""What one request for a response amounts to: the conversation before it, its own items, and where the turn is kept.

Reads the store; starts nothing but the lock of a conversation.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnkeep.server import errors
from turnkeep.server.chat_completions import ChatCompletionRequest
from turnkeep.server.conversations import OWN_SOURCES, resolve_conversation
from turnkeep.server.responses.chat_body import SAME_FIELDS, chat_body
from turnkeep.server.responses.input_items import id_prefix, read_items, with_ids
from turnkeep.server.responses.item_messages import Message, to_messages
from turnkeep.server.responses.shapes import ResponsesRequest
from turnkeep.server.responses.tools import ToolSet, read_tools
from turnkeep.server.stores import (
    ConversationLockedError,
    Item,
    Store,
    StoreDownError,
    StoredResponse,
    UnknownConversationError,
)

LEASE_S = 60.0  # how long a lock or a running response outlives the server that holds it

RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32,64}")
CONVERSATION_ID = re.compile(r"conv_[0-9a-f]{32,64}")
NAMED_BY_RESPONSE = re.compile(r"[a-z]+_([0-9a-f]{32})[io][0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Link:
    """The end of a chain of responses that a new one may continue: all items so far, and the conversation's tag."""

    response_id: str
    items: Sequence[Item]
    tag: str | None


@dataclass(slots=True)
class Plan:
    """history: what went before; input_items: what this request adds. tag: the conversation, for retention."""

    id: str
    tenant: str
    request: ResponsesRequest
    tools: ToolSet
    history: list[Item]
    input_items: list[Item]
    tag: str | None = None
    lock: str | None = None  # the token that holds the conversation
    messages: list[Message] = field(default_factory=list)

    @property
    def conversation_id(self) -> str | None:
        return self.request.conversation_given

    def make_output_id(self, prefix: str, number: int) -> str:
        return item_id(prefix, self.id, "o", number)

    def chat(self) -> ChatCompletionRequest:
        """The chat completion of `messages`. Raises ApiError 400."""
        return chat_body(self.request, self.messages, self.tools, self.tag)


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(16)}"


def item_id(prefix: str, response_id: str, side: str, number: int) -> str:
    """An id that says which response the item belongs to, so that a reference to it can be followed."""
    return f"{prefix}_{response_id.removeprefix('resp_')}{side}{number:x}"


def store_is_down() -> errors.ApiError:
    # A code of its own: what needs no stored state can still be asked for.
    message = "The store of responses and conversations cannot be reached at the moment."
    return errors.unavailable(message, code="store_unavailable")


class Planner:
    """Makes plans from requests."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def plan(
        self,
        request: ResponsesRequest,
        headers: Mapping[str, str],
        tenant: str,
        *,
        link: Link | None = None,
        locks: bool = True,
        is_session: bool = False,
    ) -> Plan:
        """link: the response before, where it is at hand and not to be looked up. locks: hold the conversation, which
        the caller then releases. is_session: requests of one connection belong together even if they say nothing.

        Raises ApiError: 400, 404, 409 when another turn of the conversation runs, 503 when the store is down.
        """
        id = new_response_id()
        try:
            tools = read_tools(request.tools)
            items = read_items(request.input) if request.input is not None else []
            if not items and request.previous_response_id is None and request.conversation is None:
                raise errors.bad_request("input is missing or empty.", "input")
            if link is None and request.previous_response_id is not None:
                link = await self.link(tenant, request.previous_response_id)
            plan = Plan(id, tenant, request, tools, list(link.items) if link is not None else [], [])
            try:
                if plan.conversation_id is not None:
                    await self._enter_conversation(plan, locks)
                plan.input_items = with_ids(
                    await self._resolve(tenant, items, plan.history),
                    lambda item, number: item_id(id_prefix(item), id, "i", number),
                    {item["id"] for item in plan.history},
                )
            except BaseException:
                await self.release(plan)
                raise
        except StoreDownError:
            raise store_is_down() from None
        plan.tag = self._tag(plan, headers, link, is_session)
        plan.messages = to_messages([*plan.history, *plan.input_items], request.instructions)
        return plan

    async def link(self, tenant: str, response_id: str) -> Link:
        """The chain that ends with a stored response. Raises ApiError 404, 400; StoreDownError."""
        chain = await self._store.chain(tenant, response_id) if RESPONSE_ID.fullmatch(response_id) else []
        if not chain:
            raise previous_not_found(response_id)
        last = chain[-1]
        if last.status not in ("completed", "incomplete"):
            raise errors.bad_request(
                f"The previous response is {last.status}; only one that has ended can be continued.",
                "previous_response_id",
            )
        return link_of(chain)

    async def release(self, plan: Plan) -> None:
        """Let go of the conversation. Idempotent; a store that is down forgets the lock by itself."""
        token, plan.lock = plan.lock, None
        if token is None or plan.conversation_id is None:
            return
        try:
            await self._store.unlock_conversation(plan.tenant, plan.conversation_id, token)
        except StoreDownError:
            return

    async def _enter_conversation(self, plan: Plan, locks: bool) -> None:
        id = plan.conversation_id
        assert id is not None
        try:
            if CONVERSATION_ID.fullmatch(id) is None:
                raise UnknownConversationError
            if locks:
                plan.lock = plan.id
                try:
                    await self._store.lock_conversation(plan.tenant, id, plan.lock, LEASE_S)
                except BaseException:
                    plan.lock = None
                    raise
            plan.history = await self._store.items(plan.tenant, id)
        except UnknownConversationError:
            raise conversation_not_found(id, "conversation") from None
        except ConversationLockedError:
            raise conversation_locked() from None

    async def _resolve(self, tenant: str, items: list[Item], history: list[Item]) -> list[Item]:
        """References replaced by what they refer to."""
        known = {item["id"]: item for item in history}
        resolved = []
        for index, item in enumerate(items):
            if item["type"] != "item_reference":
                known.setdefault(item.get("id", ""), item)
                resolved.append(item)
                continue
            found = known.get(item["id"]) or await self._stored_item(tenant, item["id"])
            if found is None:
                message = f"input[{index}] refers to an item that does not exist."
                raise errors.bad_request(message, f"input[{index}].id", code="item_not_found")
            resolved.append(found)
        return resolved

    async def _stored_item(self, tenant: str, id: str) -> Item | None:
        named = NAMED_BY_RESPONSE.fullmatch(id)
        response = await self._store.find_response(tenant, f"resp_{named.group(1)}") if named else None
        if response is None:
            return None
        return next((item for item in [*response.input_items, *response.output] if item["id"] == id), None)

    def _tag(self, plan: Plan, headers: Mapping[str, str], link: Link | None, is_session: bool) -> str | None:
        """A conversation names itself; else our own fields and headers do, a chain, and those of other clients.

        A stored response that begins a conversation may become a chain. One that was sent a whole history may not:
        its client keeps the history and names no conversation, so each turn would be one of its own.
        """
        if plan.conversation_id is not None:
            return plan.conversation_id
        fields = {name: getattr(plan.request, name) for name in SAME_FIELDS if hasattr(plan.request, name)}
        named = resolve_conversation(headers, fields)
        # A client that names its conversation in our own way means it: a fork of a chain has a name of its own.
        if link is not None and named.source not in OWN_SOURCES:
            return link.tag or link.response_id
        if named.conversation_id is not None:
            # Kept with the response, so that what continues it without a name belongs to the same conversation.
            return None if named.shared else named.conversation_id
        begins = not any(item.get("role") == "assistant" or "call_id" in item for item in plan.input_items)
        return plan.id if is_session or (plan.request.is_stored and begins) else None


def link_of(chain: Sequence[StoredResponse]) -> Link:
    items = [item for one in chain for item in (*one.input_items, *one.output)]
    last = chain[-1]
    return Link(last.id, items, last.tag or chain[0].id)


def previous_not_found(response_id: str) -> errors.ApiError:
    shown = errors.shorten(response_id, 80)
    message = f"Previous response with id '{shown}' not found."
    return errors.ApiError(404, message, param="previous_response_id", code="previous_response_not_found")


def conversation_not_found(id: str, param: str | None = None) -> errors.ApiError:
    message = f"Conversation with id '{errors.shorten(id, 80)}' not found."
    return errors.ApiError(404, message, param=param, code="not_found")


def conversation_locked() -> errors.ApiError:
    message = "Another turn of this conversation runs. Wait for its end."
    return errors.ApiError(409, message, param="conversation", code="conversation_locked", retry_after_s=1)
