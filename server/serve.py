"""Runs one server: port, engine, HTTP, and the end of all three. The command line and the local clients use it."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec
from aiohttp import web

from turnkeep.engine.handle import EngineHandle, ProcessEngine
from turnkeep.engine.messages import Loading, Ready
from turnkeep.engine.scripted import text_source
from turnkeep.server.app import make_app, make_runner
from turnkeep.server.chat_service import ChatService
from turnkeep.server.config import ServerConfig
from turnkeep.server.engine_supervisor import EngineSupervisor
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.tenant_limits import make_limits
from turnkeep.server.text_model import TextModel

log = logging.getLogger(__name__)

MakeEngine = Callable[[ServerConfig, Callable[[Loading], None] | None], EngineHandle]


class PortTakenError(OSError):
    """Another program listens there. The message says what to do."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers."""

    url: str  # http://host:port
    service: ChatService
    supervisor: EngineSupervisor
    ready: Ready


def make_process_engine(config: ServerConfig, on_loading: Callable[[Loading], None] | None) -> EngineHandle:
    """The engine in its own process."""
    return ProcessEngine(config.engine, on_loading=on_loading)


def bind(host: str, port: int) -> socket.socket:
    """The listening socket, taken before anything slow is done. Raises PortTakenError, OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(
                f"port {port} on {host} is taken by another program; choose another one with --port"
            ) from None
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


@asynccontextmanager
async def running_server(
    config: ServerConfig,
    *,
    on_loading: Callable[[Loading], None] | None = None,
    make_engine: MakeEngine = make_process_engine,
) -> AsyncIterator[RunningServer]:
    """A server from its port to its end; while the model is loaded it already answers 503.

    Raises ModelNotFound, PortTakenError, OSError, EngineStartError.
    """
    text_model = TextModel.from_source(
        text_source(config.engine),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    metrics = ServerMetrics()
    numbers = itertools.count()

    def make_next_engine() -> EngineHandle:
        engine = msgspec.structs.replace(config.engine, start_number=next(numbers))
        return make_engine(replace(config, engine=engine), on_loading)

    supervisor = EngineSupervisor(make_next_engine, metrics)
    service = ChatService(
        text_model,
        supervisor,
        metrics,
        served_names=config.served_model_names,
        accept_any_model=config.accept_any_model,
        max_waiting=config.max_waiting,
        limits=make_limits(config),
    )
    runner = make_runner(make_app(service, supervisor, metrics, config), config)
    listener = bind(config.host, config.port)
    try:
        await runner.setup()
        await web.SockSite(runner, listener).start()
        ready = await supervisor.start()
        yield RunningServer(_url(config.host, listener.getsockname()[1]), service, supervisor, ready)
    finally:
        service.is_draining = True
        # The engine ends first: streams that still run get an error, never a clean end.
        await supervisor.close()
        await service.close()
        await runner.cleanup()
        listener.close()


async def serve_until_signal(
    config: ServerConfig,
    on_ready: Callable[[RunningServer], None],
    *,
    on_loading: Callable[[Loading], None] | None = None,
    make_engine: MakeEngine = make_process_engine,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain. A second signal cuts the drain short."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    is_ready = False

    async def serve() -> None:
        nonlocal is_ready
        async with running_server(config, on_loading=on_loading, make_engine=make_engine) as server:
            is_ready = True
            calm_garbage_collector()
            on_ready(server)
            await stop.wait()
            await drain(server.service, config.drain_s, hurry)

    serving = asyncio.create_task(serve())

    def on_signal() -> None:
        if not is_ready:
            serving.cancel()  # nothing runs yet that could be drained
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await serving
    except asyncio.CancelledError:
        log.info("stopped while the model was loaded")
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def calm_garbage_collector() -> None:
    """Look less often for cycles, and never again at what the start has made: streams make many short-lived objects,
    and a full collection would hold all of them up."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def drain(service: ChatService, limit_s: float, hurry: asyncio.Event) -> None:
    """Take no new turns and wait until the running ones are done, at most limit_s."""
    service.is_draining = True
    log.info("shutting down: %d turns still run", service.num_open_turns)
    try:
        async with asyncio.timeout(limit_s):
            while service.num_open_turns and not hurry.is_set():
                await asyncio.sleep(0.05)
    except TimeoutError:
        log.warning("%d turns did not finish within %.0f s and are cut off", service.num_open_turns, limit_s)


def _url(host: str, port: int) -> str:
    shown = "127.0.0.1" if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
