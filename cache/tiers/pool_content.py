"""What the tiers need of the device's pools: the bytes of committed pages and rows, out and back. No tensors here.

Called between two steps, by the thread that runs them, so everything committed is there and everything written is seen
by the next step. What is read must be a copy of its own: its page or row may be overwritten by the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from turnkeep.cache.spec import StatePart
from turnkeep.cache.tiers.record import Bytes


class PoolContent(Protocol):
    """Content of the pools, whatever parts they have: all layers of a page, of a token's slot in it, of a row.

    row_parts: the tensors of a row in the order of its bytes.
    """

    page_bytes: int
    slot_bytes: int
    row_bytes: int
    row_parts: tuple[StatePart, ...]

    def describe(self) -> str:
        """Everything about the parts that defines the bytes: names, types, shapes, order."""

    def read_pages(self, pages: Sequence[int]) -> Bytes:
        """[len(pages) * page_bytes], one page after another."""

    def write_pages(self, pages: Sequence[int], content: Bytes) -> None:
        """The other way round."""

    def read_snapshot(self, row: int, page: int, num_slots: int) -> Bytes:
        """[row_bytes + num_slots * slot_bytes]: a row, then the first slots of a page."""

    def write_snapshot(self, row: int, page: int, num_slots: int, content: Bytes) -> None:
        """The other way round; the rest of the page stays as it is."""
