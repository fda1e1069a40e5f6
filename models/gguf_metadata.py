"""The header of a GGUF file: its metadata, and where each tensor lies. Torch-free and without dependencies.

Reads the header once from a memory map; tensor data is only located. Knows no model type: `gguf_source.py` gives the
keys a meaning, `weights.py` reads the tensors.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GGUFError(ValueError):
    """The file is not GGUF, is cut short, or is of an unknown version."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: `shape` in row-major order (the file stores it reversed), `type_id` of GGML, `offset` in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything in a GGUF file but the tensor data."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = 0

    def take(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self.data, self.position)[0]
        self.position += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        length = self.take("Q")
        end = self.position + length
        if end > len(self.data):
            raise struct.error("text runs past the end")
        value = self.data[self.position : end].decode("utf-8", errors="replace")
        self.position = end
        return value

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            item_kind, count = self.take("I"), self.take("Q")
            if item_kind in SCALARS:
                code = f"<{count}{SCALARS[item_kind]}"
                values = list(struct.unpack_from(code, self.data, self.position))
                self.position += struct.calcsize(code)
                return values
            return [self.value(item_kind) for _ in range(count)]
        if kind not in SCALARS:
            raise struct.error(f"metadata value of unknown type {kind}")
        return self.take(SCALARS[kind])


def _read(cursor: _Cursor, path: Path) -> GGUFHeader:
    if cursor.data[:4] != MAGIC:
        raise GGUFError(f"{path} is not a GGUF file (it does not start with 'GGUF')")
    cursor.position = 4
    version = cursor.take("I")
    if version not in VERSIONS:
        raise GGUFError(f"{path} is GGUF version {version}; versions {VERSIONS[0]} and {VERSIONS[-1]} can be read")
    num_tensors, num_values = cursor.take("Q"), cursor.take("Q")
    metadata = {}
    for _ in range(num_values):
        key, kind = cursor.text(), cursor.take("I")
        metadata[key] = cursor.value(kind)
    tensors = []
    for _ in range(num_tensors):
        name, num_dims = cursor.text(), cursor.take("I")
        shape = tuple(cursor.take("Q") for _ in range(num_dims))[::-1]
        tensors.append(GGUFTensor(name, shape, cursor.take("I"), cursor.take("Q")))
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT))
    start = -(-cursor.position // alignment) * alignment
    located = {t.name: GGUFTensor(t.name, t.shape, t.type_id, start + t.offset) for t in tensors}
    return GGUFHeader(path, metadata, located)


def read_gguf_header(path: Path) -> GGUFHeader:
    """Metadata and tensor table of the file at `path`. Raises GGUFError, or OSError when it cannot be opened."""
    with open(path, "rb") as file:
        if path.stat().st_size < 24:
            raise GGUFError(f"{path} is too short to be a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(_Cursor(data), path)
            except (struct.error, MemoryError) as error:
                raise GGUFError(f"the header of {path} is damaged or cut short: {error}") from error
