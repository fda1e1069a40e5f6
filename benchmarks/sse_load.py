"""Many concurrent streams through the whole server, against a bare aiohttp handler that writes the same events.

Both servers run in processes of their own (in uvloop where it is installed) and are loaded by the same client. Turnkeep
follows a script, so each step of its engine gives every stream one token; the bare handler writes one event of the same
length to every stream at the same pace. Compared are events per second of CPU time of the HTTP process: the machine's
cores are shared with the client and the engine, so that wall time would measure those too. Bar: >= 0.50.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server
from typing import Any, cast

from benchmarks.machine import describe_machine

BAR = 0.50
STALL_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")

BARE_SERVER = """
import asyncio, sys
from aiohttp import web

port, num_events, pace_s, num_bytes = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
EVENT = b"data: " + b"x" * (num_bytes - 8) + b"\\n\\n"

async def stream(request):
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for _ in range(num_events):
        await response.write(EVENT)
        await asyncio.sleep(pace_s)
    await response.write_eof(b"data: [DONE]\\n\\n")
    return response

async def health(request):
    return web.Response()

async def main():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", stream)
    app.router.add_get("/health", health)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
    await asyncio.Event().wait()

try:
    import uvloop
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main())
except ImportError:
    asyncio.run(main())
"""


@dataclass
class Load:
    """What one round of streams gave."""

    num_events: int = 0
    num_bytes: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def events_per_cpu_s(self) -> float:
        return self.num_events / max(self.cpu_s, 1e-9)


class StreamClient(asyncio.Protocol):
    """One request; counts events and bytes until the server has sent the last one."""

    def __init__(self, load: Load, body: bytes, done: asyncio.Future[None]) -> None:
        self._load = load
        self._body = body
        self._done = done
        self._tail = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head = "\r\n".join([*lines, f"Content-Length: {len(self._body)}", "", ""])
        self._transport.write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        self._load.num_bytes += len(data)
        data = self._tail + data
        # What the end of a piece holds was counted with it; a piece may end inside the last event.
        self._load.num_events += data.count(b"\n\n") - self._tail.count(b"\n\n")
        self._tail = data[-len(b"[DONE]\n\n") :]
        if b"[DONE]" in data and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError("the server ended a stream early"))


async def load_once(port: int, num_streams: int, body: bytes) -> Load:
    load = Load()
    loop = asyncio.get_running_loop()
    started_s = time.perf_counter()
    waits, transports = [], []
    for _ in range(num_streams):
        done: asyncio.Future[None] = loop.create_future()
        transport, _ = await loop.create_connection(lambda done=done: StreamClient(load, body, done), "127.0.0.1", port)
        waits.append(done)
        transports.append(transport)
    await wait_for_all(waits, load)
    load.wall_s = time.perf_counter() - started_s
    for transport in transports:
        transport.close()
    return load


async def wait_for_all(waits: list[asyncio.Future[None]], load: Load) -> None:
    """Raises RuntimeError when nothing at all has come for STALL_S: a load that hangs says so."""
    pending: set[asyncio.Future[None]] = set(waits)
    while pending:
        num_bytes = load.num_bytes
        done, pending = await asyncio.wait(pending, timeout=STALL_S, return_when=asyncio.FIRST_EXCEPTION)
        for one in done:
            one.result()
        if pending and load.num_bytes == num_bytes:
            raise RuntimeError(f"{len(pending)} of {len(waits)} streams have had nothing for {STALL_S:.0f} s")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextmanager
def server(command: list[str], port: int) -> Iterator[int]:
    """A server process; its id, once it answers."""
    import urllib.error
    import urllib.request

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    break
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        else:
            raise RuntimeError(f"the server did not start: {' '.join(command)}")
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with closing(create_server(("127.0.0.1", 0))) as listener:
        return int(listener.getsockname()[1])


def measure(command: list[str], port: int, arguments: argparse.Namespace, body: bytes) -> list[Load]:
    """A round to warm up, then the rounds that count."""
    loads = []
    with server(command, port) as pid:
        asyncio.run(load_once(port, min(arguments.streams, 50), body))
        for _ in range(arguments.rounds):
            before_s = cpu_seconds(pid)
            load = asyncio.run(load_once(port, arguments.streams, body))
            load.cpu_s = cpu_seconds(pid) - before_s
            loads.append(load)
    return loads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=200, help="events per stream")
    parser.add_argument("--pace-ms", type=float, default=200.0, help="between two tokens of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    answer = " word" * arguments.tokens
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        rule: dict[str, Any] = {"answer": answer, "finish": "length"}
        script.write_text(json.dumps({"step_ms": arguments.pace_ms, "rules": [rule]}))
        body = json.dumps(
            {
                "model": "scripted",
                "stream": True,
                "max_tokens": arguments.tokens,
                "messages": [{"role": "user", "content": "Tell me a story."}],
            }
        ).encode()
        port = free_port()
        command = [sys.executable, "-m", "turnkeep.server.cli", "serve", "--engine", f"scripted:{script}"]
        command += ["--port", str(port), "--max-running", str(arguments.streams), "--log-level", "error"]
        ours = measure(command, port, arguments, body)
        num_bytes = statistics.mean(load.num_bytes / load.num_events for load in ours)
        port = free_port()
        pace_s = str(arguments.pace_ms / 1000)
        bare = measure(
            [sys.executable, "-c", BARE_SERVER, str(port), str(arguments.tokens), pace_s, str(round(num_bytes))],
            port,
            arguments,
            body,
        )
    report(arguments, ours, bare)


def report(arguments: argparse.Namespace, ours: list[Load], bare: list[Load]) -> None:
    print(f"{arguments.streams} streams of {arguments.tokens} events, one every {arguments.pace_ms:g} ms")
    print(f"{'':10}{'events':>10}{'bytes/event':>13}{'events/s':>10}{'CPU s':>8}{'events/CPU s':>14}")
    for name, loads in (("turnkeep", ours), ("bare", bare)):
        for load in loads:
            print(
                f"{name:10}{load.num_events:>10}{load.num_bytes / load.num_events:>13.0f}"
                f"{load.num_events / load.wall_s:>10.0f}{load.cpu_s:>8.2f}{load.events_per_cpu_s:>14.0f}"
            )
    ratio = statistics.median(load.events_per_cpu_s for load in ours) / statistics.median(
        load.events_per_cpu_s for load in bare
    )
    print(f"ratio {ratio:.2f} (bar {BAR})")
    result = {"ratio": ratio, "bar": BAR, "machine": describe_machine(), "streams": arguments.streams}
    print(json.dumps({**result, "turnkeep": [vars(one) for one in ours], "bare": [vars(one) for one in bare]}))


if __name__ == "__main__":
    main()
