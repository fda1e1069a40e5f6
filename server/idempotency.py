"""Idempotency-Key: a request sent twice under one key is carried out once, and its answer is given twice.

Only whole answers are kept: a stream that broke must run anew. Bounded in number, bytes and time; per tenant.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from turnkeep.server import errors
from turnkeep.server.http_guard import TENANT
from turnkeep.server.request_body import read_bytes

HEADER = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
MAX_KEY_CHARS = 255
MAX_BYTES = 32 * 2**20
TTL_S = 600.0


@dataclass(slots=True)
class _Record:
    """`body` None: the request is still being carried out."""

    digest: bytes
    started_s: float
    status: int = 0
    content_type: str = ""
    body: bytes | None = None


class IdempotencyTable:
    """Answers by (tenant, path, key)."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, max_bytes: int = MAX_BYTES) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._records: OrderedDict[tuple[str, str, str], _Record] = OrderedDict()
        self._num_bytes = 0

    def begin(self, key: tuple[str, str, str], digest: bytes) -> _Record | None:
        """The record of an earlier request, or None: the caller carries it out and calls end().

        Raises ApiError: 400 when the key was used for another body, 409 while the earlier request still runs.
        """
        self._expire()
        record = self._records.get(key)
        if record is None:
            self._records[key] = _Record(digest, self._clock())
            return None
        if record.digest != digest:
            raise errors.bad_request(
                f"This {HEADER} was used for another request.", HEADER, code="idempotency_key_reused"
            )
        if record.body is None:
            raise errors.ApiError(
                409,
                f"The request with this {HEADER} is still running.",
                code="idempotency_in_progress",
                retry_after_s=1,
            )
        return record

    def end(self, key: tuple[str, str, str], response: web.StreamResponse | None) -> None:
        """Keep a whole, successful answer; forget the request otherwise, so that it can be tried again."""
        record = self._records[key]
        body = response.body if isinstance(response, web.Response) and response.status < 300 else None
        if not isinstance(body, bytes) or len(body) > self._max_bytes // 4:
            del self._records[key]
            return
        assert response is not None
        record.status, record.content_type, record.body = response.status, response.content_type, body
        self._num_bytes += len(body)
        self._expire()

    def _expire(self) -> None:
        """Only the oldest can be too old; a request that still runs is kept."""
        limit_s = self._clock() - TTL_S
        for key, record in list(self._records.items()):
            if record.started_s >= limit_s and self._num_bytes <= self._max_bytes:
                return
            if record.body is not None:
                self._num_bytes -= len(record.body)
                del self._records[key]


def make_idempotency() -> Middleware:
    """The middleware; it stands behind the guard, which knows the tenant and writes the errors."""
    table = IdempotencyTable()

    @web.middleware
    async def idempotency(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get(HEADER)
        if given is None or request.method != "POST":
            return await handler(request)
        if not 0 < len(given) <= MAX_KEY_CHARS:
            raise errors.bad_request(f"An {HEADER} has 1 to {MAX_KEY_CHARS} characters.", HEADER)
        try:
            digest = hashlib.sha256(await read_bytes(request)).digest()
        except web.RequestPayloadError:
            return await handler(request)  # which says what is wrong with it
        key = (request[TENANT], request.path, given)
        record = table.begin(key, digest)
        if record is not None:
            headers = {REPLAYED: "true"}
            return web.Response(
                body=record.body, status=record.status, content_type=record.content_type, headers=headers
            )
        response: web.StreamResponse | None = None
        try:
            response = await handler(request)
            return response
        finally:
            table.end(key, response)

    return idempotency
