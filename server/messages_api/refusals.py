"""Errors as the Messages API words them. The statuses are the same; the envelope and some texts are not."""

from __future__ import annotations

from typing import Any

from turnkeep.server.errors import ApiError, ContextOverflow

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",  # clients send the same request again, streamed or not, where it was streamed
}


def messages_envelope(error: ApiError, request_id: str) -> dict[str, Any]:
    """The body of an error, and the data of an error event."""
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}, "request_id": request_id}


def _message(error: ApiError) -> str:
    """Clients know by these words that a conversation has outgrown its model, and compact it."""
    if isinstance(error, ContextOverflow):
        return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_prompt_tokens} maximum"
    if error.code == "context_length_exceeded":
        return f"prompt is too long: {error.message}"
    return error.message
