"""Connections whose requests are no HTTP, or encoded in a way that cannot be read: refused in the envelope too.

The guard never sees such requests; aiohttp would answer them with plain text and log what the client sent.
"""

from __future__ import annotations

import logging

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from turnkeep.server import errors
from turnkeep.server.http_guard import json_response

log = logging.getLogger(__name__)


class EnvelopeConnection(RequestHandler):
    """aiohttp's connection with errors of our own."""

    __slots__ = ()

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
