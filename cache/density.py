"""Eviction by density: what brings back the fewest seconds for the bytes it holds goes first.

    density = return index of its owner x chance that the next turn resumes exactly here x seconds saved / bytes freed

Seconds and bytes are marginal to the next shallower snapshot, so one order ranks the snapshots of a conversation
against each other, against those of others and against shared prefixes. Everything that is a guess is learnt online.
Pages go with the snapshot that needed them last; models without state keep the least recently used order of pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from turnkeep.cache.branch_forecast import LikelyBranch
from turnkeep.cache.encoded_tokens import TOKEN_BYTES
from turnkeep.cache.eviction import Evictable, LRUPolicy, Need
from turnkeep.cache.lines import Line, Trunk
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.prefix_history import Mark
from turnkeep.cache.snapshot import Snapshot
from turnkeep.cache.spec import CacheSpec

TOLERANCE = 1.05  # a victim that turned out to be denser than this much over its place in the heap is put back
LEVEL_MEMORY = 0.05  # weight of the newest victim in the running mean of densities


@dataclass(slots=True, eq=False)
class Record:
    """What is known of one snapshot. base, num_pages: marginal to its neighbours when they were last looked at."""

    owner: Line | Trunk | None = None
    mark: Mark | None = None
    likely: LikelyBranch | None = None  # others may resume here too
    base: int = 0
    num_pages: int = 0
    key: float = 0.0
    version: int = 0
    is_evictable: bool = False
    is_useless: bool = False  # nobody will ask for exactly this prefix any more


class DensityOrder:
    """The heap of snapshots by density, and the walk over their neighbours. `valuation`: index x chance of a record.

    One valid entry per evictable snapshot; a change pushes a new one, stale ones are skipped when they surface.
    """

    def __init__(self, spec: CacheSpec, cost: PrefillCost, valuation: Callable[[Snapshot, Record], float]) -> None:
        self.records: dict[Snapshot, Record] = {}
        self.level = 0.0  # running mean of the densities evicted
        self.is_full = False  # something was evicted once
        self._cost = cost
        self._valuation = valuation
        self._row_bytes = max(spec.bytes_per_row, 1)
        self._page_bytes = spec.bytes_per_page
        self._heap: list[tuple[float, int, int, Snapshot]] = []
        self._ticks = count()
        self._num_evictable = 0
        self._disturbed: list[Snapshot] = []  # a neighbour left: to be looked at again
        self._leaves = LRUPolicy()
        self._chosen: Snapshot | None = None

    def __len__(self) -> int:
        return self._num_evictable + len(self._leaves)

    def record(self, snapshot: Snapshot) -> Record:
        """Its record, made when absent."""
        record = self.records.get(snapshot)
        if record is None:
            record = self.records[snapshot] = Record()
        return record

    # EvictionPolicy

    def added(self, item: Evictable) -> None:
        if isinstance(item, PageNode):
            self._leaves.added(item)
            return
        record = self.record(item)
        self._num_evictable += not record.is_evictable
        record.is_evictable = True
        self.measure(item, record)
        self.push(item, record)

    def removed(self, item: Evictable) -> None:
        if isinstance(item, PageNode):
            self._leaves.removed(item)
            return
        record = self.records.get(item)
        if record is None:
            return
        record.version += 1
        self._num_evictable -= record.is_evictable
        record.is_evictable = False
        if not item.is_attached:
            self._left(item, record)

    def changed(self, item: Evictable) -> None:
        if isinstance(item, PageNode):
            self._leaves.changed(item)

    def victim(self, need: Need) -> Evictable | None:
        self.look_again()
        while self._heap:
            key, _, version, snapshot = self._heap[0]
            record = self.records.get(snapshot)
            if record is None or record.version != version:
                heappop(self._heap)
                continue
            self.measure(snapshot, record)
            if self.density(snapshot, record) > key * TOLERANCE:
                heappop(self._heap)
                self.push(snapshot, record)
                continue
            self._chosen = snapshot
            return snapshot
        return self._leaves.victim(need)

    # Densities

    def density(self, snapshot: Snapshot, record: Record) -> float:
        freed = self._row_bytes + record.num_pages * self._page_bytes
        return self._valuation(snapshot, record) * self._cost.seconds(record.base, snapshot.num_tokens) / freed

    def expected_density(self, value: float, base: int, position: int) -> float:
        """Density that a snapshot at `position` would have above the one at `base`, with deeper ones to come."""
        return value * self._cost.seconds(base, position) / self._row_bytes

    def push(self, snapshot: Snapshot, record: Record) -> None:
        """Its density may have changed. O(log n)."""
        if not record.is_evictable:
            return
        record.version += 1
        record.key = self.density(snapshot, record)
        heappush(self._heap, (record.key, next(self._ticks), record.version, snapshot))
        if len(self._heap) > 64 + 4 * self._num_evictable:
            self._heap = [
                (kept.key, next(self._ticks), kept.version, owner)
                for owner, kept in self.records.items()
                if kept.is_evictable
            ]
            heapify(self._heap)

    def measure(self, snapshot: Snapshot, record: Record) -> None:
        """Look at the neighbours: what is recomputed without it, and which pages go with it. O(pages in between)."""
        shallower, record.num_pages = neighbours(snapshot)
        record.base = shallower.num_tokens if shallower is not None else 0

    def disturb(self, snapshot: Snapshot | None) -> None:
        """A neighbour came or goes: look at this one again before the next victim."""
        if snapshot is not None:
            self._disturbed.append(snapshot)

    def look_again(self) -> None:
        """Measure those whose neighbours came or went. Done by every victim; done in between it stays O(log n)."""
        if not self._disturbed:
            return
        disturbed, self._disturbed = dict.fromkeys(self._disturbed), []
        for snapshot in disturbed:
            record = self.records.get(snapshot)
            if record is not None:
                self.measure(snapshot, record)
                self.push(snapshot, record)

    def _left(self, snapshot: Snapshot, record: Record) -> None:
        del self.records[snapshot]
        if snapshot is self._chosen:
            self.is_full = True
            self.level += LEVEL_MEMORY * (record.key - self.level)
            self._chosen = None
        self.disturb(neighbours(snapshot)[0])
        owner = record.owner
        if isinstance(owner, Trunk):
            owner.snapshot = None
        elif owner is not None and snapshot in owner.snapshots:
            owner.snapshots.remove(snapshot)
            for other in owner.snapshots:
                self.push(other, self.records[other])


def neighbours(snapshot: Snapshot) -> tuple[Snapshot | None, int]:
    """The next shallower snapshot on its path, and the number of pages that only this one needs."""
    node, position = snapshot.node, snapshot.num_tokens
    is_alone = not node.children and position == max(node.snapshots)
    found = _deepest_in(node, position - 1)
    if found is not None:
        return found, int(is_alone and found.node is not node)
    num_pages = int(is_alone)
    node = _parent(node)
    parent = node.parent
    while parent is not None:
        is_alone = is_alone and len(node.children) == 1
        found = _deepest_in(node, node.end) if parent.suffixes else None
        if found is not None:
            return found, num_pages + int(is_alone and found.node is not node)
        num_pages += is_alone
        node, parent = parent, parent.parent
        if parent is not None and node.passable is not None:
            start = node.start
            while (above := parent.passable) is not None:
                node, parent = parent, above
            num_pages += is_alone * ((start - node.start) // (node.end - node.start))
    return None, num_pages


def _parent(node: PageNode) -> PageNode:
    assert node.parent is not None
    return node.parent


def _deepest_in(node: PageNode, limit: int) -> Snapshot | None:
    """The deepest snapshot in this page at most at `limit`; a sibling with the same tokens may carry it."""
    suffixes = _parent(node).suffixes
    if suffixes:
        key = node.key
        for end in range((limit - node.start) * TOKEN_BYTES, 0, -TOKEN_BYTES):
            found = suffixes.get(key[:end])
            if found is not None:
                return found
    return None
