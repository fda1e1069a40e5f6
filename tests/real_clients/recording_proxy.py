"""A proxy that injects one fault and measures what each request reused. Knows HTTP and server-sent events, no client.

Faults: "none"; "503" for the first request; "drop" cuts the connection of the first stream after some of its text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

GENERATING = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/completions")
PASSED_HEADERS = ("authorization", "content-type", "x-api-key", "accept", "anthropic-version", "anthropic-beta")


@dataclass
class Seen:
    """One request that was answered: its prompt, what was reused of it, and what was generated, in tokens."""

    path: str
    status: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    body: dict[str, Any] = field(repr=False)


@dataclass
class FaultProxy:
    """Forwards to `target`. `fault` is used up by the request that meets it; `seen` are the answered ones in order."""

    target: str
    port: int = 0
    fault: str = "none"
    num_faults: int = 0
    seen: list[Seen] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def begin(self, fault: str) -> None:
        """A new round with this fault."""
        self.fault, self.num_faults = fault, 0
        self.seen.clear()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FaultProxy]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None)
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=300))
        self._lock = asyncio.Lock()  # one request at a time: the server's totals then tell of each one
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await self._session.close()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if request.path not in GENERATING or request.method != "POST":
            return await self._forward(request, data, drops=False)
        async with self._lock:
            if self.fault == "503":
                self._use_fault()
                error = {"message": "try again", "type": "server_error", "param": None, "code": "service_unavailable"}
                return web.json_response({"error": error}, status=503, headers={"Retry-After": "1"})
            body = json.loads(data)
            drops = self.fault == "drop" and bool(body.get("stream"))
            if drops:
                self._use_fault()
            before = await self._totals()
            response = await self._forward(request, data, drops=drops)
            after = await self._totals()
            counts = [int(late - early) for early, late in zip(before, after, strict=True)]
            if not drops:
                self.seen.append(Seen(request.path, response.status, counts[0], counts[1], counts[2], body))
            return response

    def _use_fault(self) -> None:
        self.fault = "none"
        self.num_faults += 1

    async def _forward(self, request: web.Request, data: bytes, *, drops: bool) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() in PASSED_HEADERS}
        url = self.target + request.path_qs
        async with self._session.request(request.method, url, data=data or None, headers=headers) as answer:
            kept = {name: answer.headers[name] for name in ("Content-Type", "Retry-After") if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            if drops:  # the first half of the events, however they were merged; the end of the body never comes
                events = (await answer.read()).split(b"\n\n")[:-1]
                await response.write(b"".join(event + b"\n\n" for event in events[: max(1, len(events) // 2)]))
                assert request.transport is not None
                request.transport.close()
                return response
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def _totals(self) -> list[float]:
        """Prompt, cached and generated tokens of all requests so far."""
        names = ("turnkeep_prompt_tokens_total", "turnkeep_cached_tokens_total", "turnkeep_generated_tokens_total")
        async with self._session.get(self.target + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line.startswith(names))
        return [float(values.get(name, 0)) for name in names]


def reused_share(seen: list[Seen]) -> float | None:
    """The smallest share of a re-sent prefix that a request of a conversation reused.

    A request repeats what the longest one before it that opens alike asked and was answered; side calls (another
    opening, or a shorter prompt) are left out. None when nothing was ever sent again.
    """
    known: dict[str, int] = {}
    shares = []
    for one in seen:
        key, num_prompt_tokens = opening(one.body), one.num_prompt_tokens
        if one.status == 200 and num_prompt_tokens > known.get(key, num_prompt_tokens):
            shares.append(one.num_cached_tokens / known[key])
        if num_prompt_tokens > known.get(key, 0):
            known[key] = num_prompt_tokens + one.num_output_tokens - 1
    return min(shares) if shares else None


def opening(body: dict[str, Any]) -> str:
    """What a conversation begins with: its system text, or its first message."""
    first = body.get("instructions") or body.get("system") or (body.get("messages") or body.get("input") or [""])[0]
    return json.dumps(first)[:1000]
