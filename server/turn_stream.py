"""Writes the events of a turn as a stream, whatever the API shape: keep-alives, slow starts, broken streams.

The status is sent when the turn is admitted, so that a refusal still gets a real status; after a while of waiting it is
sent all the same, because proxies cut silent connections. A stream that breaks is never ended cleanly: clients would
take what they have for the whole answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, cast

from aiohttp import web

from turnkeep.server import errors, event_stream
from turnkeep.server.config import ServerConfig
from turnkeep.server.http_guard import REQUEST_ID
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.turn import EventReceiver
from turnkeep.server.turn_events import TurnEvent

log = logging.getLogger(__name__)

SMALL_WRITE_BYTES = 1 << 15


class EventSource(Protocol):
    """Where the events come from: a Turn, or several."""

    @property
    def is_complete(self) -> bool:
        """Nothing more will come."""

    async def next_events(self, timeout_s: float | None) -> list[TurnEvent]:
        """As Turn.next_events."""

    def deliver_to(self, receiver: EventReceiver | None) -> None:
        """As Turn.deliver_to."""


class StreamShape(Protocol):
    """How one API writes events. The frames are made in the order of the calls."""

    def encode(self, events: list[TurnEvent]) -> bytes:
        """The frames of some events; empty when there is nothing that this client wants to see."""

    def end(self) -> bytes:
        """The frames after the last event."""

    def broken(self, error: errors.ApiError) -> bytes:
        """The frame that says why the stream ends early."""


class _DirectWriter:
    """Writes events to a connection whose buffer is empty, each as an HTTP chunk of its own, past the framework."""

    def __init__(self, transport: asyncio.Transport | asyncio.BaseTransport, shape: StreamShape) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._shape = shape
        self.last_write_s = -math.inf

    def can_take(self) -> bool:
        return not self._transport.get_write_buffer_size() and not self._transport.is_closing()

    def take(self, events: list[TurnEvent]) -> None:
        data = self._shape.encode(events)
        if data:
            self.write(data)

    def write(self, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.last_write_s = time.monotonic()


class TurnStream:
    """Streams turns over HTTP; one instance serves all requests."""

    def __init__(self, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._config = config
        self._metrics = metrics

    async def write(self, request: web.Request, source: EventSource, shape: StreamShape) -> web.StreamResponse:
        """The whole stream. Raises ApiError while the status is still open: a refusal comes before anything else."""
        events = await source.next_events(self._config.status_delay_s)
        response = web.StreamResponse(headers=event_stream.HEADERS)
        try:
            await response.prepare(request)
            await self._write_events(request, response, source, shape, events)
        except ConnectionError:
            log.info("request %s: the client went away", request[REQUEST_ID])
        except errors.ApiError as error:
            await self._break_off(request, response, shape, error)
        except Exception:
            log.exception("request %s failed after its answer had begun", request[REQUEST_ID])
            await self._break_off(request, response, shape, errors.internal())
        return response

    async def _write_events(
        self,
        request: web.Request,
        response: web.StreamResponse,
        source: EventSource,
        shape: StreamShape,
        events: list[TurnEvent],
    ) -> None:
        last_write_s = -math.inf
        direct: _DirectWriter | None = None
        while True:
            data = shape.encode(events)
            if source.is_complete:
                source.deliver_to(None)
                # In one write with the end of the body: clients stop reading at the last event.
                await self._send(request, response.write_eof, data + shape.end())
                return
            now_s = time.monotonic()
            if direct is not None:
                last_write_s = max(last_write_s, direct.last_write_s)
            if not data and now_s - last_write_s >= self._config.comment_interval_s:
                data = event_stream.KEEP_ALIVE
            if data:
                # Into an empty buffer a small piece never waits: almost every token goes this way.
                if direct is not None and len(data) < SMALL_WRITE_BYTES and direct.can_take():
                    direct.write(data)
                else:
                    await self._send(request, response.write, data)
                if direct is None and request.transport is not None and _is_chunked(response):
                    # The first write carried the head of the answer and was left to the framework.
                    direct = _DirectWriter(request.transport, shape)
                    source.deliver_to(direct)
                last_write_s = now_s
            events = await source.next_events(self._config.comment_interval_s - (now_s - last_write_s))

    async def _send(
        self, request: web.Request, write: Callable[[bytes], Coroutine[Any, Any, None]], data: bytes
    ) -> None:
        """Write, and give a client up that has not taken anything for long. What waits for it stays small: tokens are
        merged while a write waits, and a write waits from 64 KiB on. Raises ConnectionError."""
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the connection is closed")
        try:
            async with asyncio.timeout(self._config.write_timeout_s):
                await write(data)
        except TimeoutError:
            self._metrics.slow_readers.inc()
            transport.abort()
            message = f"the client took nothing for {self._config.write_timeout_s:.0f} s"
            raise ConnectionAbortedError(message) from None

    async def _break_off(
        self, request: web.Request, response: web.StreamResponse, shape: StreamShape, error: errors.ApiError
    ) -> None:
        """Say what happened in the stream, then close the connection without the end that HTTP asks for."""
        self._metrics.errors.labels(str(error.status)).inc()
        try:
            await response.write(shape.broken(error))
        except ConnectionError:
            return
        if request.transport is not None:
            request.transport.close()


def _is_chunked(response: web.StreamResponse) -> bool:
    return response.headers.get("Transfer-Encoding") == "chunked"
