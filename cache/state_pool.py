"""Ids and reference counts of state rows: one row holds all recurrent layers' state of one position.

Row 0 is padding and is never handed out. A row is a sequence's live row, planned for a snapshot, or a snapshot's; it
passes from one to the next without a copy. No tensors here.
"""

from __future__ import annotations


class StatePool:
    """Rows 1 .. num_rows - 1."""

    def __init__(self, num_rows: int) -> None:
        self.num_usable = max(num_rows - 1, 0)
        self._references = [0] * max(num_rows, 1)
        self._free = list(range(num_rows - 1, 0, -1))
        self.max_used = 0  # most rows that were ever in use at once

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Take a row with one reference. Raises RuntimeError when none is free: callers make room first."""
        if not self._free:
            raise RuntimeError("no state row is free")
        row = self._free.pop()
        self._references[row] = 1
        self.max_used = max(self.max_used, self.num_usable - len(self._free))
        return row

    def retain(self, row: int) -> None:
        """One more holder of a row in use."""
        if self._references[row] < 1:
            raise RuntimeError(f"state row {row} is free and cannot be retained")
        self._references[row] += 1

    def release(self, row: int) -> None:
        """One holder fewer; the last one frees the row."""
        if self._references[row] < 1:
            raise RuntimeError(f"state row {row} released more often than retained")
        self._references[row] -= 1
        if self._references[row] == 0:
            self._free.append(row)

    def num_references(self, row: int) -> int:
        return self._references[row]

    def free_ids(self) -> list[int]:
        """For conservation checks: a copy of the free list."""
        return list(self._free)
