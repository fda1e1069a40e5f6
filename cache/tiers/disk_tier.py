"""The disk tier's folder: who may use it, and its reads, writes and erasures, each done in the background.

One engine at a time uses the folder of a layout (a lock that dies with its process). After a failed write nothing is
written for a while; reads go on.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from turnkeep.cache.tiers.background import Background
from turnkeep.cache.tiers.record import Bytes, Record, RecordName
from turnkeep.cache.tiers.record_files import (
    TEMPORARY,
    FoundFile,
    RecordFileError,
    file_bytes,
    file_name,
    read_record,
    scan,
    write_record,
)
from turnkeep.cache.tiers.row_codec import RowCodec
from turnkeep.cache.tiers.tier_counters import TierCounters

LOCK_NAME = "lock"
LAYOUT_NAME = re.compile(r"[0-9a-f]{32}")
OWN_SUFFIXES = (".pages", ".snapshot", TEMPORARY)
LOCK_TIMEOUT_S = 2.5  # a process that was killed may take a moment to be gone
PAUSE_AFTER_FAILURE_S = 60.0


class DiskTierError(Exception):
    """The folder cannot be used; the message says why."""


def layout_folder(base: Path, layout: bytes) -> Path:
    """Where the records of one layout lie."""
    return base / layout.hex()[:32]


def lock_folder(folder: Path, timeout_s: float = LOCK_TIMEOUT_S) -> int:
    """Make the folder and take it for this process; the descriptor is the lock. Raises DiskTierError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DiskTierError(f"{folder} cannot be used: {error.strerror}") from None
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                os.close(descriptor)
                raise DiskTierError(f"{folder} is in use by another engine") from None
            time.sleep(0.05)
        except OSError as error:
            os.close(descriptor)
            raise DiskTierError(f"{folder} cannot be locked: {error.strerror}") from None
        else:
            return descriptor


def trim_other_layouts(base: Path, kept: Path, max_bytes: int) -> int:
    """Remove folders of other layouts, longest unused first, until they hold at most max_bytes. Returns how many.

    One that an engine uses now stays.
    """
    found: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for folder in base.iterdir():
            if folder != kept and LAYOUT_NAME.fullmatch(folder.name) and (folder / LOCK_NAME).is_file():
                files = [entry.stat() for entry in os.scandir(folder)]
                found.append((max(file.st_mtime for file in files), sum(file.st_size for file in files), folder))
    num_bytes = sum(size for _, size, _ in found)
    num_removed = 0
    for _, size, folder in sorted(found):
        if num_bytes <= max_bytes:
            break
        with suppress(DiskTierError, OSError):
            descriptor = lock_folder(folder, timeout_s=0.0)
            try:
                for path in folder.iterdir():
                    if path.suffix in OWN_SUFFIXES or path.name == LOCK_NAME:
                        path.unlink()
                num_bytes -= size
                num_removed += 1
                folder.rmdir()  # fails where somebody else keeps something in it
            finally:
                os.close(descriptor)
    return num_removed


class DiskTier:
    """Files of one layout in one folder. codec: how snapshots are written smaller than they are."""

    def __init__(
        self,
        folder: Path,
        layout: bytes,
        background: Background,
        counters: TierCounters,
        *,
        clock: Callable[[], float],
        codec: RowCodec | None = None,
        lock: int | None = None,
    ) -> None:
        """lock: what `lock_folder` gave for the folder; given back by `close`."""
        self.backlog_bytes = 0  # in host memory, waiting to be written
        self._folder = folder
        self._layout = layout
        self._background = background
        self._counters = counters
        self._clock = clock
        self._codec = codec
        self._lock = lock
        self._next_write_s = clock()

    @property
    def accepts_writes(self) -> bool:
        """False for a while after a write that failed."""
        return self._clock() >= self._next_write_s

    def file_bytes(self, name: RecordName, num_bytes: int) -> int:
        """Length of the file of a record with so many bytes of content."""
        if self._codec is not None and name.kind == "snapshot":
            num_bytes = self._codec.encoded_bytes(num_bytes)
        return file_bytes(name, num_bytes)

    def content_bytes(self, found: FoundFile) -> int:
        """Bytes of a record's content in host memory."""
        if self._codec is not None and found.name.kind == "snapshot":
            return self._codec.decoded_bytes(found.num_bytes)
        return found.num_bytes

    def scan(self) -> list[FoundFile]:
        """What an earlier process left, longest unused first. What cannot be used is counted, and erased. Blocks."""
        found: list[FoundFile] = []
        for file in scan(self._folder, self._layout):
            if isinstance(file, FoundFile):
                found.append(file)
            else:
                self._counters.num_ignored_files[file.fault] += 1
                with suppress(OSError):
                    file.path.unlink()
        found.sort(key=lambda file: file.used_s)
        return found

    def write(self, record: Record, done: Callable[[bool], None]) -> None:
        """Write a record's content; `done` is told whether it is on disk now."""
        content, name, num_bytes = record.data, record.name, record.num_bytes
        assert content is not None
        self.backlog_bytes += num_bytes

        def work() -> None:
            is_encoded = self._codec is not None and name.kind == "snapshot"
            body = self._codec.encode(content) if self._codec is not None and is_encoded else content
            write_record(self._folder, self._layout, name, body)

        def ended(result: BaseException | None) -> None:
            self.backlog_bytes -= num_bytes
            if result is None:
                self._counters.written_bytes += record.file_bytes
            else:
                self._counters.num_failed_writes += 1
                if isinstance(result, OSError):  # a full or broken disk, not a content that cannot be encoded
                    self._next_write_s = self._clock() + PAUSE_AFTER_FAILURE_S
            done(result is None)

        self._background.submit(work, ended)

    def read(self, record: Record, done: Callable[[Bytes | None], None]) -> None:
        """Read a record's content, ahead of all writes; `done` gets None when its file cannot be used."""
        name, num_bytes = record.name, record.num_bytes

        def work() -> Bytes:
            content = read_record(self._folder, self._layout, name)
            if self._codec is not None and name.kind == "snapshot":
                content = self._codec.decode(content)
            if len(content) != num_bytes:
                raise RecordFileError("corrupt", self._folder / file_name(name))
            return content

        def ended(result: Bytes | BaseException) -> None:
            if isinstance(result, BaseException):
                fault = result.fault if isinstance(result, RecordFileError) else "corrupt"
                self._counters.num_ignored_files[fault] += 1
                done(None)
            else:
                self._counters.read_bytes += record.file_bytes
                done(result)

        self._background.submit(work, ended, is_urgent=True)

    def close(self) -> None:
        """Let another engine have the folder. Nothing may be asked of it afterwards."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def erase(self, record: Record) -> None:
        """Remove a record's file, after the writes that wait."""
        path = self._folder / file_name(record.name)
        self._background.submit(partial(path.unlink, missing_ok=True), lambda _: None)
