"""Admission to the cache: what opening a sequence at a match would take, whether it can be had, and the opening.

The one place where a match becomes pins, pages and a live row.
"""

from __future__ import annotations

from turnkeep.cache.encoded_tokens import TokenIds
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.pending_copies import PendingCopies
from turnkeep.cache.prefix_match import PrefixMatch, PrefixSearch
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.sequence_cache import SequenceCache
from turnkeep.cache.statistics import CacheCounters


class Opener:
    """Works on the pools of one cache; knows nothing of conversations."""

    def __init__(
        self,
        page_size: int,
        *,
        search: PrefixSearch,
        reclaimer: Reclaimer,
        copies: PendingCopies,
        counters: CacheCounters,
    ) -> None:
        self._page_size = page_size
        self._search = search
        self._reclaimer = reclaimer
        self._tree = reclaimer.tree
        self._copies = copies
        self._counters = counters

    def num_new_pages(self, match: PrefixMatch, num_capacity_pages: int) -> int:
        """Pages to take from the pool for a table of num_capacity_pages that starts with the match."""
        match = self._search.refreshed(match, match.token_ids)
        num_shared = match.num_tokens // self._page_size + int(match.can_adopt_tail)
        return max(num_capacity_pages - num_shared, 0)

    def can_provide(self, num_pages: int, num_rows: int, match: PrefixMatch | None) -> bool:
        """Whether so much is free, or evictable without what `match` needs."""
        if match is not None:
            match = self._search.refreshed(match, match.token_ids)
            if match.snapshot is not None and match.snapshot.num_pins == 0:
                num_rows += 1  # counted as evictable now, pinned by then
            last = match.tail or match.path
            # Seldom so short of pages that those which the match holds on to would have to be counted.
            num_path_pages = 0 if last is None else -(-last.end // self._page_size)
            if self._reclaimer.can_make_room(num_pages + num_path_pages, num_rows):
                return True
            num_pages += self._num_unpinned(last)
        return self._reclaimer.can_make_room(num_pages, num_rows)

    def open(
        self, match: PrefixMatch, token_ids: TokenIds, *, is_preparation: bool
    ) -> tuple[SequenceCache, PrefixMatch] | None:
        """The new sequence and the match it really starts from; None, with nothing changed, when it does not fit."""
        match = self._search.refreshed(match, token_ids)
        reclaimer = self._reclaimer
        is_adopted = match.can_adopt_tail
        num_copies = int(reclaimer.has_pages and match.tail is not None and not is_adopted)
        if not self.can_provide(num_copies, 1, match):
            return None
        path = match.path if match.path is not None else self._tree.root(match.cache_root)
        self._tree.pin(path)
        seq = SequenceCache(path, bytearray(match.encoded))
        seq.num_committed_tokens = seq.num_computed_tokens = seq.capacity_tokens = match.num_tokens
        seq.num_folded_tokens = match.num_tokens
        seq.num_prompt_tokens = len(match.token_ids)
        seq.num_reused_tokens, seq.is_preparation = match.num_tokens, is_preparation
        if match.snapshot is not None:
            reclaimer.pin(match.snapshot)
            seq.resumed_from = match.snapshot
        if match.tail is not None:
            # Pinned by hand until it is adopted or its copy is planned: making room must not take it.
            self._tree.pin(match.tail)
        reclaimer.make_room(num_copies, 1)
        self._take_row(seq)
        self._take_pages(seq, match, is_adopted=is_adopted)
        if not is_preparation:
            self._count(match)
        return seq, match

    def _take_row(self, seq: SequenceCache) -> None:
        if not self._reclaimer.has_state:
            return
        seq.state_row = self._reclaimer.rows.allocate()
        if seq.resumed_from is not None:
            self._copies.copy_row(seq, seq.resumed_from, seq.state_row)
            self._counters.num_row_copies += 1

    def _take_pages(self, seq: SequenceCache, match: PrefixMatch, *, is_adopted: bool) -> None:
        """Fill the page table; the tail comes with a pin that adoption keeps."""
        has_pages, tail = self._reclaimer.has_pages, match.tail
        if has_pages:
            self._share_path(seq, match)
        if tail is not None and is_adopted:
            tail.writer = seq
            seq.tail = tail
            if has_pages:
                seq.append_pages([tail.page])
                self._reclaimer.pages.retain(tail.page)
                self._counters.num_adopted_pages += 1
        elif tail is not None:
            if has_pages:
                num_tokens = seq.num_computed_tokens - tail.start
                seq.append_pages(self._reclaimer.pages.allocate(1))
                self._copies.copy_page(seq, tail, int(seq.page_ids[-1]), num_tokens)
                self._counters.num_page_copies += 1
            self._reclaimer.release(tail)
        if has_pages:
            seq.capacity_tokens = seq.num_pages * self._page_size

    def _share_path(self, seq: SequenceCache, match: PrefixMatch) -> None:
        num_pages = seq.path.end // self._page_size
        num_known = 0
        if match.known_pages is not None:
            known = match.known_pages[:num_pages]
            num_known = len(known)
            seq.append_pages(known)
        seq.append_pages(seq.path.page_path(num_known * self._page_size))
        self._reclaimer.pages.retain_all(seq.page_ids)

    def _num_unpinned(self, node: PageNode | None) -> int:
        """Nodes from here up that could be evicted now."""
        number = 0
        while node is not None and node.parent is not None and not node.num_pins:
            number += 1
            node = node.parent
        return number

    def _count(self, match: PrefixMatch) -> None:
        counters = self._counters
        if match.snapshot is not None:
            match.snapshot.num_hits += 1
            if match.snapshot.num_hits == 1:
                counters.num_used_prepared_tokens += match.snapshot.num_prepared_tokens
        counters.num_opens += 1
        counters.num_hits += match.num_tokens > 0
        counters.num_prompt_tokens += len(match.token_ids)
        counters.num_matched_tokens += match.num_matched_tokens
        counters.num_reused_tokens += match.num_tokens
        if match.num_tokens:
            counters.hits_by_alignment["unaligned" if match.num_tokens % self._page_size else "aligned"] += 1
        if self._reclaimer.has_pages:
            num_reused = match.num_tokens // self._page_size
            counters.num_reused_pages += num_reused
            counters.num_missed_pages += max(len(match.token_ids) - 1, 0) // self._page_size - num_reused
        if match.num_lost_tokens:
            counters.lost_tokens[match.loss_reason] += match.num_lost_tokens
