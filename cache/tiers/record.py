"""What a colder tier keeps: records, each written, moved and dropped as one.

A record is a run of full attention pages, or what ends inside a page: a snapshot (a state row with the filled slots of
the page it ends in), for models without state those slots alone, a tail. Records hang together as the prefixes do: a
run needs the run with the page before it, a snapshot or tail the run with the last full page before it. A record
without what it needs is worth nothing, so it goes with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from turnkeep.cache.boundary import BoundaryKind
from turnkeep.cache.encoded_tokens import TOKEN_BYTES

RecordKind = Literal["pages", "snapshot"]
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, frozen=True)
class TierBudget:
    """Bytes that one tier may hold, for pages and for snapshots apart."""

    page_bytes: int
    snapshot_bytes: int

    def of(self, kind: RecordKind) -> int:
        return self.page_bytes if kind == "pages" else self.snapshot_bytes

    @property
    def num_bytes(self) -> int:
        return self.page_bytes + self.snapshot_bytes

    def within(self, num_bytes: int) -> TierBudget:
        """The same proportions in at most so many bytes."""
        if num_bytes >= self.num_bytes:
            return self
        page_bytes = self.page_bytes * num_bytes // self.num_bytes
        return TierBudget(page_bytes, num_bytes - page_bytes)


@dataclass(slots=True, frozen=True)
class RecordName:
    """What a record is, without its content: enough to find it by the tokens of a prompt.

    parent: key of the page before its first token (of the root at the beginning). start: full-page tokens before it.
    page_keys: of a run, one a page. suffix: of a snapshot or tail, the tokens after `start`, encoded as tree keys.
    kind: a tail is of kind "pages", like a run.
    owner: digest of the conversation it was written for, empty without one.
    """

    kind: RecordKind
    key: bytes
    parent: bytes
    start: int
    page_keys: tuple[bytes, ...] = ()
    suffix: bytes = b""
    boundary: BoundaryKind = "declared"
    owner: bytes = b""

    @property
    def position(self) -> int:
        """Of a snapshot or tail: the tokens before its end."""
        return self.start + len(self.suffix) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Record:
    """One thing kept. data: its content while it is in host memory.

    num_holds: what is being written, or waited for by a load, stays in host memory whatever its budget says.
    is_ahead: it was read for a prompt that is expected, and not used since.
    is_on_device: the device has the same (of a run: as far as is known, and only for models without state).
    """

    name: RecordName
    num_bytes: int  # in host memory
    file_bytes: int
    data: Bytes | None = None
    needs: Record | None = None
    users: set[Record] = field(default_factory=set)
    num_holds: int = 0
    is_attached: bool = False
    is_on_device: bool = False
    is_ahead: bool = False

    def chain(self) -> list[Record]:
        """Everything it needs, from the beginning, and itself."""
        records: list[Record] = []
        record: Record | None = self
        while record is not None:
            records.append(record)
            record = record.needs
        records.reverse()
        return records


def as_bytes(data: Any) -> Bytes:
    """Any buffer as a flat uint8 array, without a copy."""
    return np.frombuffer(data, dtype=np.uint8)
