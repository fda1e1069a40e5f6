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

PARSE_IN_THREAD_BYTES = 1 << 20  # a body from here on is parsed beside the event loop


async def read_body(request: web.Request, parse: Callable[[bytes], T]) -> T:
    """The parsed body. Raises ApiError 415 for another content type, 400 for broken framing, and what parse raises."""
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
        return parse(data)
    return await asyncio.to_thread(parse, data)
