"""The body of a Messages request as clients send it, typed. Blocks and tools are checked where they are converted.

Unknown fields are ignored; every refusal is an ApiError.
"""

from __future__ import annotations

from typing import Any

import msgspec

from turnkeep.server.chat_completions import decode_request


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: what decides the prompt. None and absent mean the same."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None  # where older clients have what now is output_config.format
    metadata: Any = None
    cache_control: dict[str, Any] | None = None  # a cache mark behind the last message
    cache_salt: str | None = None  # as in chat completions: divides the tenant's prefixes further
    conversation_id: Any = None
    session_id: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountTokensRequest)


def parse_messages_request(body: bytes) -> MessagesRequest:
    """Raises ApiError 400 for what is not JSON, too deep, or of a wrong type."""
    return decode_request(_messages_decoder, body)


def parse_count_request(body: bytes) -> CountTokensRequest:
    """The same for count_tokens."""
    return decode_request(_count_decoder, body)
