"""The events of one request as an async iterator, on the server's side of the line.

Tokens that the consumer has not taken yet are merged into one event: a slow consumer neither stalls the engine nor
piles up events. Everything here runs in the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from turnkeep.engine.coalescing import merge_tokens
from turnkeep.engine.messages import Admitted, Finished, Tokens

RequestEvent = Admitted | Tokens | Finished


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
        self._ready = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """The engine ended the request; events may still wait to be taken."""
        return self._is_finished

    def push(self, event: RequestEvent) -> None:
        """The handle delivers one event."""
        if isinstance(event, Tokens):
            if self._tokens is None:
                self._tokens = event
            else:
                merge_tokens(self._tokens, event)
        elif isinstance(event, Admitted):
            self._admitted = event
        else:
            self._finished = event
            self._is_finished = True
        self._ready.set()

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
        self._ready.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            self.close()
            raise
        return True

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
            self._ready.clear()
            try:
                await self._ready.wait()
            except asyncio.CancelledError:
                self.close()
                raise

    def _has_event(self) -> bool:
        return self._admitted is not None or self._tokens is not None or self._finished is not None
