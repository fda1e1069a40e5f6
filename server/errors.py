"""The errors a client can see: HTTP status and OpenAI's envelope, with bounded text.

Knows nothing about routes or engines; whatever raises ApiError decides what the client is told.
"""

from __future__ import annotations

from typing import Any

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200


class ApiError(Exception):
    """An answer other than success. `message` is shown to the client: no paths, addresses or other users' data."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        closes_connection: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = shorten(message, MAX_MESSAGE_CHARS)
        self.kind = kind
        self.code = code
        self.param = shorten(param, MAX_PARAM_CHARS) if param is not None else None
        self.retry_after_s = retry_after_s
        self.closes_connection = closes_connection  # what was sent leaves the connection in no known state

    def envelope(self) -> dict[str, Any]:
        """The body: all four keys are always there."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.closes_connection:
            headers["Connection"] = "close"
        return headers


class ContextOverflow(ApiError):
    """A prompt that leaves no room for an answer; the numbers are there for shapes with a wording of their own."""

    def __init__(self, message: str, num_prompt_tokens: int, max_prompt_tokens: int) -> None:
        super().__init__(400, message, code="context_length_exceeded", param="messages")
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens


def shorten(text: str, max_chars: int) -> str:
    """Text of at most max_chars: what a client sent must not come back at full length in an error."""
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars - 3]}..."


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def unsupported(message: str, param: str) -> ApiError:
    """A value the API defines and this server does not serve."""
    return ApiError(400, message, param=param, code="unsupported_value")


def context_overflow(num_prompt_tokens: int, max_model_len: int) -> ApiError:
    """The wording is the one that the context matchers of the known clients look for."""
    return ContextOverflow(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {num_prompt_tokens} "
        "tokens in the messages, which leaves no room for an answer. Please reduce the length of the messages.",
        num_prompt_tokens,
        max_model_len - 1,
    )


def body_too_large() -> ApiError:
    return ApiError(413, "The body is too large.", code="request_too_large", closes_connection=True)


def model_not_found(name: str) -> ApiError:
    return ApiError(404, f"The model '{shorten(name, 100)}' does not exist.", param="model", code="model_not_found")


def not_found(message: str) -> ApiError:
    return ApiError(404, message, code="not_found")


def invalid_api_key() -> ApiError:
    return ApiError(401, "Incorrect or missing API key.", kind="authentication_error", code="invalid_api_key")


def overloaded(message: str, retry_after_s: int) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=retry_after_s)


def unavailable(message: str, retry_after_s: int = 2, code: str = "service_unavailable") -> ApiError:
    return ApiError(503, message, kind="server_error", code=code, retry_after_s=retry_after_s)


def internal() -> ApiError:
    """Details belong in the log, never in the answer."""
    return ApiError(500, "Internal server error", kind="server_error", code="server_error")
