"""The disk tier's files: one record each, named by its key, complete or not there at all.

    magic, length and CRC-32 of the header | header (msgpack) | content

The header says which layout (model, types, versions) the content belongs to, what it is, how long it is, and its
SHA-256. A file is written beside its place and renamed into it; files are 0600, their folder 0700. Whatever is not
whole and ours is left out and counted, never an error. Functions here block: they run beside the engine's loop.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal
from zlib import crc32

import msgspec
import numpy as np

from turnkeep.cache.boundary import BoundaryKind
from turnkeep.cache.tiers.keys import KEY_BYTES
from turnkeep.cache.tiers.record import Bytes, RecordKind, RecordName

FORMAT_VERSION = 2
MAGIC = b"TKTIER1\n"
PREFIX = struct.Struct(">8sII")
MAX_HEADER_BYTES = 1 << 24
TEMPORARY = ".part"

FileFault = Literal["truncated", "corrupt", "foreign", "missing"]


class RecordFileError(Exception):
    """A file that cannot be used. fault: truncated, corrupt, foreign (of another layout or program) or missing."""

    def __init__(self, fault: FileFault, path: Path) -> None:
        super().__init__(f"{path.name}: {fault}")
        self.fault: FileFault = fault
        self.path = path


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a file says of itself. Keys of a run's pages are joined into one value."""

    layout: bytes
    kind: RecordKind
    key: bytes
    parent: bytes
    start: int
    page_keys: bytes
    suffix: bytes
    boundary: BoundaryKind
    owner: bytes
    num_bytes: int
    checksum: bytes

    def record_name(self) -> RecordName:
        keys = self.page_keys
        return RecordName(
            kind=self.kind,
            key=self.key,
            parent=self.parent,
            start=self.start,
            page_keys=tuple(keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)),
            suffix=self.suffix,
            boundary=self.boundary,
            owner=self.owner,
        )


_decoder = msgspec.msgpack.Decoder(Header)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file whose header is good and whose length is right. Its content is checked when it is read."""

    name: RecordName
    num_bytes: int  # of the content
    file_bytes: int
    used_s: float


def file_name(name: RecordName) -> str:
    return f"{name.key.hex()}.{name.kind}"


def file_bytes(name: RecordName, num_content_bytes: int) -> int:
    """Length of the file of a record."""
    return len(_encode_prefix(_header(b"\0" * KEY_BYTES, name, num_content_bytes, b"\0" * 32))) + num_content_bytes


def write_record(folder: Path, layout: bytes, name: RecordName, content: Bytes) -> None:
    """Write one record; a file of that name is replaced by an equal one. Raises OSError, and leaves nothing then."""
    prefix = _encode_prefix(_header(layout, name, len(content), sha256(content.data).digest()))
    path = folder / file_name(name)
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for part in (memoryview(prefix), content.data):
                while part:
                    part = part[file.write(part) :]
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_record(folder: Path, layout: bytes, name: RecordName) -> Bytes:
    """Content of a record, checked. Raises RecordFileError."""
    path = folder / file_name(name)
    try:
        with path.open("rb", buffering=0) as file:
            header = _read_header(file.fileno(), path)
            content = np.empty(header.num_bytes, dtype=np.uint8)
            view = content.data
            while view:
                num_read = file.readinto(view)
                if not num_read:
                    raise RecordFileError("truncated", path)
                view = view[num_read:]
    except OSError:
        raise RecordFileError("missing", path) from None
    if header.layout != layout or header.key != name.key or header.kind != name.kind:
        raise RecordFileError("foreign", path)
    if sha256(content.data).digest() != header.checksum:
        raise RecordFileError("corrupt", path)
    return content


def scan(folder: Path, layout: bytes) -> Iterator[FoundFile | RecordFileError]:
    """Every record of a folder, and every file that cannot be used. Half-written files of a process that died go."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name.endswith(TEMPORARY):
            with suppress(OSError):
                path.unlink()
        elif entry.name.endswith((".pages", ".snapshot")):
            try:
                yield _look_at(path, layout)
            except RecordFileError as error:
                yield error


def _look_at(path: Path, layout: bytes) -> FoundFile:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        raise RecordFileError("missing", path) from None
    try:
        header = _read_header(descriptor, path)
        status = os.fstat(descriptor)
        num_header_bytes = os.lseek(descriptor, 0, os.SEEK_CUR)
    except OSError:
        raise RecordFileError("corrupt", path) from None
    finally:
        os.close(descriptor)
    if header.layout != layout or file_name(name := header.record_name()) != path.name:
        raise RecordFileError("foreign", path)
    if status.st_size != num_header_bytes + header.num_bytes:
        raise RecordFileError("truncated", path)
    return FoundFile(name, header.num_bytes, status.st_size, status.st_mtime)


def _read_header(descriptor: int, path: Path) -> Header:
    """The header at the start of an open file; the file stands behind it then. Raises RecordFileError, OSError."""
    prefix = os.read(descriptor, PREFIX.size)
    if len(prefix) < PREFIX.size:
        raise RecordFileError("truncated", path)
    magic, length, checksum = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise RecordFileError("foreign", path)
    if length > MAX_HEADER_BYTES:
        raise RecordFileError("corrupt", path)
    body = os.read(descriptor, length)
    if len(body) < length:
        raise RecordFileError("truncated", path)
    if crc32(body) != checksum:
        raise RecordFileError("corrupt", path)
    try:
        header = _decoder.decode(body)
    except msgspec.MsgspecError:
        raise RecordFileError("corrupt", path) from None
    if header.num_bytes < 0 or len(header.page_keys) % KEY_BYTES or header.start < 0:
        raise RecordFileError("corrupt", path)
    return header


def _header(layout: bytes, name: RecordName, num_bytes: int, checksum: bytes) -> Header:
    return Header(
        layout=layout,
        kind=name.kind,
        key=name.key,
        parent=name.parent,
        start=name.start,
        page_keys=b"".join(name.page_keys),
        suffix=name.suffix,
        boundary=name.boundary,
        owner=name.owner,
        num_bytes=num_bytes,
        checksum=checksum,
    )


def _encode_prefix(header: Header) -> bytes:
    body = msgspec.msgpack.encode(header)
    return PREFIX.pack(MAGIC, len(body), crc32(body)) + body
