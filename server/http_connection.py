"""Connections whose requests are no HTTP, never come to the end of their head, or cannot be decoded.

The guard never sees such requests; aiohttp would answer them with plain text, wait for minutes, and log what the client
sent.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from turnkeep.server import errors
from turnkeep.server.http_guard import json_response

log = logging.getLogger(__name__)

MAX_HEAD_S = 10.0  # from the first byte of a request to the end of its headers


class EnvelopeConnection(RequestHandler):
    """aiohttp's connection with errors of our own, and with a limit on how slowly a request may begin."""

    __slots__ = ("_head_limit",)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_limit: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        num_requests = self._request_count
        super().data_received(data)
        is_in_head = self._current_request is None and not self._messages and self._request_count == num_requests
        if self._head_limit is not None and not is_in_head:
            self._head_limit.cancel()
            self._head_limit = None
        elif is_in_head and self._head_limit is None and data:
            self._head_limit = self._loop.call_later(MAX_HEAD_S, self._give_up)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_limit is not None:
            self._head_limit.cancel()
            self._head_limit = None
        super().connection_lost(exc)

    def _give_up(self) -> None:
        log.info("a connection did not come to the end of a request's head within %.0f s", MAX_HEAD_S)
        self.force_close()

    def log_exception(self, *arguments: Any, **options: Any) -> None:
        """A body that cannot be decoded is the client's fault, and was answered."""
        if isinstance(sys.exc_info()[1], web.RequestPayloadError):
            log.info("a body that could not be read was refused")
        else:
            super().log_exception(*arguments, **options)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if status >= 500:
            log.error("a connection failed", exc_info=exc)
            error = errors.internal()
        else:
            log.info("a request that is no valid HTTP was refused")
            error = errors.ApiError(
                status, "The request is not valid HTTP, is too large in its head, or has an encoding that is not known."
            )
        response = json_response(error.envelope(), status=status)
        response.force_close()
        return response


class EnvelopeServer(web.Server):
    """Makes such connections."""

    def __call__(self) -> RequestHandler:
        return EnvelopeConnection(self, loop=self._loop, **self._kwargs)


class EnvelopeRunner(web.AppRunner):
    """Runs an application over such a server."""

    __slots__ = ()

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return EnvelopeServer(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
