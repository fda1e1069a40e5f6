"""Host memory -> device: what a load has brought together takes its place among pages, rows and the prefix tree.

A piece at a time, between steps: some pages are made room for, filled, and put into the tree as if a request had just
computed and published them; the last piece is the state. A pin holds what is there, and without the state it is of use
to nobody (models without state can go on from every page), so a takeover that ends early leaves nothing behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnkeep.cache.encoded_tokens import TOKEN_BYTES
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.retention import ConversationKey, Retention
from turnkeep.cache.snapshot import Snapshot
from turnkeep.cache.tiers.keys import node_key, page_key
from turnkeep.cache.tiers.pool_content import PoolContent
from turnkeep.cache.tiers.record import Record

PIECE_BYTES = 512 << 10  # a millisecond or two
MAX_PIECE_PAGES = 128  # also where they are small


class TakeoverError(Exception):
    """It cannot be taken over, and is to be given back. reason: no_room, or changed (pages left the device since)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True, frozen=True)
class Arrival:
    """Content in host memory of tokens [0, position) of a prompt, as far as the device lacked it.

    encoded: those tokens as tree keys. records: runs, all with their content. ending: the state at `position`; for
    models without state the tail with the tokens before it, or None. owner: who asked for it.
    """

    owner: ConversationKey
    encoded: bytes
    position: int
    records: tuple[Record, ...]
    ending: Record | None


@dataclass(slots=True, eq=False)
class Landing:
    """An arrival on its way. node: the last full page of it that is there, pinned. sources: page key -> its run, and
    its place there. snapshot: the state, at the end."""

    arrival: Arrival
    node: PageNode
    end: int  # full-page tokens
    sources: dict[bytes, tuple[Record, int]] = field(default_factory=dict)
    snapshot: Snapshot | None = None


