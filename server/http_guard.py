"""What every request passes: its id, authentication, and the guarantee that each failure is in OpenAI's envelope.

Knows aiohttp and errors.py, no routes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from turnkeep.server import errors
from turnkeep.server.metrics import ServerMetrics

log = logging.getLogger(__name__)

REQUEST_ID = web.RequestKey("request_id", str)
TENANT = web.RequestKey("tenant", str)

Envelope = Callable[[errors.ApiError, str], dict[str, Any]]  # an error and the request's id -> the body

# Probes of load balancers carry no key, and what they learn is only whether the server can serve. The page of /ui asks
# for the key that its data needs.
DASHBOARD_PATHS = ("/ui", "/ui/", "/ui/style.css", "/ui/state.js", "/ui/tools.js", "/ui/chat.js")
OPEN_PATHS = frozenset({"/health", "/v1/health", "/ping", "/ready", *DASHBOARD_PATHS})

MAX_REQUEST_ID_CHARS = 128

_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large", 415: "unsupported_media_type"}
_MESSAGES = {
    404: "There is nothing at this address.",
    405: "This method is not allowed here.",
    413: "The body is too large.",
}


class Authenticator:
    """Any of several keys opens the server, and the key makes the tenant. Without keys everybody is one tenant."""

    def __init__(self, api_keys: Sequence[str]) -> None:
        self._keys = [(_to_bytes(key), tenant_of(key)) for key in api_keys]

    def tenant(self, request: web.Request) -> str:
        """Raises ApiError 401. All keys are compared, in constant time each."""
        if not self._keys or request.path in OPEN_PATHS or request.method == "OPTIONS":
            return ""
        given = _to_bytes(_given_key(request))
        found = [tenant for key, tenant in self._keys if hmac.compare_digest(key, given)]
        if not found:
            raise errors.invalid_api_key()
        return found[0]


def tenant_of(api_key: str) -> str:
    """A name that does not give the key away: it goes to the engine and into cache roots."""
    return hashlib.sha256(b"turnkeep tenant " + _to_bytes(api_key)).hexdigest()[:32]


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _given_key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return request.headers.get("x-api-key") or request.headers.get("api-key") or ""


def make_guard(
    authenticator: Authenticator, metrics: ServerMetrics, envelopes: Mapping[str, Envelope] | None = None
) -> Middleware:
    """The one middleware. envelopes: the body of errors under a path, where it is not OpenAI's."""

    def refuse(request: web.Request, error: errors.ApiError, allow: str | None = None) -> web.Response:
        for path, envelope in (envelopes or {}).items():
            if request.path == path or request.path.startswith(f"{path}/"):
                return error_response(error, metrics, allow=allow, body=envelope(error, request[REQUEST_ID]))
        return error_response(error, metrics, allow=allow)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = _request_id(request)
        try:
            request[TENANT] = authenticator.tenant(request)
            return await handler(request)
        except errors.ApiError as error:
            return refuse(request, error)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            return refuse(request, _from_http_exception(error), error.headers.get("Allow"))
        except Exception:
            log.exception("request %s failed", request[REQUEST_ID])
            return refuse(request, errors.internal())

    return guard


async def add_common_headers(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: plain and streamed answers alike carry the request's id."""
    request_id = request.get(REQUEST_ID)
    if request_id is not None:
        response.headers["x-request-id"] = request_id
        response.headers["request-id"] = request_id


def error_response(
    error: errors.ApiError, metrics: ServerMetrics, *, allow: str | None = None, body: dict[str, Any] | None = None
) -> web.Response:
    """The answer to a failed request, counted. body: another envelope than OpenAI's."""
    metrics.errors.labels(str(error.status)).inc()
    headers = error.headers()
    if allow is not None:
        headers["Allow"] = allow
    return json_response(error.envelope() if body is None else body, status=error.status, headers=headers)


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


def _from_http_exception(error: web.HTTPException) -> errors.ApiError:
    """aiohttp's own refusals: routing, body size, broken encodings. Their texts are not passed on."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    message = _MESSAGES.get(error.status, error.reason or "The request cannot be served.")
    return errors.ApiError(error.status, message, kind=kind, code=_CODES.get(error.status))


def _request_id(request: web.Request) -> str:
    """The client's own id when it is safe to log and to echo."""
    given = request.headers.get("X-Request-Id", "")
    if 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"req_{uuid.uuid4().hex}"
