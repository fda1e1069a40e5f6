"""Publishes what a sequence computed: full pages, the committed part of its tail page, and snapshots on them.

Tokens of a sequence, half-open ranges, ps = page size:

    [0, path.end)            full pages in the tree; the table shows the tree's pages, shared
    [path.end, committed)    in the tree only where a snapshot or the end of the sequence asked for it; either in this
                             sequence's own page (`tail`, which it goes on filling: slots before `committed` are
                             immutable) or covered by a page another sequence computed
    [committed, computed)    private
    [computed, capacity)     page slots without content

A page that the tree has already is freed when it is full, and the table shows the tree's page from then on. The bytes
of both are the same: keys and values depend on the tokens alone.
"""

from __future__ import annotations

import numpy as np

from turnkeep.cache.boundary import BoundaryKind
from turnkeep.cache.encoded_tokens import TOKEN_BYTES, TokenIds, encode_tokens
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.sequence_cache import SequenceCache
from turnkeep.cache.snapshot import PRIVATE_KINDS, Snapshot
from turnkeep.cache.statistics import CacheCounters


class Committer:
    """Works on one sequence at a time; never evicts."""

    def __init__(self, page_size: int, reclaimer: Reclaimer, counters: CacheCounters) -> None:
        self._page_size = page_size
        self._reclaimer = reclaimer
        self._tree = reclaimer.tree
        self._counters = counters

    def commit_full_pages(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """Publish [path.end, num_computed_tokens) as far as it is full pages. O(those pages)."""
        page_size = self._page_size
        end = seq.num_computed_tokens // page_size * page_size
        if end == seq.path.end:
            return
        self._encode(seq, token_ids, end)
        width = page_size * TOKEN_BYTES
        num_pages = end // page_size
        for index in range(seq.path.end // page_size, num_pages):
            if not seq.path.children and seq.tail is None:
                self._commit_new_pages(seq, index, num_pages)
                break
            self._commit_page(seq, index, bytes(seq.encoded[index * width : (index + 1) * width]))
        seq.num_committed_tokens = max(seq.num_committed_tokens, end)

    def commit_tail(self, seq: SequenceCache, token_ids: TokenIds) -> PageNode:
        """Publish everything computed; returns the node that holds its last token. Full pages must be committed."""
        end = seq.num_computed_tokens
        parent = seq.path
        if end == parent.end:
            return parent
        self._encode(seq, token_ids, end)
        key = bytes(seq.encoded[parent.end * TOKEN_BYTES : end * TOKEN_BYTES])
        seq.num_committed_tokens = end
        tail = seq.tail
        if tail is not None:
            # No sibling can cover the key: it would have absorbed the tail, whose tokens are a part of it.
            if tail.end < end:
                self._tree.extend(tail, key)
            return tail
        covering = self._tree.covering_child(parent, key)
        if covering is not None:
            return covering
        page = int(seq.table[parent.end // self._page_size]) if self._reclaimer.has_pages else 0
        tail = self._tree.insert(parent, key, page)
        tail.writer = seq
        self._tree.pin(tail)
        seq.tail = tail
        return tail

    def publish_snapshot(
        self, seq: SequenceCache, token_ids: TokenIds, position: int, row: int | None, kind: BoundaryKind
    ) -> tuple[Snapshot | None, bool]:
        """Make the state in `row` resumable at `position` <= num_computed_tokens, taking over the row.

        An equal snapshot is never kept twice: the row is then freed and the one there is returned. Full pages must be
        committed. Returns the snapshot and whether it is new; None when row is None and there is none.
        """
        if position > seq.path.end:
            node = self.commit_tail(seq, token_ids)
        else:
            node = seq.path
            while node.start >= position:
                assert node.parent is not None
                node = node.parent
        assert node.parent is not None
        present = node.parent.suffixes.get(node.suffix(position))
        if present is None:
            return (None, False) if row is None else (self._reclaimer.add(node, position, row, kind), True)
        if row is not None:
            self._reclaimer.rows.release(row)
            self._counters.skipped_snapshots["duplicate"] += 1
        if present.kind in ("suspended", "likely_branch") or (
            present.kind in PRIVATE_KINDS and kind not in PRIVATE_KINDS
        ):
            present.kind = kind  # the wider use decides how it is kept
        self._reclaimer.revive(present)
        return present, False

    def _commit_page(self, seq: SequenceCache, index: int, key: bytes) -> None:
        """Publish one full page below seq.path and move the path onto it."""
        tree, tail = self._tree, seq.tail
        if tail is not None:
            # The own page is full. What pinned it as the tail pins it as the path; nobody else has this page, or the
            # tail would have been absorbed.
            seq.tail = None
            tail.writer = None
            tree.extend(tail, key)
            self._move_path(seq, tail)
            return
        node = seq.path.children.get(key)
        if node is None:
            node = tree.insert(seq.path, key, int(seq.table[index]) if self._reclaimer.has_pages else 0)
        elif self._reclaimer.has_pages and node.page != seq.table[index]:
            pages = self._reclaimer.pages
            pages.retain(node.page)
            pages.release(int(seq.table[index]))
            seq.table[index] = node.page
            self._counters.num_freed_duplicates += 1
        tree.pin(node)
        self._move_path(seq, node)

    def _commit_new_pages(self, seq: SequenceCache, index: int, end: int) -> None:
        """Publish pages [index, end) below a path that nothing hangs below: nobody else can have them."""
        pages = seq.table[index:end] if self._reclaimer.has_pages else np.zeros(end - index, np.int32)
        seq.path = self._tree.insert_chain(seq.path, seq.encoded, pages)

    def _move_path(self, seq: SequenceCache, node: PageNode) -> None:
        """`node` is pinned for the path and hangs below it, so the old path loses a pin without becoming free."""
        old, seq.path = seq.path, node
        self._tree.unpin(old, old.last_used_s)

    def _encode(self, seq: SequenceCache, token_ids: TokenIds, end: int) -> None:
        start = len(seq.encoded) // TOKEN_BYTES
        if start >= end:
            return
        if len(token_ids) < end:
            raise ValueError(f"{end} tokens are computed but only {len(token_ids)} are given")
        seq.encoded += encode_tokens(token_ids[start:end])