class Takeover:
    """Works on the pools and the tree of one cache. Every landing that was begun must be ended."""

    def __init__(
        self, layout: bytes, page_size: int, *, pool: PoolContent, reclaimer: Reclaimer, retention: Retention
    ) -> None:
        self._layout = layout
        self._page_size = page_size
        self._pool = pool
        self._reclaimer = reclaimer
        self._tree = reclaimer.tree
        self._retention = retention
        self._piece_pages = min(max(PIECE_BYTES // max(pool.page_bytes, 1), 1), MAX_PIECE_PAGES)

    def begin(self, arrival: Arrival) -> Landing:
        """Nothing is taken yet but the pin."""
        tree = self._tree
        end = arrival.position // self._page_size * self._page_size
        node = tree.descend(tree.root(arrival.owner[0]), arrival.encoded, end)
        tree.pin(node)
        landing = Landing(arrival, node, end)
        for record in arrival.records:
            landing.sources.update({key: (record, index) for index, key in enumerate(record.name.page_keys)})
        return landing

    def advance(self, landing: Landing) -> bool:
        """Take over one piece; True when it was the last, and all can be matched. Raises TakeoverError."""
        arrival, tree = landing.arrival, self._tree
        there = tree.descend(landing.node, arrival.encoded, landing.end)  # others may have computed some of it
        if there is not landing.node:
            self._move_pin(landing, there)
        if there.end < landing.end:
            # Of what is still to come, all is asked for: a piece that helps nobody would be evicted for.
            num_pages = (landing.end - there.end) // self._page_size
            self._require_room(num_pages + self._needs_tail(landing), int(arrival.ending is not None))
            self._insert_pages(landing)
            if arrival.ending is not None or landing.node.end < landing.end:
                return False
        if arrival.ending is not None:
            self._require_room(self._needs_tail(landing), 1)
            if self._reclaimer.has_state:
                landing.snapshot = self._insert_snapshot(landing, arrival.ending)
            else:
                self._insert_tail(landing, arrival.ending)
        return True

    def end(self, landing: Landing) -> None:
        """Give back what holds it there: what is whole stays as long as it is not evicted, the rest goes."""
        self._reclaimer.release(landing.node)

    def _needs_tail(self, landing: Landing) -> int:
        arrival = landing.arrival
        return int(self._reclaimer.has_pages and arrival.ending is not None and arrival.position > landing.end)

    def _require_room(self, num_pages: int, num_rows: int) -> None:
        if not self._reclaimer.can_make_room(num_pages, num_rows):
            raise TakeoverError("no_room")

    def _insert_pages(self, landing: Landing) -> None:
        """Hang the next pages below the node: as many as lie side by side in one run, up to a piece."""
        pool, has_pages = self._reclaimer.pages, self._reclaimer.has_pages
        width, size = self._page_size * TOKEN_BYTES, self._pool.page_bytes
        encoded = landing.arrival.encoded[landing.node.end * TOKEN_BYTES : landing.end * TOKEN_BYTES]
        keys: list[bytes] = []
        key, sources = node_key(self._layout, landing.node), landing.sources
        for offset in range(0, min(len(encoded), self._piece_pages * width), width):
            key = page_key(key, encoded[offset : offset + width])
            if has_pages and keys and sources.get(key) != (sources[keys[0]][0], sources[keys[0]][1] + len(keys)):
                break
            if has_pages and key not in sources:
                raise TakeoverError("changed")
            keys.append(key)
        self._reclaimer.make_room(len(keys), 0)
        pages = [0] * len(keys)
        if has_pages:
            record, first = sources[keys[0]]
            assert record.data is not None
            pages = pool.allocate(len(keys))
            self._pool.write_pages(pages, record.data[first * size : (first + len(keys)) * size])
        for offset, key, page in zip(range(0, len(encoded), width), keys, pages, strict=False):
            child = self._tree.insert(landing.node, encoded[offset : offset + width], page)
            child.tier_key = key
            if has_pages:
                pool.release(page)  # the node holds it now
            self._move_pin(landing, child)

    def _move_pin(self, landing: Landing, node: PageNode) -> None:
        self._tree.pin(node)
        self._tree.unpin(landing.node, landing.node.last_used_s)
        landing.node = node

    def _insert_snapshot(self, landing: Landing, record: Record) -> Snapshot:
        """Put the state where it stands behind the node; an equal one that is there already stays.

        Without a suffix the state stands at the end of the node itself.
        """
        node, arrival = landing.node, landing.arrival
        suffix = record.name.suffix
        present = node.suffixes.get(suffix) if suffix else node.parent.suffixes.get(node.key) if node.parent else None
        if present is not None:
            return present
        self._reclaimer.make_room(self._needs_tail(landing), 1)
        row, num_slots = self._reclaimer.rows.allocate(), 0
        if suffix:
            node, num_slots = self._insert_suffix(node, suffix)
        assert record.data is not None
        content = record.data if num_slots else record.data[: self._pool.row_bytes]
        self._pool.write_snapshot(row, node.page, num_slots, content)
        snapshot = self._reclaimer.add(node, arrival.position, row, record.name.boundary)
        self._retention.adopt(arrival.owner, snapshot)
        return snapshot

    def _insert_tail(self, landing: Landing, record: Record) -> None:
        """Put a partly filled page behind the node; one that holds the same tokens and is there already stays."""
        self._reclaimer.make_room(1, 0)
        node, num_slots = self._insert_suffix(landing.node, record.name.suffix)
        if num_slots:
            assert record.data is not None
            self._pool.write_snapshot(0, node.page, num_slots, record.data)
            self._tree.pin(node)
            self._reclaimer.release(node)  # who evicts hears of it

    def _insert_suffix(self, node: PageNode, suffix: bytes) -> tuple[PageNode, int]:
        """The child of `node` with these tokens, and how many slots of its page are to be filled: 0 if it was there."""
        covering = self._tree.covering_child(node, suffix)
        if covering is not None:
            return covering, 0
        if not self._reclaimer.has_pages:
            return self._tree.insert(node, suffix, 0), 0
        (page,) = self._reclaimer.pages.allocate(1)
        child = self._tree.insert(node, suffix, page)
        self._reclaimer.pages.release(page)  # the child holds it now
        return child, len(suffix) // TOKEN_BYTES
