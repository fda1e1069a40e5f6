"""An engine in its own process: starts it, speaks frames with it over a socket pair, notices its end. No torch."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import turnkeep
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.environment import engine_environment
from turnkeep.engine.framing import FrameDecoder, FramingError, decode_events, encode_frame
from turnkeep.engine.local_handle import EngineStartError, LocalHandle
from turnkeep.engine.messages import FromEngine, Loading, Ready, Shutdown, ToEngine

log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 10.0
TERMINATE_TIMEOUT_S = 5.0


class ProcessEngine(LocalHandle):
    """EngineHandle over a child process. The child ends when this process or its end of the socket is gone."""

    def __init__(self, config: EngineConfig, *, on_loading: Callable[[Loading], None] | None = None) -> None:
        super().__init__(on_loading)
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._ended = asyncio.Event()
        self._is_closing = False

    @property
    def pid(self) -> int | None:
        """Process id of the engine, while it was started and not closed."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> Ready:
        """Start the process, load the model, wait until it is ready. Raises EngineStartError."""
        loop = asyncio.get_running_loop()
        self._started = loop.create_future()
        ours, theirs = socket.socketpair()
        try:
            self._process = self._spawn(theirs.fileno())
        except OSError as error:
            ours.close()
            raise EngineStartError(f"the engine process could not be started: {error}") from error
        finally:
            theirs.close()
        try:
            self._transport, _ = await loop.create_unix_connection(lambda: _EngineProtocol(self), sock=ours)
            self._transport.write(encode_frame(self._config))
            return await self._started
        except (EngineStartError, OSError, asyncio.CancelledError):
            self._started.cancel()
            await self.close()
            raise

    async def close(self) -> None:
        process = self._process
        if process is None:
            return
        self._is_closing = True
        if self._is_alive:
            await self._shut_down()
        elif process.poll() is None:
            process.terminate()  # it is still loading, and would read a message only afterwards
        if self._transport is not None:
            self._transport.close()
        await asyncio.to_thread(_end_process, process)
        self._process = None
        self._engine_ended("the engine was closed")

    async def _shut_down(self) -> None:
        """Let the engine finish its step and leave by itself."""
        self._send(Shutdown())
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self._ended.wait()
        except TimeoutError:
            log.warning("the engine did not leave within %.0f s, ending its process", SHUTDOWN_TIMEOUT_S)

    def _spawn(self, descriptor: int) -> subprocess.Popen[bytes]:
        environment = engine_environment(self._config.num_threads, os.environ)
        # The child must find the package where this process found it, whatever put it on our path; -P keeps the
        # working directory's files from hiding modules.
        source = str(Path(turnkeep.__file__).parent.parent)
        inherited = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = source if not inherited else os.pathsep.join((source, inherited))
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "turnkeep.engine.process", str(descriptor)],
            pass_fds=(descriptor,),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal reaches the server only, which decides
        )

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def _receive(self, events: list[FromEngine]) -> None:
        self._deliver(events)

    def _connection_ended(self) -> None:
        if self._is_closing:
            message = "the engine was closed"
        else:
            message = "the engine process ended unexpectedly; its log on standard error says more"
            if self._is_alive:
                log.error(message)
        self._engine_ended(message)
        self._ended.set()


class _EngineProtocol(asyncio.Protocol):
    """Cuts the stream from the engine into events."""

    def __init__(self, engine: ProcessEngine) -> None:
        self._engine = engine
        self._decoder = FrameDecoder()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._decoder.feed(data):
                self._engine._receive(decode_events(body))
        except FramingError:
            log.exception("the engine sent what is not an event; leaving it")
            if self._transport is not None:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._engine._connection_ended()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Wait for the process to leave, more firmly each time. Blocks; runs in a worker thread."""
    for end in (None, process.terminate, process.kill):
        if end is not None:
            end()
        try:
            process.wait(TERMINATE_TIMEOUT_S)
            return
        except subprocess.TimeoutExpired:
            continue
