"""Which cached thing goes first. A policy ranks what may go; it knows nothing of pools, pages or the tree's shape.

What may go: snapshots that nothing pins (models with state: their pages go with the last snapshot that needs them),
or unpinned leaf pages (models without). Both carry `last_used_s` and `is_superseded`.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from turnkeep.cache.boundary import Boundary, BoundaryKind
from turnkeep.cache.encoded_tokens import TokenIds
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.snapshot import Snapshot

if TYPE_CHECKING:
    from turnkeep.cache.prefix_match import PrefixMatch
    from turnkeep.cache.sequence_cache import SequenceCache

Evictable = Snapshot | PageNode


@dataclass(slots=True, frozen=True)
class Need:
    """What is short, for policies that weigh what a victim would free."""

    num_pages: int
    num_rows: int


class EvictionPolicy(Protocol):
    """Told of every change of what may go; asked for one victim at a time. Each call O(log n) or better."""

    def added(self, item: Evictable) -> None:
        """`item` may go from now on."""

    def removed(self, item: Evictable) -> None:
        """`item` may not go any more: pinned, built upon, or gone. Unknown items are ignored."""

    def changed(self, item: Evictable) -> None:
        """`last_used_s` or `is_superseded` of an item changed; ignored unless it may go."""

    def victim(self, need: Need) -> Evictable | None:
        """What should go next, without removing it; None when nothing may go."""


@runtime_checkable
class TurnObserver(Protocol):
    """What a policy may be besides: one that follows conversations. Told only in models with state.

    A sequence arrives, publishes snapshots, and finishes or closes; what `finished` returns is settled once it is
    known how much of the turn the next prompt repeats.
    """

    def arrived(
        self, seq: SequenceCache, match: PrefixMatch, conversation: tuple[str, str] | None
    ) -> tuple[Boundary, ...]:
        """`seq` opened at `match`. Returns where else than at the request's boundaries a snapshot is worth a row."""

    def wants(self, seq: SequenceCache, position: int, kind: BoundaryKind) -> bool:
        """Whether a snapshot there is worth writing."""

    def published(self, seq: SequenceCache, snapshot: Snapshot) -> None:
        """`seq` made this snapshot, or found it there."""

    def prepared(self, seq: SequenceCache, snapshot: Snapshot) -> None:
        """A sequence that did not arrive made a snapshot for the next turn of its conversation."""

    def turn_end(self, seq: SequenceCache, token_ids: TokenIds) -> int:
        """`seq` is about to finish: after how many of its computed tokens the turn should end."""

    def finished(self, seq: SequenceCache, *, is_suspended: bool) -> object | None:
        """All of `seq` is published."""

    def settled(self, turn: object, stable_tokens: int, *, has_tool_call: bool | None) -> None:
        """The prompt after a finished turn repeats so much of it. Too late when it came already."""

    def closed(self, seq: SequenceCache) -> None:
        """`seq` closed; ignored after `finished`."""

    def conversation_closed(self, conversation: tuple[str, str]) -> None:
        """It will not return."""


class LRUPolicy:
    """Superseded things first, the least recently used of them first; then the least recently used of the rest.

    A heap with one valid entry per item; entries of items that changed or left are skipped when they surface.
    """

    def __init__(self) -> None:
        self._entries: dict[Evictable, tuple[int, float, int]] = {}
        self._heap: list[tuple[tuple[int, float, int], Evictable]] = []
        self._ticks = count()

    def __len__(self) -> int:
        return len(self._entries)

    def added(self, item: Evictable) -> None:
        # The tick makes every entry distinct (the heap never compares items) and orders equal times by arrival.
        entry = (0 if item.is_superseded else 1, item.last_used_s, next(self._ticks))
        self._entries[item] = entry
        heappush(self._heap, (entry, item))
        if len(self._heap) > 64 + 3 * len(self._entries):
            self._heap = [(kept, owner) for owner, kept in self._entries.items()]
            heapify(self._heap)

    def removed(self, item: Evictable) -> None:
        self._entries.pop(item, None)

    def changed(self, item: Evictable) -> None:
        if item in self._entries:
            self.added(item)

    def victim(self, need: Need) -> Evictable | None:
        while self._heap:
            entry, item = self._heap[0]
            if self._entries.get(item) == entry:
                return item
            heappop(self._heap)
        return None
