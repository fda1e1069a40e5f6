"""When a request that failed is worth sending again, and after how long. Pure."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import openai

# The HTTP library under the openai package; which one it is depends on that package's version.
_modules = [kind.__module__.partition(".")[0] for kind in openai.DefaultHttpxClient.__mro__]
_http: Any = importlib.import_module(next(name for name in _modules if name.startswith("httpx")))
TRANSPORT_ERROR: type[Exception] = _http.TransportError

RETRIED_STATUSES = (408, 409, 429)
NOT_READY = "service_unavailable"
LASTING_CODES = ("insufficient_quota",)
REFUSED_KINDS = ("invalid_request_error", "authentication_error", "permission_error", "not_found_error")


class StreamBroke(Exception):
    """A stream ended before its answer did."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """max_retries: for answers with an error and for streams that break.

    outage_s: how long a server that cannot be reached, or is not ready (it restarts and loads its model, say), is
    waited for. Delays grow from initial_delay_s to max_delay_s, with jitter; a Retry-After counts where it is longer.
    """

    max_retries: int = 2
    outage_s: float = 60.0
    initial_delay_s: float = 0.5
    max_delay_s: float = 8.0

    def backoff_s(self, num_failures: int, jitter: float) -> float:
        """Before the next attempt; jitter in [0, 1) takes off up to a quarter."""
        delay: float = min(self.initial_delay_s * 2.0 ** max(num_failures - 1, 0), self.max_delay_s)
        return delay * (1.0 - 0.25 * jitter)


def is_outage(error: BaseException) -> bool:
    """Whether the server cannot be reached, or says that it is not ready (as against a request that failed)."""
    if isinstance(error, (_http.ConnectError, _http.ConnectTimeout, ConnectionRefusedError)):
        return True
    if isinstance(error, openai.APIError) and (
        error.code == NOT_READY or (isinstance(error, openai.APIStatusError) and error.status_code == 503)
    ):
        return True
    return isinstance(error, openai.APIConnectionError) and (error.__cause__ is not None and is_outage(error.__cause__))


def is_worth_retrying(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, openai.APIStatusError):
        wish = error.response.headers.get("x-should-retry")
        if wish in ("true", "false"):
            return wish == "true"
        if error.code in LASTING_CODES:
            return False
        return error.status_code in RETRIED_STATUSES or error.status_code >= 500
    if isinstance(error, (openai.APIConnectionError, TRANSPORT_ERROR, StreamBroke, OSError)):
        return True
    # An error inside a stream: all but what the request itself is to blame for.
    return isinstance(error, openai.APIError) and error.type not in REFUSED_KINDS


def retry_after_s(error: BaseException) -> float | None:
    """What the server asks for, at most a minute."""
    if not isinstance(error, openai.APIStatusError):
        return None
    headers: Mapping[str, Any] = error.response.headers
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            value = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if value >= 0:
            return min(value, 60.0)
    return None
