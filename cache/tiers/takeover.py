"""Host memory -> device: what a load has brought together takes its place among pages, rows and the prefix tree.

All or nothing, between two steps: pages and a row are made room for, filled, and put into the tree as if a request had
just computed and published them.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnkeep.cache.encoded_tokens import TOKEN_BYTES
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.retention import ConversationKey, Retention
from turnkeep.cache.snapshot import Snapshot
from turnkeep.cache.tiers.keys import node_key, page_key
from turnkeep.cache.tiers.pool_content import PoolContent
from turnkeep.cache.tiers.record import Record


class TakeoverError(Exception):
    """It could not be taken over, and nothing changed. reason: no_room, or changed (pages left the device since)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, frozen=True)
class Arrival:
    """Content in host memory of tokens [0, position) of a prompt, as far as the device lacked it.

    encoded: those tokens as tree keys. records: runs, all with their content. snapshot: the state at `position`, None
    for models without state. owner: who asked for it.
    """

    owner: ConversationKey
    encoded: bytes
    position: int
    records: tuple[Record, ...]
    snapshot: Record | None


class Takeover:
    """Works on the pools and the tree of one cache."""

    def __init__(
        self, layout: bytes, page_size: int, *, pool: PoolContent, reclaimer: Reclaimer, retention: Retention
    ) -> None:
        self._layout = layout
        self._page_size = page_size
        self._pool = pool
        self._reclaimer = reclaimer
        self._tree = reclaimer.tree
        self._retention = retention

    def take(self, arrival: Arrival) -> Snapshot | None:
        """Make it matchable on the device; the snapshot that is there then. Raises TakeoverError."""
        tree, reclaimer = self._tree, self._reclaimer
        end = arrival.position // self._page_size * self._page_size
        node = tree.descend(tree.root(arrival.owner[0]), arrival.encoded, end)
        tree.pin(node)
        try:
            sources = self._sources(arrival, node, end)
            needs_tail = reclaimer.has_pages and arrival.snapshot is not None and arrival.position > end
            num_pages = len(sources) + needs_tail if reclaimer.has_pages else 0
            num_rows = int(arrival.snapshot is not None)
            if not reclaimer.can_make_room(num_pages, num_rows):
                raise TakeoverError("no_room")
            reclaimer.make_room(num_pages, num_rows)
            node = self._insert_pages(arrival, node, sources)
            if arrival.snapshot is None:
                return None
            return self._insert_snapshot(arrival, arrival.snapshot, node)
        finally:
            reclaimer.release(node)

    def _sources(self, arrival: Arrival, node: PageNode, end: int) -> list[tuple[bytes, Record | None, int]]:
        """Key, run and place there of each full page in [node.end, end); without attention, keys alone."""
        found: dict[bytes, tuple[Record, int]] = {}
        for record in arrival.records:
            found.update({key: (record, index) for index, key in enumerate(record.name.page_keys)})
        sources: list[tuple[bytes, Record | None, int]] = []
        key, width = node_key(self._layout, node), self._page_size * TOKEN_BYTES
        for offset in range(node.end * TOKEN_BYTES, end * TOKEN_BYTES, width):
            key = page_key(key, arrival.encoded[offset : offset + width])
            if not self._reclaimer.has_pages:
                sources.append((key, None, 0))
                continue
            source = found.get(key)
            if source is None:
                raise TakeoverError("changed")
            sources.append((key, *source))
        return sources

    def _insert_pages(
        self, arrival: Arrival, node: PageNode, sources: list[tuple[bytes, Record | None, int]]
    ) -> PageNode:
        """Hang the pages below `node`, whose pin moves along to the last one."""
        pool, has_pages = self._reclaimer.pages, self._reclaimer.has_pages
        pages = pool.allocate(len(sources)) if has_pages else [0] * len(sources)
        self._write_pages(sources, pages)
        for (key, _, _), page in zip(sources, pages, strict=True):
            start = node.end * TOKEN_BYTES
            child = self._tree.insert(node, arrival.encoded[start : start + self._page_size * TOKEN_BYTES], page)
            child.tier_key = key
            if has_pages:
                pool.release(page)  # the node holds it now
            self._tree.pin(child)
            self._tree.unpin(node, node.last_used_s)
            node = child
        return node

    def _write_pages(self, sources: list[tuple[bytes, Record | None, int]], pages: list[int]) -> None:
        """One call for each run of pages that lie side by side in a record."""
        size = self._pool.page_bytes
        at = 0
        while at < len(sources):
            _, record, first = sources[at]
            if record is None:
                return
            assert record.data is not None
            num_pages = 1
            while at + num_pages < len(sources) and sources[at + num_pages][1:] == (record, first + num_pages):
                num_pages += 1
            content = record.data[first * size : (first + num_pages) * size]
            self._pool.write_pages(pages[at : at + num_pages], content)
            at += num_pages

    def _insert_snapshot(self, arrival: Arrival, record: Record, node: PageNode) -> Snapshot:
        """Put the state where it stands behind `node`, which is pinned; an equal one that is there already stays.

        Without a suffix the state stands at the end of `node` itself.
        """
        suffix = record.name.suffix
        present = node.suffixes.get(suffix) if suffix else node.parent.suffixes.get(node.key) if node.parent else None
        if present is not None:
            return present
        row, num_slots, page = self._reclaimer.rows.allocate(), 0, 0
        if suffix:
            covering = self._tree.covering_child(node, suffix)
            if covering is None:
                if self._reclaimer.has_pages:
                    num_slots = len(suffix) // TOKEN_BYTES
                    (page,) = self._reclaimer.pages.allocate(1)
                covering = self._tree.insert(node, suffix, page)
                if self._reclaimer.has_pages:
                    self._reclaimer.pages.release(page)
            node = covering
        assert record.data is not None
        content = record.data if num_slots else record.data[: self._pool.row_bytes]
        self._pool.write_snapshot(row, page, num_slots, content)
        snapshot = self._reclaimer.add(node, arrival.position, row, record.name.boundary)
        self._retention.adopt(arrival.owner, snapshot)
        return snapshot
