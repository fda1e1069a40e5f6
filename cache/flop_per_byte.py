"""Eviction by recency and computation saved per byte, as Marconi weighs them; kept to compare with.

    utility = normalised 1 / age + alpha x normalised seconds saved over the next shallower snapshot / bytes freed

Looks at every snapshot for each victim, O(snapshots): utilities are relative to the others of the moment. alpha 0 is
plain least recently used order, without regard to what is superseded; of those that one request used the shallowest
goes first.
"""

from __future__ import annotations

from collections.abc import Callable

from turnkeep.cache.density import neighbours
from turnkeep.cache.eviction import Evictable, LRUPolicy, Need
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.snapshot import Snapshot
from turnkeep.cache.spec import CacheSpec

MIN_AGE_S = 1.0  # what was used this moment must not make all others look equally old


class FlopPerBytePolicy:
    """An EvictionPolicy. Pages of models without state go in least recently used order."""

    def __init__(
        self, spec: CacheSpec, clock: Callable[[], float], cost: PrefillCost | None = None, alpha: float = 0.5
    ) -> None:
        self.cost = cost if cost is not None else PrefillCost()
        self._alpha = alpha
        self._clock = clock
        self._row_bytes, self._page_bytes = spec.bytes_per_row, spec.bytes_per_page
        self._snapshots: dict[Snapshot, float] = {}  # seconds a byte, as last seen
        self._leaves = LRUPolicy()

    def __len__(self) -> int:
        return len(self._snapshots) + len(self._leaves)

    def added(self, item: Evictable) -> None:
        if isinstance(item, PageNode):
            self._leaves.added(item)
        else:
            self._snapshots[item] = self._efficiency(item)

    def removed(self, item: Evictable) -> None:
        if isinstance(item, PageNode):
            self._leaves.removed(item)
        else:
            self._snapshots.pop(item, None)

    def changed(self, item: Evictable) -> None:
        if isinstance(item, PageNode):
            self._leaves.changed(item)
        elif item in self._snapshots:
            self._snapshots[item] = self._efficiency(item)

    def victim(self, need: Need) -> Evictable | None:
        if not self._snapshots:
            return self._leaves.victim(need)
        if not self._alpha:
            return min(self._snapshots, key=lambda snapshot: (snapshot.last_used_s, snapshot.num_tokens))
        now_s = self._clock()
        best_recency = max(1 / max(now_s - snapshot.last_used_s, MIN_AGE_S) for snapshot in self._snapshots)
        best_efficiency = max(max(self._snapshots.values()), 1e-300)

        def utility(snapshot: Snapshot) -> float:
            recency = 1 / max(now_s - snapshot.last_used_s, MIN_AGE_S)
            return recency / best_recency + self._alpha * self._snapshots[snapshot] / best_efficiency

        return min(self._snapshots, key=utility)

    def _efficiency(self, snapshot: Snapshot) -> float:
        shallower, num_pages = neighbours(snapshot)
        base = shallower.num_tokens if shallower is not None else 0
        freed = self._row_bytes + num_pages * self._page_bytes
        return self.cost.seconds(base, snapshot.num_tokens) / max(freed, 1)
