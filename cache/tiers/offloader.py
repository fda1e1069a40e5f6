"""Device -> host memory -> disk: what is copied out when, and in which order.

Everything copied is committed and never changes, so it may be copied while it stays in use: in idle time ahead of need
(what a conversation's next turn resumes from, once it has stood still for a moment), or at the last moment when it is
evicted. What is there already is never copied twice. Runs go before the snapshots that need them, so whatever a process
had written when it died is whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from turnkeep.cache.boundary import BoundaryKind
from turnkeep.cache.encoded_tokens import TOKEN_BYTES
from turnkeep.cache.eviction import Evictable
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.snapshot import Snapshot
from turnkeep.cache.tiers.cold_index import ColdIndex
from turnkeep.cache.tiers.disk_tier import DiskTier
from turnkeep.cache.tiers.keys import KEY_BYTES, node_key, owner_key, snapshot_key
from turnkeep.cache.tiers.pool_content import PoolContent
from turnkeep.cache.tiers.record import Bytes, Record, RecordKind, RecordName, TierBudget
from turnkeep.cache.tiers.tier_counters import TierCounters

RUN_BYTES = 2 << 20  # of one record of pages: copied and read in a few milliseconds
IDLE_BYTES = 2 << 20  # copied before the loop looks for messages again
HEADER_BYTES = 320  # of a file, at most, without the keys of its pages
MIN_BACKLOG_BYTES = 64 << 20
QUIET_S = 1.0  # in a tool loop a snapshot is superseded within a second; writing it would be for nothing
IDLE_KINDS: frozenset[BoundaryKind] = frozenset({"trunk", "turn_start", "turn_end", "declared", "branch"})
OFFLOADED_KINDS = IDLE_KINDS | {"suspended"}

Owner = tuple[str, str | None]  # cache root, conversation id


@dataclass(slots=True)
class _Unwritten:
    """owner: of what is no snapshot; a snapshot knows its keepers. num_rounds: how often some of it was copied."""

    since_s: float
    owner: Owner | None = None
    num_rounds: int = 0


class Offloader:
    """`disk` None: host memory alone, filled by evictions."""

    def __init__(
        self,
        layout: bytes,
        page_size: int,
        *,
        pool: PoolContent,
        index: ColdIndex,
        disk: DiskTier | None,
        counters: TierCounters,
        clock: Callable[[], float],
        has_pages: bool,
        has_state: bool,
    ) -> None:
        self._layout = layout
        self._page_size = page_size
        self._pool = pool
        self._index = index
        self._disk = disk
        self._counters = counters
        self._clock = clock
        self._has_pages = has_pages
        self._has_state = has_state
        self._run_pages = max(RUN_BYTES // pool.page_bytes, 1) if has_pages else 1
        self._max_backlog = max(index.host.budget.num_bytes, MIN_BACKLOG_BYTES)
        # What idle time may be spent on, and since when; snapshots, or the last page of a turn without state.
        self._unwritten: OrderedDict[Evictable, _Unwritten] = OrderedDict()
        self._stored: dict[Snapshot, Record] = {}

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten)

    # What the cache reports

    def added(self, snapshot: Snapshot) -> None:
        """A snapshot was published, or is wanted again."""
        if self._disk is not None and snapshot.kind in IDLE_KINDS and not self._holds(snapshot):
            self._unwritten[snapshot] = _Unwritten(self._clock())

    def turn_ended(self, owner: Owner | None, node: PageNode) -> None:
        """A model without state: a turn's last page is in the tree, full or not."""
        if self._disk is not None and node.parent is not None:
            self._unwritten[node] = _Unwritten(self._clock(), owner)

    def superseded(self, snapshot: Snapshot) -> None:
        """A newer one of its kind took its place."""
        self._unwritten.pop(snapshot, None)
        if self._holds(snapshot):
            self._index.supersede(self._stored[snapshot])

    def evicting(self, item: Evictable) -> None:
        """It leaves the device now: the last moment to copy it."""
        if isinstance(item, Snapshot):
            if not item.is_superseded and item.kind in OFFLOADED_KINDS and not self._holds(item):
                self._store(self._last_full_node(item), item, _owner(item), max_bytes=None)
            return
        known = self._known(item)
        if known is None and not item.is_superseded:
            self._store_page(item, None, max_bytes=None)
            known = self._known(item)
        if known is not None:
            known.is_on_device = False

    def removed(self, snapshot: Snapshot) -> None:
        """It left the device, evicted or dropped."""
        self._unwritten.pop(snapshot, None)
        record = self._stored.pop(snapshot, None)
        if record is not None:
            record.is_on_device = False

    def is_stored(self, snapshot: Snapshot, record: Record) -> None:
        """The snapshot came from this record: it need not be written again."""
        self._unwritten.pop(snapshot, None)
        self._stored[snapshot] = record
        record.is_on_device = True

    def _holds(self, snapshot: Snapshot) -> bool:
        """Whether some tier has it still."""
        record = self._stored.get(snapshot)
        return record is not None and record.is_attached

    # Idle time

    def write_ahead(self, *, is_hurried: bool = False) -> bool:
        """Copy the next bytes that are worth it. False: nothing is to be done now. is_hurried: the engine leaves."""
        if self._disk is None or not self._disk.accepts_writes or self._disk.backlog_bytes > self._max_backlog:
            return False
        ready_s = self._clock() - (0.0 if is_hurried else QUIET_S)
        for item, unwritten in self._unwritten.items():
            if unwritten.since_s > ready_s:
                break
            if isinstance(item, Snapshot) and item.num_pins:
                continue
            # What a tier drops again while it is being written would be written for ever.
            unwritten.num_rounds += 1
            num_tokens = item.num_tokens if isinstance(item, Snapshot) else item.end
            max_rounds = 2 + num_tokens * self._pool.slot_bytes // IDLE_BYTES
            if self._write(item, unwritten.owner) or unwritten.num_rounds > max_rounds:
                self._unwritten.pop(item, None)
            return True
        return False

    def _write(self, item: Evictable, owner: Owner | None) -> bool:
        """True when nothing of it is left to copy."""
        if isinstance(item, Snapshot):
            return self._store(self._last_full_node(item), item, _owner(item), max_bytes=IDLE_BYTES)
        node = item
        while node.absorbed_into is not None:
            node = node.absorbed_into
        return not node.is_attached or self._store_page(node, owner, max_bytes=IDLE_BYTES)

    # Copying

    def _is_full(self, node: PageNode) -> bool:
        return len(node.key) == self._page_size * TOKEN_BYTES

    def _known(self, node: PageNode) -> Record | None:
        """The record that holds a page, of models without state."""
        assert node.parent is not None
        if self._is_full(node):
            return self._index.pages.get(node_key(self._layout, node), (None, 0))[0]
        return self._index.suffixes.get(node_key(self._layout, node.parent), {}).get(node.key)

    def _store_page(self, node: PageNode, owner: Owner | None, *, max_bytes: int | None) -> bool:
        """Copy everything up to a page, which may be filled in part, of a model without state."""
        assert node.parent is not None
        if self._is_full(node):
            return self._store(node, None, owner, max_bytes=max_bytes)
        return self._store(node.parent, node, owner, max_bytes=max_bytes)

    def _store(self, node: PageNode, ending: Evictable | None, owner: Owner | None, *, max_bytes: int | None) -> bool:
        """Copy the full pages up to `node` that are not stored yet, then the snapshot or tail behind them. max_bytes
        None: all or nothing.

        True when nothing is left to copy, or nothing can be.
        """
        record = None if ending is None else self._ending_record(ending, node, owner)
        known = None if record is None else self._index.find(record)
        if known is not None:
            if isinstance(ending, Snapshot):
                self.is_stored(ending, known)
            self._index.touch(known)
            return True
        is_for_disk = self._fits_disk(node, record)
        if not is_for_disk and (max_bytes is not None or not self._fits_host(node, record)):
            self._counters.num_skipped_offloads["budget"] += 1
            return True
        nodes = self._unstored(node)
        num_bytes = len(nodes) * self._pool.page_bytes + (0 if record is None else record.num_bytes)
        if max_bytes is None and is_for_disk and not self._has_time_for(num_bytes):
            return True
        left = num_bytes if max_bytes is None else max_bytes
        for start in range(0, len(nodes), self._run_pages):
            if left <= 0:
                return False
            run = nodes[start : start + self._run_pages]
            content = self._pool.read_pages([one.page for one in run])
            self._drop_covered(run[0])
            self._put(self._run_record(run, owner, len(content)), content, is_for_disk=is_for_disk)
            left -= len(content)
        if ending is None or record is None:
            return True
        if left <= 0:
            return False
        num_slots = record.name.position - record.name.start if self._has_pages else 0
        if not isinstance(ending, Snapshot):
            content = self._pool.read_snapshot(0, ending.page, num_slots)
            self._drop_covered(ending)
            self._counters.num_offloaded_pages += self._put(record, content, is_for_disk=is_for_disk)
            return True
        content = self._pool.read_snapshot(ending.row, ending.node.page if num_slots else 0, num_slots)
        if self._put(record, content, is_for_disk=is_for_disk):
            self.is_stored(ending, record)
            self._counters.num_offloaded_snapshots += 1
        return True

    def _unstored(self, node: PageNode) -> list[PageNode]:
        """Full pages up to `node` that no record holds, first one first. What a stored page needs is stored too."""
        if not self._has_pages:
            return []
        found: list[PageNode] = []
        while node.parent is not None and node_key(self._layout, node) not in self._index.pages:
            found.append(node)
            node = node.parent
        found.reverse()
        return found

    def _last_full_node(self, snapshot: Snapshot) -> PageNode:
        """The node of the last full page before a snapshot, or the root."""
        node = snapshot.node
        assert node.parent is not None
        return node.parent if snapshot.num_tokens % self._page_size else node

    def _fits_host(self, node: PageNode, record: Record | None) -> bool:
        """Whether host memory could keep it with all it needs."""
        num_pages = node.end // self._page_size if self._has_pages else 0
        num_bytes: dict[RecordKind, int] = {"pages": num_pages * self._pool.page_bytes, "snapshot": 0}
        if record is not None:
            num_bytes[record.name.kind] += record.num_bytes
        return _fits(num_bytes, self._index.host.budget)

    def _fits_disk(self, node: PageNode, record: Record | None) -> bool:
        """Whether the disk takes writes now, and could keep it with all it needs."""
        if self._disk is None or not self._disk.accepts_writes:
            return False
        num_pages = node.end // self._page_size if self._has_pages else 0
        num_page_bytes = num_pages * (self._pool.page_bytes + KEY_BYTES + HEADER_BYTES // self._run_pages)
        num_bytes: dict[RecordKind, int] = {"pages": num_page_bytes, "snapshot": 0}
        if record is not None:
            num_bytes[record.name.kind] += record.file_bytes
        return _fits(num_bytes, self._index.disk.budget)

    def _has_time_for(self, num_bytes: int) -> bool:
        """Whether what waits to be written leaves room for so much more. The disk may be slower than evictions."""
        if self._disk is None:
            return True
        if self._disk.backlog_bytes + num_bytes <= self._max_backlog:
            return True
        self._counters.num_skipped_offloads["backlog"] += 1
        return False

    def _run_record(self, run: list[PageNode], owner: Owner | None, num_bytes: int) -> Record:
        parent = run[0].parent
        assert parent is not None
        keys = tuple(node_key(self._layout, node) for node in run)
        name = RecordName(
            kind="pages",
            key=keys[-1],
            parent=node_key(self._layout, parent),
            start=parent.end,
            page_keys=keys,
            owner=b"" if owner is None else owner_key(*owner),
        )
        self._counters.num_offloaded_pages += len(run)
        record = self._record(name, num_bytes)
        record.is_on_device = not self._has_state
        return record

    def _ending_record(self, ending: Evictable, node: PageNode, owner: Owner | None) -> Record:
        """A snapshot or tail behind the page `node`."""
        parent = node_key(self._layout, node)
        is_snapshot = isinstance(ending, Snapshot)
        num_slots = (ending.num_tokens if isinstance(ending, Snapshot) else ending.end) - node.end
        page = ending.node if isinstance(ending, Snapshot) else ending
        suffix = page.key[: num_slots * TOKEN_BYTES] if num_slots else b""
        name = RecordName(
            kind="snapshot" if is_snapshot else "pages",
            key=snapshot_key(parent, suffix),
            parent=parent,
            start=node.end,
            suffix=suffix,
            boundary=ending.kind if isinstance(ending, Snapshot) else "declared",
            owner=b"" if owner is None else owner_key(*owner),
        )
        row_bytes = self._pool.row_bytes if is_snapshot else 0
        record = self._record(name, row_bytes + (num_slots * self._pool.slot_bytes if self._has_pages else 0))
        record.is_on_device = not self._has_state
        return record

    def _drop_covered(self, node: PageNode) -> None:
        """A page is about to be kept: of it, what was kept of its beginning goes."""
        if not self._has_state:
            assert node.parent is not None
            self._index.drop_covered(node_key(self._layout, node.parent), node.key)

    def _record(self, name: RecordName, num_bytes: int) -> Record:
        size = 0 if self._disk is None else self._disk.file_bytes(name, num_bytes)
        return Record(name, num_bytes, size)

    def _put(self, record: Record, content: Bytes, *, is_for_disk: bool) -> bool:
        """Take a record into host memory, and have it written. False: it is of no use there."""
        index, disk = self._index, self._disk
        if not index.add(record):
            return False
        record.data = content
        index.host.add(record)
        self._counters.offloaded_bytes += len(content)
        if disk is None or not is_for_disk:
            index.touch(record)
            index.enforce_budgets()
            return record.is_attached
        index.disk.add(record)
        index.hold(record)
        index.touch(record)
        index.enforce_budgets()  # erased before it is written: the disk never holds more
        if not record.is_attached:
            index.let_go(record)
            return False
        disk.write(record, partial(self._written, record), num_held_bytes=index.disk.num_bytes)
        disk.touch(record)
        return True

    def _written(self, record: Record, is_on_disk: bool) -> None:
        if record.is_attached and not is_on_disk:
            self._index.disk.discard(record)
        self._index.let_go(record)
        self._index.enforce_budgets()


def _fits(num_bytes: dict[RecordKind, int], budget: TierBudget) -> bool:
    return all(number <= budget.of(kind) for kind, number in num_bytes.items())


def _owner(snapshot: Snapshot) -> Owner | None:
    """The conversation that keeps it, if one with an id does."""
    for branch in reversed(snapshot.keepers):
        if branch.conversation[1] is not None:
            return branch.conversation
    return None
