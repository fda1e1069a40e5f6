"""What one running request holds of the cache: its page table, its live state row, and how far each has come.

num_committed_tokens <= num_computed_tokens <= capacity_tokens. Committed: published in the prefix tree, immutable.
Computed: keys and values written, the live row advanced to exactly here, or, while drafts are verified, to
num_folded_tokens with the rest in its replay history. Capacity: page slots owned. Plain data: only
the cache manager changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from turnkeep.cache.boundary import Boundary, BoundaryKind

if TYPE_CHECKING:
    from turnkeep.cache.page_node import PageNode
    from turnkeep.cache.retention import Branch
    from turnkeep.cache.snapshot import Snapshot


@dataclass(slots=True, frozen=True)
class Export:
    """A snapshot planned at `position`. row None: an equal snapshot existed already when it was asked for."""

    position: int
    row: int | None
    kind: BoundaryKind


@dataclass(slots=True, eq=False)
class SequenceCache:
    """One open sequence. `path` is the node of the last full committed page, `tail` the node of the own, partly
    filled page once a part of it is committed; both stay in the tree for as long as the sequence is open."""

    path: PageNode
    encoded: bytearray  # the known tokens, encoded as tree keys, as far as they were needed
    state_row: int | None = None
    history_slot: int | None = None
    num_committed_tokens: int = 0
    num_computed_tokens: int = 0
    num_folded_tokens: int = 0  # what the live row contains; the rest of the computed ones lies in the history slot
    capacity_tokens: int = 0
    num_pages: int = 0
    tail: PageNode | None = None
    resumed_from: Snapshot | None = None  # pinned until the sequence publishes a deeper one
    conversation: tuple[str, str] | None = None  # cache root and conversation id, where it has one
    branch: Branch | None = None
    exports: list[Export] = field(default_factory=list)
    boundaries: tuple[Boundary, ...] = ()  # where the cache itself wants snapshots, beyond the match
    may_end_early: bool = False  # perhaps the turn should end at its last full page: the state there is wanted
    is_preparation: bool = False  # of no request: in no count of requests, in no forecast
    num_prompt_tokens: int = 0  # known when it opened
    num_reused_tokens: int = 0  # computed before it opened
    retention_s: float = 0.0  # for how long its client asks that its snapshots stay
    digests: Sequence[int] = ()  # of its prefixes by pages, where the eviction policy told them at its end
    is_closed: bool = False
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(8, np.int32))

    @property
    def num_history_tokens(self) -> int:
        return self.num_computed_tokens - self.num_folded_tokens

    @property
    def page_ids(self) -> npt.NDArray[np.int32]:
        """[num_pages] int32 view: the pages of positions [0, capacity_tokens)."""
        return self.table[: self.num_pages]

    def append_pages(self, page_ids: list[int] | npt.NDArray[np.int32]) -> None:
        """Extend the table; a view taken before keeps showing the old pages."""
        end = self.num_pages + len(page_ids)
        if end > len(self.table):
            table = np.zeros(max(2 * len(self.table), end), np.int32)
            table[: self.num_pages] = self.table[: self.num_pages]
            self.table = table
        self.table[self.num_pages : end] = page_ids
        self.num_pages = end
