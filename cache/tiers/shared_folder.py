"""The folder that disk tiers of several models lie in: who uses which part of it, and one budget for all of it.

Each layout has a folder of its own, which belongs to the engine that holds its lock (it dies with its process). What
engines that run now hold is counted and never touched. What nobody runs with goes first when room is needed, longest
unused first. Engines that run at the same time have equal parts of the budget at most. Functions here block.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from turnkeep.cache.tiers.record_files import TEMPORARY

LOCK_NAME = "lock"
LAYOUT_NAME = re.compile(r"[0-9a-f]{32}")
OWN_SUFFIXES = (".pages", ".snapshot", TEMPORARY)
LOCK_TIMEOUT_S = 2.5  # a process that was killed may take a moment to be gone


class DiskTierError(Exception):
    """The folder cannot be used; the message says why."""


def layout_folder(base: Path, layout: bytes) -> Path:
    """Where the records of one layout lie."""
    return base / layout.hex()[:32]


def lock_folder(folder: Path, timeout_s: float = LOCK_TIMEOUT_S) -> int:
    """Make the folder and take it for this process; the descriptor is the lock. Raises DiskTierError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DiskTierError(f"{folder} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() >= deadline_s:
                raise DiskTierError(f"{folder} is in use by another engine") from None
            time.sleep(0.05)
        except OSError as error:
            os.close(descriptor)
            raise DiskTierError(f"{folder} cannot be locked: {error.strerror}") from None
        else:
            if _is_at(folder / LOCK_NAME, descriptor):
                return descriptor
            os.close(descriptor)  # it was removed with its folder before it was ours


def held_bytes(base: Path) -> int:
    """Bytes of all records below `base`, whoever uses them."""
    return sum(file.num_bytes for folder in _layout_folders(base) for file in _files(folder))


@dataclass(frozen=True, slots=True)
class LayoutUse:
    """What one layout (a model, its types and versions) holds. used_s: when last, in seconds since 1970; 0 without
    records. is_running: an engine works with it now."""

    name: str
    is_running: bool
    page_bytes: int
    snapshot_bytes: int
    num_page_records: int
    num_snapshot_records: int
    used_s: float


def layouts_in_use(base: Path) -> list[LayoutUse]:
    """All layouts below `base`. Changes nothing there."""
    found: list[LayoutUse] = []
    for folder in _layout_folders(base):
        files = _files(folder)
        pages = [file.num_bytes for file in files if file.path.suffix == ".pages"]
        snapshots = [file.num_bytes for file in files if file.path.suffix == ".snapshot"]
        used_s = max((file.used_s for file in files), default=0.0)
        counts = (sum(pages), sum(snapshots), len(pages), len(snapshots))
        found.append(LayoutUse(folder.name, _is_locked(folder), *counts, used_s))
    return found


@dataclass(frozen=True, slots=True, order=True)
class _File:
    used_s: float
    path: Path
    num_bytes: int


class FolderShare:
    """What one engine may use of `base`, in which `own` is its folder. max_bytes: for all that lies in `base`."""

    def __init__(self, base: Path, own: Path, max_bytes: int) -> None:
        self.num_other_bytes = 0  # as of the last look, without what was erased since
        self._base = base
        self._own = own
        self._max_bytes = max_bytes
        self._num_running_bytes = 0
        self._idle: deque[_File] = deque()  # longest unused first

    def look(self) -> int:
        """Count again what others hold. Returns the bytes that this engine may hold now."""
        num_running, num_running_bytes = 1, 0
        idle: list[_File] = []
        for folder in _layout_folders(self._base):
            if folder == self._own:
                continue
            files = _files(folder)
            if _is_locked(folder):
                num_running += 1
                num_running_bytes += sum(file.num_bytes for file in files)
            else:
                idle += files
        self._num_running_bytes = num_running_bytes
        self._idle = deque(sorted(idle))
        self.num_other_bytes = num_running_bytes + sum(file.num_bytes for file in idle)
        return max(min(self._max_bytes // num_running, self._max_bytes - num_running_bytes), 0)

    def make_room(self, num_own_bytes: int) -> None:
        """Erase what nobody runs with until all of it, with so much of our own, is within the budget."""
        num_excess = self.num_other_bytes + num_own_bytes - self._max_bytes
        victims: dict[Path, list[_File]] = {}
        while self._idle and num_excess > 0:
            file = self._idle.popleft()
            num_excess -= file.num_bytes
            victims.setdefault(file.path.parent, []).append(file)
        for folder, files in victims.items():
            try:
                lock = lock_folder(folder, timeout_s=0.0)
            except DiskTierError:
                continue  # somebody runs with it since the last look; the next one says so
            try:
                for file in files:
                    with suppress(OSError):
                        file.path.unlink(missing_ok=True)
                        self.num_other_bytes -= file.num_bytes
                if not _files(folder):
                    with suppress(OSError):  # somebody else keeps something in it
                        (folder / LOCK_NAME).unlink()
                        folder.rmdir()
            finally:
                os.close(lock)


def _layout_folders(base: Path) -> Iterator[Path]:
    with suppress(OSError):
        for folder in base.iterdir():
            if LAYOUT_NAME.fullmatch(folder.name) and (folder / LOCK_NAME).is_file():
                yield folder


def _files(folder: Path) -> list[_File]:
    found: list[_File] = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(OWN_SUFFIXES):
                with suppress(OSError):  # it goes while we look
                    status = entry.stat(follow_symlinks=False)
                    found.append(_File(status.st_mtime, Path(entry.path), status.st_size))
    return found


def _is_locked(folder: Path) -> bool:
    """Whether an engine runs with it; also where we may not know."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False
