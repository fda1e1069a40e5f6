"""The addresses under /v1/responses over HTTP. The WebSocket transport of the same is in websocket.py."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from turnkeep.server import errors, event_stream
from turnkeep.server.config import ServerConfig
from turnkeep.server.http_guard import TENANT, json_response
from turnkeep.server.item_lists import item_page
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.request_body import read_body
from turnkeep.server.responses.background import BackgroundRun, BackgroundRuns, as_seen
from turnkeep.server.responses.compaction import compact
from turnkeep.server.responses.plan import RESPONSE_ID, store_is_down
from turnkeep.server.responses.run import encode_events
from turnkeep.server.responses.service import ResponsesService
from turnkeep.server.responses.shapes import parse_compact_request, parse_responses_request
from turnkeep.server.responses.websocket import ResponsesSocket
from turnkeep.server.stores import StoreDownError, StoredResponse
from turnkeep.server.turn_stream import TurnStream


class ResponsesEndpoint:
    """The handlers; one instance serves all requests."""

    def __init__(self, service: ResponsesService, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._service = service
        self._config = config
        self._stream = TurnStream(config, metrics)
        self.background = BackgroundRuns(service)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Make one response. A client that goes away ends it, unless it runs in the background."""
        arrival_s = time.monotonic()
        self._service.chat.check_open()
        body = await read_body(request, parse_responses_request)
        run = await self._service.start(body, request.headers, request[TENANT], arrival_s)
        if body.background:
            background = await self.background.start(run)
            if body.stream:
                return await self._follow(request, background, -1)
            return json_response(run.builder.response)
        async with run:
            if body.stream:
                return await self._stream.write(request, run, run)
            while not run.is_complete:
                await run.next_events(None)
            return json_response(run.builder.response)

    async def retrieve(self, request: web.Request) -> web.StreamResponse:
        """A stored response; with stream=true the events of one that runs, or ran not long ago, in the background."""
        id, tenant = request.match_info["id"], request[TENANT]
        background = self.background.find(tenant, id)
        if request.query.get("stream", "").lower() == "true":
            starting_after = _starting_after(request)
            if background is None:
                await self._find(tenant, id)
                message = "The events of this response are not kept: only of one in the background, for a while."
                raise errors.bad_request(message, "stream")
            return await self._follow(request, background, starting_after)
        if background is not None and background.ended_s is None:
            return json_response(background.run.builder.response)
        return json_response((await self._find(tenant, id)).body)

    async def delete(self, request: web.Request) -> web.Response:
        """Forget a response. What continues it can no longer be continued."""
        id, tenant = request.match_info["id"], request[TENANT]
        await self.background.cancel(tenant, id)
        self.background.drop(tenant, id)
        try:
            deleted = RESPONSE_ID.fullmatch(id) is not None and await self._service.store.delete_response(tenant, id)
        except StoreDownError:
            raise store_is_down() from None
        if not deleted:
            raise _not_found(id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def cancel(self, request: web.Request) -> web.Response:
        """Call off a response in the background, whichever server works on it. Again: nothing more happens."""
        id, tenant = request.match_info["id"], request[TENANT]
        await self.background.cancel(tenant, id)
        stored = await self._find(tenant, id)
        if not stored.is_background:
            raise errors.bad_request("Only a response that runs in the background can be cancelled.", "response_id")
        if stored.is_running:
            stored.status = stored.body["status"] = "cancelled"
            try:
                await self._service.store.replace_running(tenant, stored)
            except StoreDownError:
                raise store_is_down() from None
            stored = await self._find(tenant, id)
        return json_response(stored.body)

    async def input_items(self, request: web.Request) -> web.Response:
        """The items that the request of a response brought, a page at a time."""
        stored = await self._find(request[TENANT], request.match_info["id"])
        return json_response(item_page(stored.input_items, request.query))

    async def input_tokens(self, request: web.Request) -> web.Response:
        """How long the prompt of the same body would be. Computes nothing."""
        body = await read_body(request, parse_responses_request)
        count = await self._service.count_tokens(body, request.headers, request[TENANT])
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def compact(self, request: web.Request) -> web.Response:
        """A conversation made short. Nothing of it is stored."""
        arrival_s = time.monotonic()
        self._service.chat.check_open()
        body = await read_body(request, parse_compact_request)
        return json_response(await compact(self._service, body, request.headers, request[TENANT], arrival_s))

    async def _find(self, tenant: str, id: str) -> StoredResponse:
        try:
            stored = await self._service.store.find_response(tenant, id) if RESPONSE_ID.fullmatch(id) else None
        except StoreDownError:
            raise store_is_down() from None
        if stored is None:
            raise _not_found(id)
        return as_seen(stored, self._service.clock())

    async def _follow(self, request: web.Request, background: BackgroundRun, starting_after: int) -> web.StreamResponse:
        """The events so far and those to come. Who goes away may come back for the rest."""
        response = web.StreamResponse(headers=event_stream.HEADERS)
        await response.prepare(request)
        try:
            async for events in background.follow(starting_after, self._config.comment_interval_s):
                await response.write(encode_events(events) or event_stream.KEEP_ALIVE)
            await response.write_eof()
        except ConnectionError:
            pass
        return response


def _starting_after(request: web.Request) -> int:
    text = request.query.get("starting_after", "-1")
    try:
        number = int(text) if len(text) <= 10 else -2
    except ValueError:
        number = -2
    if number < -1:
        raise errors.bad_request("starting_after must be a sequence number.", "starting_after")
    return number


def _not_found(id: str) -> errors.ApiError:
    return errors.ApiError(
        404, f"Response with id '{errors.shorten(id, 80)}' not found.", param="response_id", code="not_found"
    )


def add_responses(app: web.Application, endpoint: ResponsesEndpoint, socket: ResponsesSocket) -> None:
    """The routes; what runs in the background and what is connected ends with the application."""

    async def close(_: Any) -> None:
        await endpoint.background.close()
        await socket.close()

    router = app.router
    router.add_post("/v1/responses", endpoint.create)
    router.add_get("/v1/responses", socket.connect, allow_head=False)
    router.add_post("/v1/responses/input_tokens", endpoint.input_tokens)
    router.add_post("/v1/responses/compact", endpoint.compact)
    router.add_get("/v1/responses/{id}", endpoint.retrieve, allow_head=False)
    router.add_delete("/v1/responses/{id}", endpoint.delete)
    router.add_post("/v1/responses/{id}/cancel", endpoint.cancel)
    router.add_get("/v1/responses/{id}/input_items", endpoint.input_items)
    app.on_shutdown.append(close)
