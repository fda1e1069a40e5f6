"""The scripted engine's pools for the colder tiers: token ids in pages, a position and a checksum in rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from turnkeep.cache.spec import StatePart
from turnkeep.cache.tiers.record import Bytes

TOKEN_BYTES = 4


class ScriptedPoolContent:
    """PoolContent of arrays [pages, page_size] int32 and a list of (position, checksum)."""

    row_bytes = 16
    slot_bytes = TOKEN_BYTES
    row_parts: tuple[StatePart, ...] = (StatePart("checksum", 1, (2, 2), "float32"),)

    def __init__(self, pages: npt.NDArray[np.int32], rows: list[tuple[int, int]]) -> None:
        self._pages = pages
        self._rows = rows
        self.page_bytes = pages.shape[1] * TOKEN_BYTES

    def describe(self) -> str:
        return "token ids and checksums"

    def read_pages(self, pages: Sequence[int]) -> Bytes:
        content: Bytes = self._pages[list(pages)].reshape(-1).view(np.uint8)
        return content

    def write_pages(self, pages: Sequence[int], content: Bytes) -> None:
        self._pages[list(pages)] = content.view(np.int32).reshape(len(pages), -1)

    def read_snapshot(self, row: int, page: int, num_slots: int) -> Bytes:
        state = np.array(self._rows[row], dtype=np.int64).view(np.uint8)
        return np.concatenate([state, self._pages[page, :num_slots].copy().view(np.uint8)])

    def write_snapshot(self, row: int, page: int, num_slots: int, content: Bytes) -> None:
        position, checksum = content[: self.row_bytes].copy().view(np.int64).tolist()
        self._rows[row] = (position, checksum)
        if num_slots:
            self._pages[page, :num_slots] = content[self.row_bytes :].copy().view(np.int32)
