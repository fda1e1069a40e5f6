"""Ids and reference counts of attention pages: who holds a page is the caller's business, when it is free is ours.

Page 0 is padding in every page table and is never handed out. No tensors here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class PagePool:
    """Pages 1 .. num_pages - 1. Holders: a node of the prefix tree, an open sequence's table, a copy not yet run."""

    def __init__(self, num_pages: int) -> None:
        self.num_usable = max(num_pages - 1, 0)
        self._references = np.zeros(max(num_pages, 1), np.int32)
        self._free = list(range(num_pages - 1, 0, -1))
        self.max_used = 0  # most pages that were ever in use at once

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Take pages with one reference each. Raises RuntimeError when fewer are free: callers make room first."""
        if num_pages > len(self._free):
            raise RuntimeError(f"{num_pages} pages asked for, {len(self._free)} free")
        if num_pages == 0:
            return []
        taken = self._free[-num_pages:]
        del self._free[-num_pages:]
        self._references[taken] = 1
        self.max_used = max(self.max_used, self.num_usable - len(self._free))
        return taken

    def retain(self, page: int) -> None:
        """One more holder of a page in use."""
        if self._references[page] < 1:
            raise RuntimeError(f"page {page} is free and cannot be retained")
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One holder fewer; the last one frees the page."""
        count = self._references[page] - 1
        if count < 0:
            raise RuntimeError(f"page {page} released more often than retained")
        self._references[page] = count
        if count == 0:
            self._free.append(page)

    def retain_all(self, page_ids: npt.NDArray[np.int32]) -> None:
        """One more holder of each; the ids must be distinct, as those of one page table are."""
        counts = self._references[page_ids]
        if len(counts) and int(counts.min()) < 1:
            raise RuntimeError("a free page cannot be retained")
        self._references[page_ids] = counts + 1

    def release_all(self, page_ids: npt.NDArray[np.int32]) -> None:
        """One holder fewer of each; the ids must be distinct."""
        if not len(page_ids):
            return
        counts = self._references[page_ids] - 1
        if int(counts.min()) < 0:
            raise RuntimeError("a page was released more often than retained")
        self._references[page_ids] = counts
        # Tails first on the free list's far end: the head of a freed run is handed out first again.
        self._free.extend(page_ids[counts == 0][::-1].tolist())

    def num_references(self, page: int) -> int:
        return int(self._references[page])

    def free_ids(self) -> list[int]:
        """For conservation checks: a copy of the free list."""
        return list(self._free)
