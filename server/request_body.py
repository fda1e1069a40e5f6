"""Reading the body of a request: what it may be sent as, where it breaks, and where it is parsed.

Knows aiohttp; the shape's own parser is passed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from turnkeep.server import errors

T = TypeVar("T")

BODY_IDLE_S = 60.0
PARSE_IN_THREAD_BYTES = 1 << 20  # a body from here on is parsed beside the event loop


def check_length(request: web.Request) -> None:
    """Raises ApiError 413 for a body that says itself that it is too large, before any of it is read."""
    if request.content_length is not None and request.content_length > request.client_max_size:
        raise errors.body_too_large()


async def read_bytes(request: web.Request) -> bytes:
    """The whole body, read once however often it is asked for.

    Raises ApiError 408 when nothing of it arrives for BODY_IDLE_S; else as aiohttp's own read().
    """
    if request.content.is_eof():
        return await request.read()
    reading = asyncio.ensure_future(request.read())
    num_bytes = -1
    try:
        while not reading.done():
            if request.content.total_raw_bytes == num_bytes:
                raise errors.ApiError(
                    408, f"Nothing of the body arrived for {BODY_IDLE_S:.0f} s.", code="timeout", closes_connection=True
                )
            num_bytes = request.content.total_raw_bytes
            await asyncio.wait((reading,), timeout=BODY_IDLE_S)
        return reading.result()
    finally:
        reading.cancel()


async def read_body(request: web.Request, parse: Callable[[bytes], T]) -> T:
    """The parsed body. Raises ApiError 415 for another content type, 400 for broken framing, and what parse raises."""
    if request.content_type != "application/json" and not request.content_type.endswith("+json"):
        raise errors.ApiError(
            415, "The body must be sent as Content-Type: application/json.", code="unsupported_media_type"
        )
    check_length(request)
    try:
        data = await read_bytes(request)
    except web.RequestPayloadError:
        message = "The body could not be read: its encoding or its framing is broken."
        raise errors.ApiError(400, message, closes_connection=True) from None
    if len(data) < PARSE_IN_THREAD_BYTES:
        return parse(data)
    return await asyncio.to_thread(parse, data)
