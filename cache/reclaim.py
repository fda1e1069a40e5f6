"""Makes room: the lives of snapshots, which pages go with them, and eviction until a need is met.

Models with state: snapshots are what is evicted, and a page goes at once when no snapshot at or below it is left and
nothing pins it. Models without state: every token can be resumed from, and unpinned leaf pages are evicted.
Because pins cover everything in use, what eviction can free is known exactly before anything is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sized
from typing import Protocol

from turnkeep.cache.boundary import BoundaryKind
from turnkeep.cache.eviction import Evictable, EvictionPolicy, Need
from turnkeep.cache.eviction_memory import EvictionMemory
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.page_pool import PagePool
from turnkeep.cache.prefix_tree import PrefixTree
from turnkeep.cache.snapshot import PRIVATE_KINDS, Snapshot
from turnkeep.cache.spec import CacheSpec
from turnkeep.cache.state_pool import StatePool
from turnkeep.cache.statistics import CacheCounters


class Offloading(Protocol):
    """Who copies things to a colder tier: told of snapshots that appear and go, and of what is about to be evicted."""

    def added(self, snapshot: Snapshot) -> None: ...

    def superseded(self, snapshot: Snapshot) -> None: ...

    def evicting(self, item: Evictable) -> None: ...

    def removed(self, snapshot: Snapshot) -> None: ...


class Reclaimer:
    """Owns the tree and the pools of one cache. `on_removed` hears of every snapshot that leaves."""

    def __init__(
        self,
        spec: CacheSpec,
        *,
        pages: PagePool,
        rows: StatePool,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        counters: CacheCounters,
    ) -> None:
        self.has_pages = spec.kv is not None
        self.has_state = spec.state is not None
        self.pages = pages
        self.rows = rows
        self.tree = PrefixTree(spec.page_size, pages if self.has_pages else None, observer=self)
        self.memory = EvictionMemory(spec.page_size)
        self.skipped = EvictionMemory(spec.page_size)  # where a snapshot found no row
        self.snapshots: set[Snapshot] = set()
        self.num_pinned_snapshots = 0
        self.on_removed: Callable[[Snapshot], None] | None = None
        self.offloader: Offloading | None = None
        self.give_way: Callable[[], bool] | None = None  # asks who fills pages ahead of need to let them go
        self._policy = policy
        self._clock = clock
        self._counters = counters
        self._page_bytes, self._row_bytes = spec.bytes_per_page, spec.bytes_per_row

    # Counts

    @property
    def num_evictable_pages(self) -> int:
        return self.tree.num_nodes - self.tree.num_pinned if self.has_pages else 0

    @property
    def num_evictable_rows(self) -> int:
        return len(self.snapshots) - self.num_pinned_snapshots

    @property
    def num_items_of_policy(self) -> int | None:
        """For conservation checks: how many things the policy thinks may go, where it can say."""
        return len(self._policy) if isinstance(self._policy, Sized) else None

    def can_make_room(self, num_pages: int, num_rows: int) -> bool:
        """Whether `make_room` would succeed."""
        if self.has_pages and self.pages.num_free + self.num_evictable_pages < num_pages:
            return False
        return not self.has_state or self.rows.num_free + self.num_evictable_rows >= num_rows

    def find_room(self, num_pages: int, num_rows: int) -> bool:
        """`can_make_room`, for who goes before everybody that fills pages ahead of need."""
        if self.can_make_room(num_pages, num_rows):
            return True
        return self.give_way is not None and self.give_way() and self.can_make_room(num_pages, num_rows)

    def make_room(self, num_pages: int, num_rows: int) -> None:
        """Evict until so many pages and rows are free. Raises RuntimeError unless `can_make_room` said so."""
        need = Need(num_pages if self.has_pages else 0, num_rows if self.has_state else 0)
        while self.pages.num_free < need.num_pages or self.rows.num_free < need.num_rows:
            victim = self._policy.victim(need)
            if victim is None:
                raise RuntimeError(
                    f"{need} cannot be met: {self.pages.num_free} pages and {self.rows.num_free} rows are free and "
                    "nothing is left to evict"
                )
            self._evict(victim)

    def trim(self, memory_bytes: int) -> None:
        """Evict until pages and rows in use hold at most so many bytes together, or nothing may go any more."""
        while self.num_used_bytes > memory_bytes and (victim := self._policy.victim(Need(1, 1))) is not None:
            self._evict(victim)

    @property
    def num_used_bytes(self) -> int:
        num_pages = self.pages.num_usable - self.pages.num_free
        num_rows = self.rows.num_usable - self.rows.num_free
        return num_pages * self._page_bytes + num_rows * self._row_bytes

    def _evict(self, victim: Evictable) -> None:
        if self.offloader is not None:
            self.offloader.evicting(victim)
        if isinstance(victim, Snapshot):
            self._evict_snapshot(victim)
        else:
            self._evict_leaf(victim)

    def _evict_snapshot(self, snapshot: Snapshot) -> None:
        node = snapshot.node
        assert node.parent is not None
        self.memory.remember(node.parent, node.suffix(snapshot.num_tokens))
        self._counters.evicted_snapshots[snapshot.kind] += 1
        num_nodes = self.tree.num_nodes
        self.drop(snapshot)
        self._counters.num_evicted_pages += num_nodes - self.tree.num_nodes

    def _evict_leaf(self, node: PageNode) -> None:
        assert node.parent is not None
        self.memory.remember(node.parent, node.key)
        self._counters.num_evicted_pages += 1
        self.tree.remove(node)

    # Snapshots

    def add(self, node: PageNode, position: int, row: int, kind: BoundaryKind) -> Snapshot:
        """A new snapshot at `position` inside `node`; it takes over the reference to `row`."""
        snapshot = Snapshot(node, position, row, kind, self._clock())
        assert node.parent is not None
        node.carry(snapshot)
        node.parent.index_suffix(node.suffix(position), snapshot)
        self.snapshots.add(snapshot)
        self._counters.created_snapshots[kind] += 1
        self._counters.num_snapshot_bytes += self._row_bytes
        self._policy.added(snapshot)
        if self.offloader is not None:
            self.offloader.added(snapshot)
        return snapshot

    def pin(self, snapshot: Snapshot) -> None:
        """Not evictable until as many `unpin`."""
        snapshot.num_pins += 1
        if snapshot.num_pins == 1:
            self.num_pinned_snapshots += 1
            self._policy.removed(snapshot)
            self.tree.pin(snapshot.node)

    def unpin(self, snapshot: Snapshot) -> None:
        snapshot.num_pins -= 1
        assert snapshot.num_pins >= 0
        if snapshot.num_pins == 0:
            self.num_pinned_snapshots -= 1
            snapshot.last_used_s = self._clock()
            self._policy.added(snapshot)
            self.tree.unpin(snapshot.node, snapshot.last_used_s)

    def num_pages_pinned_only_by(self, snapshot: Snapshot) -> int:
        """Pages that one `unpin` of the snapshot would make evictable."""
        number = 0
        node = snapshot.node
        while snapshot.num_pins == 1 and node.num_pins == 1 and node.parent is not None:
            number += 1
            node = node.parent
        return number

    def supersede(self, snapshot: Snapshot) -> None:
        """Among the first victims from now on, unless its kind is shared by conversations."""
        if snapshot.kind in PRIVATE_KINDS and not snapshot.is_superseded:
            snapshot.is_superseded = True
            self._policy.changed(snapshot)
            if self.offloader is not None:
                self.offloader.superseded(snapshot)

    def revive(self, snapshot: Snapshot) -> None:
        """Wanted again."""
        if snapshot.is_superseded:
            snapshot.is_superseded = False
            self._policy.changed(snapshot)
            if self.offloader is not None:
                self.offloader.added(snapshot)

    def touch(self, snapshot: Snapshot) -> None:
        """As good as used just now."""
        snapshot.last_used_s = self._clock()
        self._policy.changed(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        """Remove an unpinned snapshot, with the pages that only it needed."""
        assert not snapshot.num_pins
        node = snapshot.node
        assert node.parent is not None
        snapshot.is_attached = False
        self._policy.removed(snapshot)
        del node.snapshots[snapshot.num_tokens]
        node.parent.drop_suffix(node.suffix(snapshot.num_tokens))
        self.snapshots.remove(snapshot)
        if not snapshot.num_hits:
            self._counters.unused_snapshots[snapshot.kind] += 1
            self._counters.num_unused_prepared_tokens += snapshot.num_prepared_tokens
        self.rows.release(snapshot.row)
        if self.offloader is not None:
            self.offloader.removed(snapshot)
        if self.on_removed is not None:
            self.on_removed(snapshot)
        self.tree.prune(node)

    def drop_rows(self, rows: Collection[int]) -> None:
        """Remove the unpinned snapshots in these rows. O(snapshots)."""
        for snapshot in [one for one in self.snapshots if one.row in rows and not one.num_pins]:
            self.drop(snapshot)

    # Nodes

    def release(self, node: PageNode) -> None:
        """Give back a pin on a node; pages that nothing can use any more go at once."""
        while node.absorbed_into is not None:
            node = node.absorbed_into
        self.tree.unpin(node, self._clock())
        if self.has_state:
            self.tree.prune(node)

    def supersede_page(self, node: PageNode) -> None:
        """For models without state: an unpinned page is among the first victims until a sequence uses it again."""
        node.is_superseded = True
        self._policy.changed(node)

    def leaf_unpinned(self, node: PageNode) -> None:
        if not self.has_state:
            self._policy.added(node)

    def leaf_taken(self, node: PageNode) -> None:
        if not self.has_state:
            self._policy.removed(node)
