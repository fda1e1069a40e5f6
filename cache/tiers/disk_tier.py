"""The disk tier's files: reads, writes and erasures, each done in the background.

One engine at a time uses the folder of a layout (shared_folder.py). After a failed write nothing is written for a
while; reads go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from turnkeep.cache.tiers.background import Background
from turnkeep.cache.tiers.record import Bytes, Record, RecordName
from turnkeep.cache.tiers.record_files import (
    FoundFile,
    RecordFileError,
    file_bytes,
    file_name,
    read_record,
    scan,
    write_record,
)
from turnkeep.cache.tiers.row_codec import RowCodec
from turnkeep.cache.tiers.shared_folder import FolderShare
from turnkeep.cache.tiers.tier_counters import TierCounters

PAUSE_AFTER_FAILURE_S = 60.0


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
        share: FolderShare | None = None,
    ) -> None:
        """lock: what `lock_folder` gave for the folder; given back by `close`. share: who else uses its parent."""
        self.backlog_bytes = 0  # in host memory, waiting to be written
        self._folder = folder
        self._layout = layout
        self._background = background
        self._counters = counters
        self._clock = clock
        self._codec = codec
        self._lock = lock
        self.share = share
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

    def write(self, record: Record, done: Callable[[bool], None], *, num_held_bytes: int) -> None:
        """Write a record's content; `done` is told whether it is on disk now. num_held_bytes: of all files, with it."""
        content, name, num_bytes = record.data, record.name, record.num_bytes
        assert content is not None
        self.backlog_bytes += num_bytes

        def work() -> None:
            is_encoded = self._codec is not None and name.kind == "snapshot"
            body = self._codec.encode(content) if self._codec is not None and is_encoded else content
            if self.share is not None:
                self.share.make_room(num_held_bytes)
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

    def touch(self, record: Record) -> None:
        """It was used: the order of use survives a restart. What it needs is older for nobody than what needs it."""
        paths = [self._folder / file_name(one.name) for one in reversed(record.chain())]

        def work() -> None:
            now_ns = time.time_ns()
            for number, path in enumerate(paths):
                with suppress(OSError):  # it was erased since, or is not written
                    os.utime(path, ns=(now_ns + number, now_ns + number))

        self._background.submit(work, lambda _: None)

    def close(self) -> None:
        """Let another engine have the folder. Nothing may be asked of it afterwards."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def erase(self, record: Record) -> None:
        """Remove a record's file, after the writes that wait."""
        path = self._folder / file_name(record.name)
        self._background.submit(partial(path.unlink, missing_ok=True), lambda _: None)
