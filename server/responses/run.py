"""One response while it is made: the turn behind it, its events, and what is kept when it is complete.

A turn is stored as a whole before its last event is sent, so that whoever has seen the end can build on it; of a turn
that broke nothing is kept. Source and shape of a stream for turn_stream.py. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from turnkeep.server import errors, event_stream
from turnkeep.server.chat_service import ChatService
from turnkeep.server.responses.answers import Event, ResponseBuilder
from turnkeep.server.responses.chat_body import response_params
from turnkeep.server.responses.plan import LEASE_S, Plan, conversation_locked, conversation_not_found, store_is_down
from turnkeep.server.stores import (
    ConversationLockedError,
    Store,
    StoreDownError,
    StoredResponse,
    UnknownConversationError,
)
from turnkeep.server.turn import EventReceiver, Turn
from turnkeep.server.turn_events import TurnEvent

log = logging.getLogger(__name__)


class ResponseRun:
    """Use it inside `async with`; leaving it early aborts the turn and keeps nothing."""

    def __init__(
        self,
        chat: ChatService,
        store: Store,
        plan: Plan,
        turn: Turn,
        builder: ResponseBuilder,
        *,
        created_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.plan = plan
        self.builder = builder
        self._chat = chat
        self._store = store
        self._turn = turn
        self._created_s = created_s
        self._clock = clock
        self._pending = builder.opening()
        self._lease: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Nothing more will come."""
        return self.builder.is_over

    async def __aenter__(self) -> ResponseRun:
        if self.plan.lock is not None or self.plan.request.background:
            self._lease = asyncio.create_task(self._prolong())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._turn.close()
        if self._lease is not None:
            self._lease.cancel()
        if self.plan.lock is not None:
            # Whatever becomes of the client, the conversation must be free for its next turn.
            await asyncio.shield(self._chat.run_to_end(self._release()))

    async def next_events(self, timeout_s: float | None) -> list[TurnEvent]:
        """As Turn.next_events; the response's own events are then pending. Raises ApiError when the turn broke."""
        with response_params():
            events = await self._turn.next_events(timeout_s)
        self.add(events)
        if self._turn.is_complete and not self.is_complete:
            # Not cancelled with the client: a turn that is complete is kept, or not, as a whole.
            await asyncio.shield(self._chat.run_to_end(self._commit()))
            self._pending += self.builder.complete()
        return events

    def deliver_to(self, receiver: EventReceiver | None) -> None:
        """As Turn.deliver_to."""
        self._turn.deliver_to(None if receiver is None else _RunReceiver(self, receiver))

    def add(self, events: list[TurnEvent]) -> None:
        """Make the response's own events of the turn's; they are then pending."""
        for event in events:
            self._pending += self.builder.add(event)

    def take(self) -> list[Event]:
        """The events since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def encode(self, events: list[TurnEvent]) -> bytes:
        """The frames of what is pending (`events` have made it so)."""
        return encode_events(self.take())

    def end(self) -> bytes:
        return b""

    def broken(self, error: errors.ApiError) -> bytes:
        return encode_events([*self.take(), *self.builder.fail(error)])

    def stored(self, *, lease_until_s: float = 0.0) -> StoredResponse:
        """The response as of now, for the store."""
        plan, body = self.plan, self.builder.response
        return StoredResponse(
            id=plan.id,
            created_s=self._created_s,
            status=body["status"],
            is_background=bool(plan.request.background),
            previous_id=plan.request.previous_response_id,
            conversation_id=plan.conversation_id,
            tag=plan.tag,
            lease_until_s=lease_until_s,
            input_items=plan.input_items,
            body=dict(body),
        )

    async def fail(self, error: errors.ApiError) -> None:
        """End it with an error; the events are pending. A background response is stored as failed."""
        self._pending += self.builder.fail(error)
        if self.plan.request.background:
            await self._store_end()

    async def cancel(self) -> None:
        """End it because its client called it off."""
        self._turn.close()
        if not self.is_complete:
            self._pending += self.builder.cancel()
            await self._store_end()

    async def _commit(self) -> None:
        """Keep the turn. Raises ApiError."""
        plan = self.plan
        is_kept_now = plan.request.is_stored and not plan.request.background
        try:
            if is_kept_now:
                await self._store.put_response(plan.tenant, self.stored())
            # Then the conversation: a turn that it holds must not be reported as failed.
            if plan.conversation_id is not None:
                items = [*plan.input_items, *self.builder.response["output"]]
                await self._store.append_items(plan.tenant, plan.conversation_id, items, lock=plan.lock)
                await self._release()
            if plan.request.background:
                await self._store.replace_running(plan.tenant, self.stored())
        except StoreDownError as error:
            log.warning("response %s could not be stored: %s", plan.id, error)
            raise store_is_down() from None
        except (ConversationLockedError, UnknownConversationError) as error:
            if is_kept_now:
                with contextlib.suppress(StoreDownError):
                    await self._store.delete_response(plan.tenant, plan.id)
            if isinstance(error, ConversationLockedError):
                raise conversation_locked() from None
            raise conversation_not_found(plan.conversation_id or "", "conversation") from None

    async def _store_end(self) -> None:
        """The end of a background response, unless another server has ended it meanwhile."""
        try:
            await self._store.replace_running(self.plan.tenant, self.stored())
        except StoreDownError as error:
            log.warning("the end of response %s could not be stored: %s", self.plan.id, error)

    async def _release(self) -> None:
        plan, token = self.plan, self.plan.lock
        plan.lock = None
        if token is not None and plan.conversation_id is not None:
            try:
                await self._store.unlock_conversation(plan.tenant, plan.conversation_id, token)
            except StoreDownError as error:
                log.warning("a conversation stays locked for a while: %s", error)

    async def _prolong(self) -> None:
        """Say from time to time that this server still works on it."""
        plan = self.plan
        while True:
            await asyncio.sleep(LEASE_S / 3)
            try:
                if plan.lock is not None and plan.conversation_id is not None:
                    await self._store.lock_conversation(plan.tenant, plan.conversation_id, plan.lock, LEASE_S)
                if plan.request.background:
                    stored = self.stored(lease_until_s=self._clock() + LEASE_S)
                    await self._store.replace_running(plan.tenant, stored)
            except (StoreDownError, ConversationLockedError, UnknownConversationError) as error:
                log.warning("response %s: its lease could not be prolonged: %s", plan.id, error)


class _RunReceiver:
    """Adds the turn's events to the response on their way."""

    def __init__(self, run: ResponseRun, receiver: EventReceiver) -> None:
        self._run = run
        self._receiver = receiver
        self.can_take = receiver.can_take

    def take(self, events: list[TurnEvent]) -> None:
        self._run.add(events)
        self._receiver.take(events)


def encode_events(events: list[Event]) -> bytes:
    return b"".join(event_stream.encode_named_event(event["type"], event) for event in events)
