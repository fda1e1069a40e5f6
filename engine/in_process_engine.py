"""An engine in a thread of this process, behind the same handle as the process one: for tests and offline use.

The loop still belongs to one thread; messages and events cross by two buffers. Importing this needs no torch, the
default builder imports it in the engine's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from turnkeep.engine.coalescing import EventBuffer
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.environment import engine_environment
from turnkeep.engine.local_handle import LocalHandle
from turnkeep.engine.messages import Failed, FromEngine, Loading, Ready, Shutdown, ToEngine

if TYPE_CHECKING:
    from turnkeep.engine.loop import EngineLoop

log = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 1.0

LoopBuilder = Callable[[EngineConfig, Callable[[FromEngine], None]], "tuple[EngineLoop, Ready]"]


def build_from_model(config: EngineConfig, outbox: Callable[[FromEngine], None]) -> tuple[EngineLoop, Ready]:
    """The default builder: load the configured model, which imports torch, or follow the configured script."""
    if config.script is not None:
        from turnkeep.engine.scripted import build_scripted_engine

        return build_scripted_engine(config, outbox)
    if "torch" not in sys.modules:  # the OpenMP runtime reads its variables at that import
        os.environ.update(engine_environment(config.num_threads, os.environ))
    from turnkeep.engine.factory import build_engine

    return build_engine(config, outbox)


class InProcessEngine(LocalHandle):
    """EngineHandle over a thread. `build` makes the loop in that thread (default: from the configured model)."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        build: LoopBuilder = build_from_model,
        on_loading: Callable[[Loading], None] | None = None,
    ) -> None:
        super().__init__(on_loading)
        self._config = config
        self._build = build
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two fields below
        self._outbox = EventBuffer()
        self._is_delivery_scheduled = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event = asyncio.Event()

    async def start(self) -> Ready:
        """Build the loop in its thread and wait until it is ready. Raises EngineStartError."""
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="turnkeep-engine", daemon=True)
        self._thread.start()
        return await self._started

    async def close(self) -> None:
        if self._thread is None:
            return
        self._inbox.put(Shutdown())
        await self._ended.wait()
        self._thread.join()
        self._thread = None

    def _send(self, message: ToEngine) -> None:
        self._inbox.put(message)

    def _run(self) -> None:
        """The engine's thread."""
        message = "the engine was closed"
        try:
            self._drive()
        except Exception as error:
            log.exception("the engine ended")
            message = f"the engine ended: {type(error).__name__}: {error}"
            self._put(Failed(str(error)))
        finally:
            self._call_in_loop(self._receive_end, message)

    def _drive(self) -> None:
        loop, ready = self._build(self._config, self._put)
        self._put(ready)
        is_busy = True
        while not loop.is_shut_down:
            try:
                timeout_s = 0.0 if is_busy or loop.has_work else HEARTBEAT_PERIOD_S
                loop.receive(self._inbox.get(block=timeout_s > 0, timeout=timeout_s))
            except queue.Empty:
                is_busy = loop.step()

    def _put(self, event: FromEngine) -> None:
        """Called in the engine's thread."""
        with self._lock:
            self._outbox.put(event)
            if self._is_delivery_scheduled:
                return
            self._is_delivery_scheduled = True
        self._call_in_loop(self._deliver_waiting)

    def _call_in_loop(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the event loop was closed before the engine: nobody is left to tell
            self._inbox.put(Shutdown())

    def _deliver_waiting(self) -> None:
        with self._lock:
            events = self._outbox.take()
            self._is_delivery_scheduled = False
        self._deliver(events)

    def _receive_end(self, message: str) -> None:
        self._deliver_waiting()
        self._engine_ended(message)
        self._ended.set()
