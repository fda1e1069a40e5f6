"""Responses that run without a client: their events are kept for a while, to be followed and followed again.

Bounded: ended runs go after a time, the oldest first beyond a number of runs or events. What is stored stays there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator

from turnkeep.server import errors
from turnkeep.server.responses.answers import Event
from turnkeep.server.responses.plan import LEASE_S, store_is_down
from turnkeep.server.responses.run import ResponseRun
from turnkeep.server.responses.service import ResponsesService
from turnkeep.server.stores import StoreDownError, StoredResponse

log = logging.getLogger(__name__)

MAX_ENDED_RUNS = 256
MAX_ENDED_EVENTS = 200_000  # of all ended runs together; some hundred bytes each
ENDED_RUN_TTL_S = 600.0

Key = tuple[str, str]  # tenant, response id


class BackgroundRun:
    """One run and its events so far."""

    def __init__(self, run: ResponseRun) -> None:
        self.run = run
        self.events: list[Event] = run.take()
        self.ended_s: float | None = None
        self.task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def follow(self, starting_after: int, timeout_s: float) -> AsyncIterator[list[Event]]:
        """The events after a sequence number, as they come, to the end; an empty list after timeout_s without any."""
        position = starting_after + 1
        while True:
            changed = self._changed
            events = self.events[position:]
            position += len(events)
            if events:
                yield events
            elif self.ended_s is not None:
                return
            else:
                try:
                    await asyncio.wait_for(changed.wait(), timeout_s)
                except TimeoutError:
                    yield []

    def publish(self) -> None:
        """Make what is pending visible to all who follow."""
        self.events += self.run.take()
        self._changed.set()
        self._changed = asyncio.Event()


class BackgroundRuns:
    """All of this server."""

    def __init__(self, service: ResponsesService) -> None:
        self._service = service
        self._runs: OrderedDict[Key, BackgroundRun] = OrderedDict()

    async def start(self, run: ResponseRun) -> BackgroundRun:
        """Store the response as queued and let it run. Raises ApiError 503 when it cannot be stored."""
        plan, store = run.plan, self._service.store
        try:
            await store.put_response(plan.tenant, run.stored(lease_until_s=self._service.clock() + LEASE_S))
        except BaseException as error:
            async with run:  # ends it
                pass
            if isinstance(error, StoreDownError):
                raise store_is_down() from None
            raise
        background = BackgroundRun(run)
        self._forget()
        self._runs[(plan.tenant, plan.id)] = background
        background.task = asyncio.create_task(self._work(background))
        return background

    def find(self, tenant: str, response_id: str) -> BackgroundRun | None:
        """Running, or ended not long ago."""
        self._forget()
        return self._runs.get((tenant, response_id))

    async def cancel(self, tenant: str, response_id: str) -> None:
        """End a run of this server. Nothing happens when there is none or it has ended."""
        background = self._runs.get((tenant, response_id))
        if background is not None and background.task is not None:
            background.task.cancel()
            await asyncio.gather(background.task, return_exceptions=True)

    def drop(self, tenant: str, response_id: str) -> None:
        self._runs.pop((tenant, response_id), None)

    async def close(self) -> None:
        """End what still runs."""
        for tenant, response_id in list(self._runs):
            await self.cancel(tenant, response_id)

    async def _work(self, background: BackgroundRun) -> None:
        run = background.run
        try:
            async with run:
                try:
                    while not run.is_complete:
                        await run.next_events(None)
                        background.publish()
                except errors.ApiError as error:
                    await run.fail(error)
                except asyncio.CancelledError:
                    await run.cancel()
                except Exception:
                    log.exception("response %s failed in the background", run.plan.id)
                    await run.fail(errors.internal())
        finally:
            background.ended_s = self._service.clock()
            background.publish()

    def _forget(self) -> None:
        limit_s = self._service.clock() - ENDED_RUN_TTL_S
        num_runs = num_events = 0
        for key, one in reversed(list(self._runs.items())):
            if one.ended_s is None:
                continue
            num_runs, num_events = num_runs + 1, num_events + len(one.events)
            if one.ended_s < limit_s or num_runs > MAX_ENDED_RUNS or num_events > MAX_ENDED_EVENTS:
                del self._runs[key]


def as_seen(stored: StoredResponse, now_s: float) -> StoredResponse:
    """A running response whose server has not been heard of has failed."""
    if stored.is_running and stored.lease_until_s < now_s:
        failure = {"code": "server_error", "message": "The server that worked on this response has stopped."}
        stored.status = "failed"
        stored.body |= {"status": "failed", "error": failure}
    return stored
