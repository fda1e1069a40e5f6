"""/v1/responses as a WebSocket: one connection is one conversation, each frame a response or an event of one.

The last response of a connection is remembered by the connection itself, so that it can be continued without being
stored anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from turnkeep.server import errors
from turnkeep.server.config import ServerConfig
from turnkeep.server.conversations import cache_root
from turnkeep.server.http_guard import REQUEST_ID, TENANT
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.responses.plan import Link
from turnkeep.server.responses.run import ResponseRun
from turnkeep.server.responses.service import ResponsesService
from turnkeep.server.responses.shapes import ResponsesRequest, parse_responses_request

log = logging.getLogger(__name__)

MAX_CONNECTION_S = 3600.0
MAX_QUEUED_FRAMES = 64
HEARTBEAT_S = 30.0


class ResponsesSocket:
    """The handler; one instance serves all connections."""

    def __init__(
        self,
        service: ResponsesService,
        config: ServerConfig,
        metrics: ServerMetrics,
    ) -> None:
        self._service = service
        self._config = config
        self._metrics = metrics
        self._open: set[web.WebSocketResponse] = set()

    async def close(self) -> None:
        """Tell all who are connected that the server goes."""
        await asyncio.gather(*(socket.close(code=WSCloseCode.GOING_AWAY) for socket in self._open))

    async def connect(self, request: web.Request) -> web.StreamResponse:
        """A connection from its start to its end."""
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=self._config.max_body_bytes)
        if not socket.can_prepare(request):
            message = "With GET this address is for WebSockets."
            raise errors.ApiError(426, message, code="upgrade_required")
        _check_origin(request)
        await socket.prepare(request)
        self._open.add(socket)
        session = _Session(self._service, self._metrics, socket, request.headers, request[TENANT])
        try:
            async with asyncio.timeout(MAX_CONNECTION_S):
                await session.serve()
        except TimeoutError:
            await session.say_error(
                errors.ApiError(
                    400, "The connection is too old. Open a new one.", code="websocket_connection_limit_reached"
                )
            )
        except ConnectionError:
            log.info("request %s: the client went away", request[REQUEST_ID])
        finally:
            session.end()
            self._open.discard(socket)
            await socket.close()
        return socket


class _Session:
    """One connection."""

    def __init__(
        self,
        service: ResponsesService,
        metrics: ServerMetrics,
        socket: web.WebSocketResponse,
        headers: Mapping[str, str],
        tenant: str,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._socket = socket
        self._headers = headers
        self._tenant = tenant
        self._last: Link | None = None
        self._tags: set[str] = set()  # conversations that end with the connection
        self._frames: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED_FRAMES)

    async def serve(self) -> None:
        """One response at a time; frames that come meanwhile wait. Ends with the connection."""
        working = [asyncio.create_task(self._read_all()), asyncio.create_task(self._answer_all())]
        try:
            await asyncio.wait(working, return_when="FIRST_COMPLETED")
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    async def _read_all(self) -> None:
        async for message in self._socket:
            if message.type not in (WSMsgType.TEXT, WSMsgType.BINARY):
                return
            data = message.data
            await self._frames.put(data.encode() if isinstance(data, str) else data)

    def end(self) -> None:
        """What only this connection could have continued may go first from now on."""
        for tag in self._tags:
            self._service.chat.close_conversation(cache_root(self._tenant or None, None), tag)

    async def say_error(self, error: errors.ApiError) -> None:
        self._metrics.errors.labels(str(error.status)).inc()
        frame = {"type": "error", "status": error.status, **error.envelope()}
        if not self._socket.closed:
            await self._send(frame)

    async def _send(self, event: object) -> None:
        await self._socket.send_str(msgspec.json.encode(event).decode())

    async def _answer_all(self) -> None:
        while True:
            await self._answer(await self._frames.get())

    async def _answer(self, frame: bytes) -> None:
        arrival_s = time.monotonic()
        continued: str | None = None
        try:
            body = _read_frame(frame)
            continued = body.previous_response_id
            link = self._last if self._last is not None and self._last.response_id == continued else None
            run = await self._service.start(body, self._headers, self._tenant, arrival_s, link=link, is_session=True)
            async with run:
                await self._send_events(run)
            self._remember(run)
        except errors.ApiError as error:
            self._forget(continued)
            await self.say_error(error)
        except ConnectionError:
            raise  # nobody is there any more
        except Exception:
            log.exception("a response over a WebSocket failed")
            self._forget(continued)
            await self.say_error(errors.internal())

    async def _send_events(self, run: ResponseRun) -> None:
        """To the end of the response; one that breaks ends with the event that says so."""
        # A refusal of the engine comes before any event and raises here.
        await run.next_events(None)
        try:
            while True:
                for event in run.take():
                    await self._send(event)
                if run.is_complete:
                    return
                await run.next_events(None)
        except errors.ApiError as error:
            self._metrics.errors.labels(str(error.status)).inc()
            await run.fail(error)
            for event in run.take():
                await self._send(event)

    def _remember(self, run: ResponseRun) -> None:
        plan, response = run.plan, run.builder.response
        if response["status"] not in ("completed", "incomplete"):
            self._forget(plan.request.previous_response_id)
            return
        items = [*plan.history, *plan.input_items, *response["output"]]
        self._last = Link(plan.id, items, plan.tag or plan.id)
        if not plan.request.is_stored and plan.conversation_id is None and plan.tag is not None:
            self._tags.add(plan.tag)

    def _forget(self, response_id: str | None) -> None:
        """After a failed continuation its client has to start anew."""
        if self._last is not None and self._last.response_id == response_id:
            self._last = None


def _check_origin(request: web.Request) -> None:
    """Browsers let any page open a WebSocket to any address, this machine's included; no page may but our own.

    Raises ApiError 403.
    """
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2].lower() != request.host.lower():
        message = "Pages of other origins may not connect."
        raise errors.ApiError(403, message, kind="permission_error", code="origin_not_allowed")


def _read_frame(frame: bytes) -> ResponsesRequest:
    """The request in a frame. Raises ApiError 400."""
    try:
        kind = msgspec.json.decode(frame, type=_Frame).type
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        raise errors.bad_request("A frame is a JSON object with a type.", "type") from None
    if kind != "response.create":
        raise errors.bad_request("The type of a frame must be 'response.create'.", "type")
    body = parse_responses_request(frame)
    # How the answer comes is settled by the connection.
    body.stream, body.background = True, False
    return body


class _Frame(msgspec.Struct):
    type: str
