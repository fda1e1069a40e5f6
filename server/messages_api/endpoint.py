"""POST /v1/messages and /v1/messages/count_tokens over HTTP."""

from __future__ import annotations

import time

from aiohttp import web

from turnkeep.server import errors
from turnkeep.server.chat_service import ChatService
from turnkeep.server.config import ServerConfig
from turnkeep.server.http_guard import REQUEST_ID, TENANT, json_response
from turnkeep.server.messages_api.answers import MessageCollector, MessageEvents, MessageStream
from turnkeep.server.messages_api.conversion import omits_thinking, to_chat_request
from turnkeep.server.messages_api.shapes import parse_count_request, parse_messages_request
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.request_body import read_body
from turnkeep.server.turn_stream import TurnStream


class MessagesEndpoint:
    """The handlers; one instance serves all requests."""

    def __init__(self, service: ChatService, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._service = service
        self._stream = TurnStream(config, metrics)

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer one turn. A client that goes away cancels this handler, and leaving the turn aborts it."""
        arrival_s = time.monotonic()
        self._service.check_open()
        body = await read_body(request, parse_messages_request)
        self._check_model(body.model)
        chat = to_chat_request(body)
        turn = await self._service.start_turn(chat, request.headers, request[TENANT], arrival_s)
        events = MessageEvents(body.model, omit_thinking=omits_thinking(body))
        async with turn:
            if body.stream:
                return await self._stream.write(request, turn, MessageStream(events, request[REQUEST_ID]))
            collector = MessageCollector(events)
            while not turn.is_complete:
                for event in await turn.next_events(None):
                    collector.add(event)
            return json_response(collector.body())

    async def count_tokens(self, request: web.Request) -> web.Response:
        """The tokens of the prompt that the same body gives to /v1/messages. Computes nothing."""
        body = await read_body(request, parse_count_request)
        self._check_model(body.model)
        _, prompt, _, _ = await self._service.prepare(to_chat_request(body), request.headers, request[TENANT])
        return json_response({"input_tokens": len(prompt.encoded.token_ids)})

    def _check_model(self, name: str) -> None:
        if not self._service.serves(name):
            raise errors.model_not_found(name)
