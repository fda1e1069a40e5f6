"""Server-sent events: framing only. Knows bytes, not chat completions and not sockets."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # asks proxies not to hold events back
}
PADDED_BYTES = 512
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encoder = msgspec.json.Encoder()


encode_value = _encoder.encode  # a part of a payload


def encode_event(payload: Any) -> bytes:
    """One event whose data is `payload` as JSON on a single line, closed by its blank line.

    msgspec escapes the control characters, so no text can end a frame early; U+2028 is legal inside one.
    """
    return b"data: " + _encoder.encode(payload) + b"\n\n"


def encode_padded_event(payload: dict[str, Any]) -> bytes:
    """The same with a field of random letters, so that the length of the event does not tell that of the text."""
    num_bytes = len(_encoder.encode({**payload, "obfuscation": ""}))
    return encode_event({**payload, "obfuscation": secrets.token_hex(PADDED_BYTES)[: -num_bytes % PADDED_BYTES]})


def encode_named_event(name: str, payload: Any) -> bytes:
    """The same with the event's name in front, for protocols that have one; `name` is a word of ours."""
    return b"event: " + name.encode() + b"\n" + encode_event(payload)
