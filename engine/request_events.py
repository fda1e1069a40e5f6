"""The events of one request as an async iterator, on the server's side of the line.

Tokens that the consumer has not taken yet are merged into one event: a slow consumer neither stalls the engine nor
piles up events. Everything here runs in the server's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from turnkeep.engine.coalescing import merge_tokens
from turnkeep.engine.messages import Admitted, Finished, Tokens

RequestEvent = Admitted | Tokens | Finished

TIMER_SLACK_S = 0.001  # event loops may fire a timer a little early


class TokenReceiver(Protocol):
    """Who wants tokens at once, without being woken up for each."""

    def can_take(self) -> bool:
        """Whether take() may be called now; otherwise the tokens wait as usual."""

    def take(self, tokens: Tokens) -> None:
        """Must not block. What it raises comes out of the wait that is going on."""


class RequestEvents:
    """Iterate to get Admitted, any number of Tokens, and exactly one Finished, after which the iteration ends.

    Closing it, leaving its `async with` block, or cancelling a task that waits in it sends Abort to the engine when
    the request is not finished. After `close()` one may go on iterating to see the Finished(abort).
    """

    def __init__(self, request_id: str, send_abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._send_abort = send_abort
        self._admitted: Admitted | None = None
        self._tokens: Tokens | None = None
        self._finished: Finished | None = None
        self._is_finished = False  # the engine has ended the request (Finished may not be taken yet)
        self._is_aborted = False
        self._waiter: asyncio.Future[bool] | None = None
        self._receiver: TokenReceiver | None = None
        # One timer serves all waits: setting one up for each token would cost as much as the token's way to the client.
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = math.inf  # of the present wait, by the event loop's clock

    @property
    def is_finished(self) -> bool:
        """The engine ended the request; events may still wait to be taken."""
        return self._is_finished

    def push(self, event: RequestEvent) -> None:
        """The handle delivers one event."""
        waiter = self._waiter
        is_awaited = waiter is not None and not waiter.done()
        if isinstance(event, Tokens):
            # Whoever is in a wait has taken everything before: nothing is overtaken.
            if self._receiver is not None and is_awaited and self._give(event):
                return
            if self._tokens is None:
                self._tokens = event
            else:
                merge_tokens(self._tokens, event)
        elif isinstance(event, Admitted):
            self._admitted = event
        else:
            self._finished = event
            self._is_finished = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if is_awaited:
            assert waiter is not None
            waiter.set_result(True)

    def deliver_to(self, receiver: TokenReceiver | None) -> None:
        """Give tokens that arrive during a wait to the receiver; the wait goes on. A task need not be woken up then,
        which is most of what one token costs. None: no longer."""
        self._receiver = receiver

    def _give(self, tokens: Tokens) -> bool:
        assert self._receiver is not None
        try:
            if not self._receiver.can_take():
                return False
            self._receiver.take(tokens)
        except Exception as error:  # it concerns this request alone: the handle delivers to all of them
            self._receiver = None
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(error)
        return True

    def take(self) -> RequestEvent | None:
        """The next waiting event, or None."""
        event: RequestEvent | None
        if self._admitted is not None:
            event, self._admitted = self._admitted, None
        elif self._tokens is not None:
            event, self._tokens = self._tokens, None
        else:
            event, self._finished = self._finished, None
        return event

    async def wait(self, timeout_s: float) -> bool:
        """Wait until an event is there or the iteration is over; False after `timeout_s` without one.

        For keep-alives: unlike a timeout around the iteration itself, it does not abort the request.
        """
        if self._has_event() or self._is_finished:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        self._waiter = waiter
        if timeout_s == math.inf:
            self._deadline_s = math.inf
        else:
            self._deadline_s = loop.time() + timeout_s
            self._set_timer(loop)
        try:
            return await waiter
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            if self._waiter is waiter:
                self._waiter = None

    def _set_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """A timer that fires too early looks at the deadline then; only one that would fire too late is replaced."""
        if self._timer is not None:
            if self._timer.when() <= self._deadline_s:
                return
            self._timer.cancel()
        self._timer = loop.call_at(self._deadline_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        waiter = self._waiter
        if waiter is None or waiter.done() or self._deadline_s == math.inf:
            return
        loop = waiter.get_loop()
        if loop.time() >= self._deadline_s - TIMER_SLACK_S:
            waiter.set_result(False)
        else:
            self._set_timer(loop)

    def close(self) -> None:
        """Abort the request unless it is finished. Idempotent."""
        if not self._is_finished and not self._is_aborted:
            self._is_aborted = True
            self._send_abort(self.request_id)

    async def aclose(self) -> None:
        """As close(), for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> RequestEvents:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> RequestEvents:
        return self

    async def __anext__(self) -> RequestEvent:
        while True:
            event = self.take()
            if event is not None:
                return event
            if self._is_finished:
                raise StopAsyncIteration
            await self.wait(math.inf)

    def _has_event(self) -> bool:
        return self._admitted is not None or self._tokens is not None or self._finished is not None
