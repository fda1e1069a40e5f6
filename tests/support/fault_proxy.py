"""A proxy on loopback between a client and a server that spoils chosen requests: refused, or cut in mid-stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web


@dataclass(frozen=True)
class Refuse:
    """Answer with this status and an error in OpenAI's envelope."""

    status: int = 503
    headers: dict[str, str] = field(default_factory=lambda: {"Retry-After": "0"})
    code: str | None = None


@dataclass(frozen=True)
class Cut:
    """Pass so many events of the stream on, then break the connection."""

    num_events: int


Fault = Refuse | Cut


@dataclass
class FaultProxy:
    """`faults` are used up, one a POST whose path is in `spoiled`; `requests`: path, body and headers of every POST."""

    url: str = ""
    faults: list[Fault] = field(default_factory=list)
    spoiled: tuple[str, ...] = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    is_plain: bool = False  # behave as a server that has Chat Completions and nothing else
    requests: list[tuple[str, dict[str, object], dict[str, str]]] = field(default_factory=list)


@asynccontextmanager
async def fault_proxy(target: str) -> AsyncIterator[FaultProxy]:
    """Everything goes to the server at `target` (scheme, host and port). WebSockets are not passed on."""
    proxy = FaultProxy()
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            fault: Fault | None = None
            if request.method == "POST":
                headers = {name.lower(): value for name, value in request.headers.items()}
                proxy.requests.append((request.path, await request.json(), headers))
                if proxy.faults and request.path in proxy.spoiled:
                    fault = proxy.faults.pop(0)
            if isinstance(fault, Refuse):
                error = {"message": "refused by the proxy", "type": "server_error", "param": None, "code": fault.code}
                return web.json_response({"error": error}, status=fault.status, headers=fault.headers)
            if proxy.is_plain and request.path == "/v1/models":
                model = {"id": "demo", "object": "model", "created": 0, "owned_by": "somebody"}
                return web.json_response({"object": "list", "data": [model]})
            if proxy.is_plain and request.path != "/v1/chat/completions":
                return web.json_response({"detail": "Not Found"}, status=404)
            passed = {name: value for name, value in request.headers.items() if name.lower() not in ("host",)}
            url = f"{target}{request.path_qs}"
            async with session.request(request.method, url, headers=passed, data=body) as answer:
                return await _pass_on(request, answer, fault)

        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield proxy
        finally:
            await runner.cleanup()


async def _pass_on(request: web.Request, answer: aiohttp.ClientResponse, fault: Cut | None) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status)
    for name in ("Content-Type", "Retry-After", "x-request-id"):
        if name in answer.headers:
            response.headers[name] = answer.headers[name]
    await response.prepare(request)
    num_events, rest = 0, b""
    async for data in answer.content.iter_any():
        if fault is None:
            await response.write(data)
            continue
        *frames, rest = (rest + data).split(b"\n\n")
        for frame in frames:
            if num_events >= fault.num_events:
                assert request.transport is not None
                request.transport.abort()
                return response
            await response.write(frame + b"\n\n")
            num_events += 1
    await response.write_eof()
    return response
