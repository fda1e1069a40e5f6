"""What the cache did and holds, in numbers. Counters only grow; gauges are read when asked for."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnkeep.cache.tiers.tier_counters import TierReading

if TYPE_CHECKING:
    from turnkeep.cache.reclaim import Reclaimer
    from turnkeep.cache.retention import Retention


@dataclass(slots=True)
class CacheCounters:
    """Since the cache was made. Counted when a sequence opens, so that a request that waits is counted once."""

    num_opens: int = 0
    num_hits: int = 0  # opens that reused at least one token
    num_prompt_tokens: int = 0
    num_matched_tokens: int = 0  # by pages alone
    num_reused_tokens: int = 0
    num_new_pages: int = 0  # taken from the pool
    num_generation_pages: int = 0  # of those, beyond the prompt
    num_reused_pages: int = 0  # full pages of prompts that were shared
    num_missed_pages: int = 0  # full pages of prompts that were computed
    num_page_copies: int = 0  # pages reused in part, copied
    num_row_copies: int = 0
    num_adopted_pages: int = 0  # partly filled pages written on without a copy
    num_freed_duplicates: int = 0  # pages computed twice and shared afterwards
    num_evicted_pages: int = 0
    num_refused_holds: int = 0  # wishes of clients beyond what may be held
    num_released_pins: int = 0  # resumed-from snapshots given up because nothing else was left
    num_prepared_tokens: int = 0  # computed in idle time and kept as a snapshot
    num_used_prepared_tokens: int = 0  # of those, in snapshots that a request resumed from
    num_unused_prepared_tokens: int = 0  # of those, in snapshots that went without having been used
    num_snapshot_bytes: int = 0  # of state rows, written for snapshots
    hits_by_alignment: Counter[str] = field(default_factory=Counter)  # aligned: at the end of a page; unaligned
    created_snapshots: Counter[str] = field(default_factory=Counter)  # by kind
    evicted_snapshots: Counter[str] = field(default_factory=Counter)  # by kind
    dropped_snapshots: Counter[str] = field(default_factory=Counter)  # by kind: the next prompt will not repeat them
    unused_snapshots: Counter[str] = field(default_factory=Counter)  # by kind: gone without a hit
    skipped_snapshots: Counter[str] = field(default_factory=Counter)  # by reason: no_row, duplicate, not_worth
    lost_tokens: Counter[str] = field(default_factory=Counter)  # by reason: no_snapshot, capacity, evicted, tier

    def count_new_pages(self, num_new: int, num_beyond_prompt: int) -> None:
        """A sequence took num_new pages; its table reaches so many beyond its prompt (negative: not that far)."""
        self.num_new_pages += num_new
        self.num_generation_pages += min(max(num_beyond_prompt, 0), num_new)


@dataclass(slots=True, frozen=True)
class CacheStats:
    """One reading. Counts of snapshots are by kind."""

    num_pages: int  # usable ones
    num_free_pages: int
    num_evictable_pages: int
    num_tree_pages: int
    max_used_pages: int  # at once, since the cache was made
    num_rows: int
    num_free_rows: int
    num_evictable_rows: int
    max_used_rows: int
    num_open_sequences: int
    num_conversations: int
    num_branches: int
    num_snapshots: dict[str, int]
    num_superseded_snapshots: int
    counters: CacheCounters
    tiers: TierReading | None = None

    @property
    def num_used_pages(self) -> int:
        return self.num_pages - self.num_free_pages

    @property
    def num_used_rows(self) -> int:
        return self.num_rows - self.num_free_rows

    def gauge_values(self) -> dict[str, float]:
        """Flat names for the stats message."""
        values: dict[str, float] = {
            name: getattr(self, name)
            for name in (
                "num_pages",
                "num_free_pages",
                "num_evictable_pages",
                "num_tree_pages",
                "max_used_pages",
                "num_rows",
                "num_free_rows",
                "num_evictable_rows",
                "max_used_rows",
                "num_open_sequences",
                "num_conversations",
                "num_branches",
                "num_superseded_snapshots",
            )
        }
        values.update({f"num_snapshots.{kind}": number for kind, number in self.num_snapshots.items()})
        return values if self.tiers is None else values | self.tiers.gauges

    def counter_values(self) -> dict[str, float]:
        """Flat names for the stats message; counters by kind or reason as name.kind."""
        values: dict[str, float] = {}
        for name in CacheCounters.__slots__:
            value = getattr(self.counters, name)
            if isinstance(value, Counter):
                values.update({f"{name}.{key}": number for key, number in value.items()})
            else:
                values[name] = value
        return values if self.tiers is None else values | self.tiers.counters


def read_stats(
    reclaimer: Reclaimer,
    retention: Retention,
    *,
    num_open_sequences: int,
    counters: CacheCounters,
    tiers: TierReading | None,
) -> CacheStats:
    """What one cache holds now; O(snapshots)."""
    pages, rows, snapshots = reclaimer.pages, reclaimer.rows, reclaimer.snapshots
    return CacheStats(
        num_pages=pages.num_usable,
        num_free_pages=pages.num_free,
        num_evictable_pages=reclaimer.num_evictable_pages,
        num_tree_pages=reclaimer.tree.num_nodes if reclaimer.has_pages else 0,
        max_used_pages=pages.max_used,
        num_rows=rows.num_usable,
        num_free_rows=rows.num_free,
        num_evictable_rows=reclaimer.num_evictable_rows,
        max_used_rows=rows.max_used,
        num_open_sequences=num_open_sequences,
        num_conversations=retention.num_conversations,
        num_branches=retention.num_branches,
        num_snapshots=dict(Counter(snapshot.kind for snapshot in snapshots)),
        num_superseded_snapshots=sum(snapshot.is_superseded for snapshot in snapshots),
        counters=copy.deepcopy(counters),
        tiers=tiers,
    )
