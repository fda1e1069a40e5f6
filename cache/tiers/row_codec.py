"""Snapshots in eight bits: state matrices as int8 with one float32 scale a head, everything else as it is.

Symmetric: q = round(x / s), s = max |x| / 127 over one head of one layer, so |x - q s| <= s / 2 = max |x| / 254 for
every element (half a step; for types of fewer than eight bits of mantissa their own rounding on top). A state that
holds anything but finite numbers is refused rather than bent. Off by default: what is read is then not what was
written, and tokens after a load may differ from a cold run. numpy only: it runs beside the engine's loop.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from turnkeep.cache.spec import StatePart
from turnkeep.cache.tiers.record import Bytes

MATRIX_PARTS = ("ssm", "delta")  # heads, and a matrix a head; windows, vectors and tails of inputs stay exact
SCALE_BYTES = 4


class RowCodecError(ValueError):
    """The content cannot be written in eight bits."""


class RowCodec:
    """For rows of these parts; what follows a row in the content is left as it is."""

    def __init__(self, parts: tuple[StatePart, ...]) -> None:
        self._parts = parts
        self._row_bytes = sum(part.num_bytes for part in parts)
        self._encoded_row_bytes = sum(_encoded_bytes(part) for part in parts)

    def encoded_bytes(self, num_bytes: int) -> int:
        return num_bytes - self._row_bytes + self._encoded_row_bytes

    def decoded_bytes(self, num_bytes: int) -> int:
        return num_bytes + self._row_bytes - self._encoded_row_bytes

    def encode(self, content: Bytes) -> Bytes:
        """Raises RowCodecError for what is not finite."""
        pieces: list[Bytes] = []
        at = 0
        for part in self._parts:
            piece = content[at : at + part.num_bytes]
            at += part.num_bytes
            if not _is_matrix(part):
                pieces.append(piece)
                continue
            values = _to_float32(piece, part.dtype).reshape(part.num_layers * part.shape[0], -1)
            largest = np.abs(values).max(axis=1)
            if not np.isfinite(largest).all():
                raise RowCodecError(f"the state part {part.name} is not finite")
            scales = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
            pieces.append(_flat(scales))
            pieces.append(_flat(np.rint(values / scales[:, None]).astype(np.int8)))
        pieces.append(content[at:])
        return np.concatenate(pieces)

    def decode(self, content: Bytes) -> Bytes:
        pieces: list[Bytes] = []
        at = 0
        for part in self._parts:
            piece = content[at : at + _encoded_bytes(part)]
            at += len(piece)
            if not _is_matrix(part):
                pieces.append(piece)
                continue
            num_heads = part.num_layers * part.shape[0]
            scales = piece[: num_heads * SCALE_BYTES].copy().view(np.float32)
            values = piece[num_heads * SCALE_BYTES :].view(np.int8).reshape(num_heads, -1)
            pieces.append(_from_float32(values * scales[:, None], part.dtype))
        pieces.append(content[at:])
        return np.concatenate(pieces)


def _is_matrix(part: StatePart) -> bool:
    return part.name in MATRIX_PARTS and len(part.shape) == 3


def _encoded_bytes(part: StatePart) -> int:
    if not _is_matrix(part):
        return part.num_bytes
    return part.num_layers * (part.shape[0] * SCALE_BYTES + prod(part.shape))


def _flat(values: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1)


def _to_float32(piece: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    piece = np.ascontiguousarray(piece)
    if dtype == "bfloat16":  # the upper half of a float32
        return (piece.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return piece.view(dtype).astype(np.float32)


def _from_float32(values: npt.NDArray[np.float32], dtype: str) -> Bytes:
    if dtype != "bfloat16":
        return _flat(values.astype(dtype))
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    to_even = (bits >> 16) & 1
    return _flat(((bits + 0x7FFF + to_even) >> 16).astype(np.uint16))
