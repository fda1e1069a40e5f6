"""What both kinds of engine handle share: the table of open requests and the way of events to them. No torch.

Runs in the server's asyncio event loop; how messages travel is up to ProcessEngine and InProcessEngine.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable

from turnkeep.engine.messages import (
    Abort,
    Admitted,
    CloseConversation,
    EndTurn,
    Expect,
    Failed,
    Finished,
    FromEngine,
    Loading,
    Prepare,
    ReadStats,
    Ready,
    Stats,
    Stop,
    Submit,
    ToEngine,
    Tokens,
)
from turnkeep.engine.request_events import RequestEvents

_NO_STATS = Stats(num_steps=0, num_running=0, num_waiting=0, num_suspended=0, num_free_pages=0, num_free_rows=0)


class EngineStartError(RuntimeError):
    """The engine could not start; the message says why (model not found, not enough memory with the numbers, ...)."""


class LocalHandle:
    """What both engines share: the table of open requests, and the events' way to them."""

    def __init__(self, on_loading: Callable[[Loading], None] | None) -> None:
        self._on_loading = on_loading
        self._open_requests: dict[str, RequestEvents] = {}
        self._stats = _NO_STATS
        self._stats_waiters: list[asyncio.Future[Stats]] = []
        self._started: asyncio.Future[Ready] | None = None
        self._is_alive = False
        self._last_heard_s = time.monotonic()

    @property
    def alive(self) -> bool:
        return self._is_alive

    @property
    def heartbeat_age_s(self) -> float:
        return time.monotonic() - self._last_heard_s

    @property
    def num_open_requests(self) -> int:
        """Requests that were submitted and have not had their Finished yet."""
        return len(self._open_requests)

    def submit(self, message: Submit) -> RequestEvents:
        request_id = message.request_id
        if request_id in self._open_requests:
            raise ValueError(f"a request with the id {request_id!r} is still open")
        events = RequestEvents(request_id, self._send_abort)
        if not self._is_alive:
            events.push(_engine_is_gone(request_id, "the engine is not running"))
            return events
        self._open_requests[request_id] = events
        self._send(message)
        return events

    def stop(self, request_id: str, num_repeated_tokens: int | None = None) -> None:
        self._send_if_alive(Stop(request_id, num_repeated_tokens))

    def end_turn(self, request_id: str, stable_tokens: int, has_tool_call: bool | None = None) -> None:
        self._send_if_alive(EndTurn(request_id, stable_tokens, has_tool_call))

    def prepare(self, message: Prepare) -> None:
        self._send_if_alive(message)

    def close_conversation(self, cache_root: str, conversation_id: str) -> None:
        self._send_if_alive(CloseConversation(cache_root, conversation_id))

    def expect(self, cache_root: str, conversation_id: str) -> None:
        self._send_if_alive(Expect(cache_root, conversation_id))

    def stats(self) -> Stats:
        return self._stats

    async def read_stats(self) -> Stats:
        if not self._is_alive:
            raise ConnectionError("the engine is not running")
        waiter: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        self._send(ReadStats())
        return await waiter

    @abstractmethod
    def _send(self, message: ToEngine) -> None:
        """Pass one message to the engine; never blocks, never raises because the engine died."""

    def _send_if_alive(self, message: ToEngine) -> None:
        if self._is_alive:
            self._send(message)

    def _send_abort(self, request_id: str) -> None:
        self._send_if_alive(Abort(request_id))

    def _deliver(self, events: list[FromEngine]) -> None:
        self._last_heard_s = time.monotonic()
        for event in events:
            if isinstance(event, (Tokens, Admitted)):
                open_request = self._open_requests.get(event.request_id)
                if open_request is not None:
                    open_request.push(event)
            elif isinstance(event, Finished):
                open_request = self._open_requests.pop(event.request_id, None)
                if open_request is not None:
                    open_request.push(event)
            elif isinstance(event, Stats):
                self._receive_stats(event)
            else:
                self._receive_start_event(event)

    def _receive_stats(self, stats: Stats) -> None:
        if stats.reading >= self._stats.reading:  # what a heartbeat repeats can be older than an answer before it
            self._stats = stats
        if stats.requested:
            waiters, self._stats_waiters = self._stats_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(self._stats)

    def _receive_start_event(self, event: Ready | Loading | Failed) -> None:
        if isinstance(event, Loading):
            if self._on_loading is not None:
                self._on_loading(event)
        elif self._started is not None and not self._started.done():
            if isinstance(event, Ready):
                self._is_alive = True
                self._started.set_result(event)
            else:
                self._started.set_exception(EngineStartError(event.message))

    def _engine_ended(self, message: str) -> None:
        """The engine is gone: end everything that waits for it. Idempotent."""
        self._is_alive = False
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineStartError(message))
        open_requests, self._open_requests = self._open_requests, {}
        for request_id, events in open_requests.items():
            events.push(_engine_is_gone(request_id, message))
        waiters, self._stats_waiters = self._stats_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(ConnectionError(message))


def _engine_is_gone(request_id: str, message: str) -> Finished:
    return Finished(request_id=request_id, reason="error", message=message)
