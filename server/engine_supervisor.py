"""Keeps an engine running: starts it, notices when it dies, starts a new one with growing pauses.

Knows the engine by its handle only. Requests of a dead engine end with an error by themselves (engine/handle.py);
what asks for an engine meanwhile is told 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from turnkeep.engine.handle import EngineHandle, EngineStartError
from turnkeep.engine.messages import Ready, Stats
from turnkeep.server import errors
from turnkeep.server.metrics import ServerMetrics

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
WATCH_INTERVAL_S = 0.25
HANG_S = 60.0  # an engine that sends no heartbeat for so long is taken for dead: even long steps do not stop them
STATS_TIMEOUT_S = 1.0
NUM_HANG_CHECKS = 4  # seen so often in a row: once may only mean that this process was stopped itself

EngineState = Literal["loading", "ready", "restarting", "closed"]


class EngineSupervisor:
    """Owns the handle of the engine that runs now."""

    def __init__(
        self,
        make_engine: Callable[[], EngineHandle],
        metrics: ServerMetrics,
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        watch_interval_s: float = WATCH_INTERVAL_S,
    ) -> None:
        self.state: EngineState = "loading"
        self.ready: Ready | None = None
        self._make_engine = make_engine
        self._metrics = metrics
        self._first_pause_s = first_pause_s
        self._watch_interval_s = watch_interval_s
        self._handle: EngineHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> Ready:
        """Start the first engine. Raises EngineStartError: what fails at once will not get better by trying again."""
        ready = await self._start_engine()
        self._watcher = asyncio.create_task(self._watch(), name="engine-watcher")
        return ready

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and self._handle is not None and self._handle.alive

    def engine(self) -> EngineHandle:
        """The engine that can take requests now. Raises ApiError 503 when there is none."""
        if self.is_ready:
            assert self._handle is not None
            return self._handle
        if self.state == "loading":
            raise errors.unavailable("The model is still being loaded.", retry_after_s=2)
        raise errors.unavailable("The engine is not running at the moment.", retry_after_s=2)

    async def read_stats(self) -> Stats | None:
        """The engine's numbers as of now, in the metrics too; the newest heartbeat when it does not answer soon.

        None without an engine.
        """
        handle = self._handle
        self._metrics.engine_up.set(1 if self.is_ready else 0)
        if handle is None or not self.is_ready:
            return None
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await handle.read_stats()
        except (TimeoutError, ConnectionError):
            stats = handle.stats()
        if handle is not self._handle or not self.is_ready:
            return None
        self._metrics.engine.update(stats)
        return stats

    async def close(self) -> None:
        """End the watcher and the engine. Idempotent."""
        self.state = "closed"
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._handle is not None:
            await self._handle.close()

    async def _start_engine(self) -> Ready:
        self._handle = handle = self._make_engine()
        self.ready = ready = await handle.start()
        self.state = "ready"
        return ready

    async def _watch(self) -> None:
        """A death loses what the engine counted since its last heartbeat, so those are taken as they come."""
        pause_s = self._first_pause_s
        num_hanging = 0
        while True:
            await asyncio.sleep(self._watch_interval_s)
            handle = self._handle
            hangs = handle is not None and handle.heartbeat_age_s > HANG_S
            num_hanging = num_hanging + 1 if hangs else 0
            if self.is_ready and num_hanging < NUM_HANG_CHECKS:
                pause_s = max(self._first_pause_s, pause_s * 0.9)  # a long quiet time makes up for past deaths
                if handle is not None:
                    self._metrics.engine.update(handle.stats())
                continue
            self.state, num_hanging = "restarting", 0
            log.error("the engine died; starting a new one in %.1f s", pause_s)
            if handle is not None:
                await handle.close()
            self._metrics.engine.engine_restarted()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)
            self._metrics.engine_restarts.inc()
            try:
                await self._start_engine()
                log.info("the engine runs again")
            except EngineStartError as error:
                log.error("the engine could not be started again: %s", error)
