"""Starts responses: a plan, room for its prompt, the turn of the chat service. Knows no HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from turnkeep.server import errors
from turnkeep.server.chat_service import ChatService
from turnkeep.server.responses.answers import ResponseBuilder, response_object
from turnkeep.server.responses.chat_body import response_params
from turnkeep.server.responses.item_messages import Message
from turnkeep.server.responses.plan import Link, Plan, Planner, store_is_down
from turnkeep.server.responses.run import ResponseRun
from turnkeep.server.responses.shapes import ResponsesRequest
from turnkeep.server.responses.truncation import drop_middle
from turnkeep.server.stores import Store, StoreDownError
from turnkeep.server.turn import Turn

log = logging.getLogger(__name__)

ENCRYPTED = "reasoning.encrypted_content"


class ResponsesService:
    """One instance serves all requests. The clock gives Unix seconds."""

    def __init__(self, chat: ChatService, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self.chat = chat
        self.store = store
        self.planner = Planner(store)
        self.clock = clock

    async def start(
        self,
        request: ResponsesRequest,
        headers: Mapping[str, str],
        tenant: str,
        arrival_s: float,
        *,
        link: Link | None = None,
        is_session: bool = False,
    ) -> ResponseRun:
        """Submit one response; the caller uses the run inside `async with`. link, is_session: as for Planner.plan.

        Raises ApiError for what can be refused before the engine sees it; nothing is held then.
        """
        self.chat.check_open()
        if request.is_stored:
            await self._check_store()
        plan = await self.plan(request, headers, tenant, link=link, is_session=is_session)
        try:
            with response_params():
                turn = await self.start_turn(plan, headers, arrival_s)
        except BaseException:
            await self.planner.release(plan)
            raise
        created_s = self.clock()
        body = response_object(plan.id, request, plan.tools, self.chat.text_model.sampling_defaults, created_s)
        builder = ResponseBuilder(
            body,
            plan.tools,
            plan.make_output_id,
            summary=request.wants_summary,
            encrypted=request.includes(ENCRYPTED),
            is_queued=bool(request.background),
        )
        return ResponseRun(self.chat, self.store, plan, turn, builder, created_s=created_s, clock=self.clock)

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
        """As Planner.plan, for a model that is served."""
        if not self.chat.serves(request.model):
            raise errors.model_not_found(request.model)
        return await self.planner.plan(request, headers, tenant, link=link, locks=locks, is_session=is_session)

    async def start_turn(self, plan: Plan, headers: Mapping[str, str], arrival_s: float) -> Turn:
        """Submit the messages of a plan, cut to fit where that is wanted. Raises ApiError."""
        if plan.request.truncation == "auto":
            await self._truncate(plan, headers)
        return await self.chat.start_turn(plan.chat(), headers, plan.tenant, arrival_s)

    async def count_tokens(self, request: ResponsesRequest, headers: Mapping[str, str], tenant: str) -> int:
        """Prompt tokens of the same request, by the same walk. Raises ApiError."""
        plan = await self.plan(request, headers, tenant, locks=False)
        with response_params():
            return await self._count(plan, plan.messages, headers)

    async def _check_store(self) -> None:
        """Before tokens are spent on a response that could not be kept."""
        try:
            await self.store.check()
        except StoreDownError:
            raise store_is_down() from None

    async def _truncate(self, plan: Plan, headers: Mapping[str, str]) -> None:
        limit = self.chat.max_model_len
        if limit is None:
            return
        wanted = plan.request.max_output_tokens or limit
        room = min(wanted, limit // 4)

        async def count(messages: list[Message]) -> int:
            return await self._count(plan, messages, headers)

        plan.messages, num_dropped = await drop_middle(plan.messages, count, limit - 1 - room)
        if num_dropped:
            log.warning("response %s: %d messages were left out to fit the context", plan.id, num_dropped)

    async def _count(self, plan: Plan, messages: list[Message], headers: Mapping[str, str]) -> int:
        plan.messages = messages
        _, prompt, _, _ = await self.chat.prepare(plan.chat(), headers, plan.tenant)
        return len(prompt.encoded.token_ids)
