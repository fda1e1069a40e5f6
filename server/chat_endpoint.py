"""POST /v1/chat/completions over HTTP: reading the body, plain and streamed answers, keep-alives, broken streams.

The status of a stream is sent when its turn is admitted, so that a refusal still gets a real status; after a while of
waiting it is sent all the same, because proxies cut silent connections. A stream that breaks is never ended cleanly:
clients would take what they have for the whole answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from aiohttp import web

from turnkeep.server import errors, event_stream
from turnkeep.server.chat_answers import AnswerCollector, AnswerFrame, ChunkBuilder
from turnkeep.server.chat_completions import ChatCompletionRequest, parse_request
from turnkeep.server.chat_service import ChatService
from turnkeep.server.config import ServerConfig
from turnkeep.server.http_guard import REQUEST_ID, TENANT, json_response
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.turn import Turn
from turnkeep.server.turn_events import TurnDelta, TurnEvent, TurnStarted, Usage

log = logging.getLogger(__name__)

PARSE_IN_THREAD_BYTES = 1 << 20  # a body from here on is parsed beside the event loop


class ChatEndpoint:
    """The handler; one instance serves all requests."""

    def __init__(self, service: ChatService, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._service = service
        self._config = config
        self._metrics = metrics

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one turn. A client that goes away cancels this handler, and leaving the turn aborts it."""
        arrival_s = time.monotonic()
        self._service.check_open()
        body = await self._read(request)
        turn = await self._service.start_turn(body, request.headers, request[TENANT], arrival_s)
        async with turn:
            frame = AnswerFrame(model=body.model, fingerprint=self._service.fingerprint)
            if body.stream:
                return await self._stream(request, body, turn, frame)
            collector = AnswerCollector(turn.num_choices)
            while not turn.is_complete:
                for event in await turn.next_events(None):
                    collector.add(event)
            return json_response(
                collector.body(frame, logprobs=bool(body.logprobs), token_ids=bool(body.return_token_ids))
            )

    async def render(self, request: web.Request) -> web.Response:
        """What the same body would be as a prompt: text, token ids and boundaries. Computes nothing."""
        body = await self._read(request)
        _, prompt, _, _ = await self._service.prepare(body, request.headers, request[TENANT])
        return json_response(
            {
                "prompt": prompt.encoded.text,
                "prompt_token_ids": prompt.encoded.token_ids,
                "boundaries": [{"position": one.position, "kind": one.kind} for one in prompt.boundaries],
            }
        )

    async def _read(self, request: web.Request) -> ChatCompletionRequest:
        if request.content_type != "application/json" and not request.content_type.endswith("+json"):
            raise errors.ApiError(
                415, "The body must be sent as Content-Type: application/json.", code="unsupported_media_type"
            )
        try:
            data = await request.read()
        except web.RequestPayloadError:
            message = "The body could not be read: its encoding or its framing is broken."
            raise errors.ApiError(400, message, closes_connection=True) from None
        if len(data) < PARSE_IN_THREAD_BYTES:
            body = parse_request(data)
        else:
            body = await asyncio.to_thread(parse_request, data)
        if not self._service.serves(body.model):
            raise errors.model_not_found(body.model)
        return body

    async def _stream(
        self, request: web.Request, body: ChatCompletionRequest, turn: Turn, frame: AnswerFrame
    ) -> web.StreamResponse:
        options = body.stream_options
        builder = ChunkBuilder(
            frame,
            num_choices=turn.num_choices,
            with_usage=options is not None and bool(options.include_usage),
            usage_on_every_chunk=options is not None and bool(options.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
        )
        # A refusal comes before anything else and raises here, while the status is still open.
        events = await turn.next_events(self._config.status_delay_s)
        response = web.StreamResponse(headers=event_stream.HEADERS)
        try:
            await response.prepare(request)
            await self._write_events(response, builder, turn, events)
        except ConnectionError:
            log.info("request %s: the client went away", request[REQUEST_ID])
        except errors.ApiError as error:
            await self._break_off(request, response, error)
        except Exception:
            log.exception("request %s failed after its answer had begun", request[REQUEST_ID])
            await self._break_off(request, response, errors.internal())
        return response

    async def _write_events(
        self, response: web.StreamResponse, builder: ChunkBuilder, turn: Turn, events: list[TurnEvent]
    ) -> None:
        usage = Usage()
        last_write_s = -math.inf
        while True:
            data = encode_events(events, builder, usage)
            if turn.is_complete:
                last = [event_stream.encode_event(chunk) for chunk in builder.last(usage)]
                # In one write with the end of the body: clients stop reading at [DONE].
                await response.write_eof(b"".join([data, *last, event_stream.DONE]))
                return
            silent_s = time.monotonic() - last_write_s
            if not data and silent_s >= self._config.comment_interval_s:
                data = event_stream.KEEP_ALIVE
            if data:
                await response.write(data)
                last_write_s, silent_s = time.monotonic(), 0.0
            events = await turn.next_events(self._config.comment_interval_s - silent_s)

    async def _break_off(self, request: web.Request, response: web.StreamResponse, error: errors.ApiError) -> None:
        """Say what happened in the stream, then close the connection without the end that HTTP asks for."""
        self._metrics.errors.labels(str(error.status)).inc()
        try:
            await response.write(event_stream.encode_event(error.envelope()))
        except ConnectionError:
            return
        if request.transport is not None:
            request.transport.close()


def encode_events(events: list[TurnEvent], builder: ChunkBuilder, usage: Usage) -> bytes:
    """The frames of some events; `usage` is added up on the way."""
    chunks = []
    for event in events:
        if isinstance(event, TurnStarted):
            chunks += builder.first(event)
        elif isinstance(event, TurnDelta):
            chunk = builder.delta(event)
            if chunk is not None:
                chunks.append(chunk)
        else:
            usage.add(event)
            chunks.append(builder.ended(event))
    return b"".join(event_stream.encode_event(chunk) for chunk in chunks)
