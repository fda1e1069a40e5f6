"""POST /v1/completions over HTTP: every prompt of the body is a turn of its own, and their events are one answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack

from aiohttp import web

from turnkeep.server import errors
from turnkeep.server.chat_answers import AnswerFrame
from turnkeep.server.chat_service import ChatService
from turnkeep.server.completions import (
    CompletionEvents,
    CompletionStream,
    parse_completion_request,
    prompts_of,
    shifted,
    to_sampling_request,
)
from turnkeep.server.config import ServerConfig
from turnkeep.server.http_guard import TENANT, json_response
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.request_body import read_body
from turnkeep.server.turn import EventReceiver, Turn
from turnkeep.server.turn_events import TurnEvent
from turnkeep.server.turn_stream import TurnStream


class TurnGroup:
    """Several turns as one source of events. Close it before the turns are left."""

    def __init__(self, turns: list[Turn]) -> None:
        self._turns = turns
        self._waits: dict[int, asyncio.Task[list[TurnEvent]]] = {}

    @property
    def is_complete(self) -> bool:
        return all(turn.is_complete for turn in self._turns)

    async def next_events(self, timeout_s: float | None) -> list[TurnEvent]:
        """As Turn.next_events; the choices of all turns are numbered through."""
        if len(self._turns) == 1:
            return await self._turns[0].next_events(timeout_s)
        for number, turn in enumerate(self._turns):
            if not turn.is_complete and number not in self._waits:
                self._waits[number] = asyncio.create_task(turn.next_events(None))
        await asyncio.wait(self._waits.values(), timeout=timeout_s, return_when="FIRST_COMPLETED")
        events: list[TurnEvent] = []
        for number in [number for number, wait in self._waits.items() if wait.done()]:
            first = sum(turn.num_choices for turn in self._turns[:number])
            events += [shifted(event, first) for event in self._waits.pop(number).result()]
        return events

    def deliver_to(self, receiver: EventReceiver | None) -> None:
        """As Turn.deliver_to, for an only turn."""
        if len(self._turns) == 1:
            self._turns[0].deliver_to(receiver)

    async def close(self) -> None:
        """End the waiting. Idempotent."""
        waits, self._waits = self._waits, {}
        for wait in waits.values():
            wait.cancel()
        await asyncio.gather(*waits.values(), return_exceptions=True)


class CompletionsEndpoint:
    """The handler; one instance serves all requests."""

    def __init__(self, service: ChatService, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._service = service
        self._stream = TurnStream(config, metrics)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Continue bare texts or token ids. A client that goes away aborts all of them."""
        arrival_s = time.monotonic()
        self._service.check_open()
        body = await read_body(request, parse_completion_request)
        if not self._service.serves(body.model):
            raise errors.model_not_found(body.model)
        prompts, sampling = prompts_of(body), to_sampling_request(body)
        async with AsyncExitStack() as stack:
            turns: list[Turn] = []
            for prompt in prompts:
                turn = await self._service.start_text(sampling, prompt, arrival_s, request[TENANT])
                turns.append(await stack.enter_async_context(turn))
            group = TurnGroup(turns)
            stack.push_async_callback(group.close)
            events = CompletionEvents(
                AnswerFrame(body.model, self._service.fingerprint, id=f"cmpl-{uuid.uuid4().hex}"),
                num_choices=body.n or 1,
                echoes=[turn.prompt.encoded.text if body.echo else "" for turn in turns],
                token_ids=bool(body.return_token_ids),
            )
            if body.stream:
                with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
                return await self._stream.write(request, group, CompletionStream(events, with_usage=with_usage))
            while not group.is_complete:
                for event in await group.next_events(None):
                    events.convert(event)
            return json_response(events.body())
