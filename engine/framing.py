"""Frames on the byte stream between server and engine: a 4-byte big-endian length, then one msgpack value.

The server sends one message a frame (the first is the EngineConfig); the engine sends a list of events a frame, so
that a whole step costs one system call and one decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.engine.messages import FromEngine, ToEngine

HEADER_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024


def _encode_tokens(value: Any) -> bytearray:
    """A long prompt crosses the line as it lies in memory."""
    if isinstance(value, EncodedTokens):
        return value.encoded
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decode_tokens(kind: type, value: Any) -> Any:
    if kind is EncodedTokens and isinstance(value, bytes):
        return EncodedTokens.from_bytes(value)
    raise TypeError(f"{type(value).__name__} where {kind.__name__} is expected")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_tokens)
_to_engine_decoder = msgspec.msgpack.Decoder(ToEngine, dec_hook=_decode_tokens)
_from_engine_decoder = msgspec.msgpack.Decoder(list[FromEngine])


class FramingError(ValueError):
    """The stream does not hold what this protocol sends: a frame too large, or one that is no known message."""


def encode_frame(value: object) -> bytes:
    """One frame holding `value` as msgpack. Raises FramingError when it is larger than MAX_FRAME_BYTES."""
    body = _encoder.encode(value)
    if len(body) > MAX_FRAME_BYTES:
        raise FramingError(f"a message of {len(body)} bytes is larger than the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def encode_events(events: Sequence[FromEngine]) -> bytes:
    """One frame holding a step's events."""
    return encode_frame(events)


def decode_message(body: bytes) -> ToEngine:
    """The message of one frame from the server. Raises FramingError."""
    try:
        return _to_engine_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FramingError(f"not a message to an engine: {error}") from error


def decode_events(body: bytes) -> list[FromEngine]:
    """The events of one frame from an engine. Raises FramingError."""
    try:
        return _from_engine_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FramingError(f"not a list of engine events: {error}") from error


class FrameDecoder:
    """Cuts a byte stream into frame bodies, however the stream was split on its way."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes of a frame that is not complete yet; 0 at a clean end of the stream."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[bytes]:
        """Take more of the stream, return the bodies that are complete now.

        Raises FramingError when a header announces more than the limit; the stream cannot be read on then.
        """
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        available = len(self._buffer)
        while available - start >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[start : start + HEADER_BYTES], "big")
            if length > self._max_frame_bytes:
                raise FramingError(f"a frame of {length} bytes is larger than the limit of {self._max_frame_bytes}")
            end = start + HEADER_BYTES + length
            if end > available:
                break
            bodies.append(bytes(self._buffer[start + HEADER_BYTES : end]))
            start = end
        if start:
            del self._buffer[:start]
        return bodies
