"""What may not go yet, and who has to give first: rules around any eviction policy.

A client's wish that its snapshots stay is a hold: advisory, bounded in time and in number. A conversation, with the
sub-agents that forked from it, and a tenant may hold a share of the state rows; whoever has more gives first, so that
nobody crowds out others, and a fork gives before its parent does. Within a share the policy decides alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sized
from heapq import heappop, heappush
from itertools import count

from turnkeep.cache.config import CacheConfig
from turnkeep.cache.eviction import Evictable, EvictionPolicy, Need
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.snapshot import Snapshot

LEAST_ROWS = 4  # of an owner, however small its share is: what one line of a conversation needs at once


class KeepingRules:
    """An EvictionPolicy around `policy`. Pages of models without state are left to it."""

    def __init__(self, policy: EvictionPolicy, config: CacheConfig, num_rows: int, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._max_hold_s = config.max_retention_s
        self._max_holds = int(num_rows * config.max_held_share)
        self._family_rows = _rows_of_share(config.max_conversation_share, num_rows)
        self._tenant_rows = _rows_of_share(config.max_tenant_share, num_rows)
        self._holds: dict[Snapshot, float] = {}  # until when, evictable or not
        self._aside: set[Snapshot] = set()  # held ones that could go otherwise: the policy does not know of them
        self._expiry: list[tuple[float, int, Snapshot]] = []
        self._ticks = count()
        self._owners: dict[Snapshot, tuple[Hashable, ...]] = {}
        self._num_owned: Counter[Hashable] = Counter()
        self._idle: dict[Hashable, OrderedDict[Snapshot, None]] = {}  # may go; superseded, then least recently used
        self._over: set[Hashable] = set()

    def __len__(self) -> int:
        assert isinstance(self._policy, Sized)
        return len(self._policy) + len(self._aside)

    # Rules

    def hold(self, snapshot: Snapshot, seconds: float) -> bool:
        """Let it stay for so long from now, if other things can go. False: as many are held as may be."""
        if seconds <= 0 or (snapshot not in self._holds and len(self._holds) >= self._max_holds):
            return False
        until_s = self._clock() + min(seconds, self._max_hold_s)
        if until_s <= self._holds.get(snapshot, 0.0):
            return True
        self._holds[snapshot] = until_s
        heappush(self._expiry, (until_s, next(self._ticks), snapshot))
        if not snapshot.num_pins and snapshot not in self._aside:
            self._policy.removed(snapshot)
            self._aside.add(snapshot)
        return True

    def assign(self, snapshot: Snapshot, family: Hashable, tenant: Hashable) -> None:
        """Whose rows it counts to; the first one named stays."""
        if snapshot in self._owners:
            return
        owners = self._owners[snapshot] = (("family", family), ("tenant", tenant))
        for owner in owners:
            self._num_owned[owner] += 1
            if not snapshot.num_pins:
                self._idle.setdefault(owner, OrderedDict())[snapshot] = None
            self._compare(owner)

    # EvictionPolicy

    def added(self, item: Evictable) -> None:
        if isinstance(item, PageNode) or not self._is_held(item):
            self._policy.added(item)
        else:
            self._aside.add(item)
        if isinstance(item, Snapshot):
            for owner in self._owners.get(item, ()):
                idle = self._idle.setdefault(owner, OrderedDict())
                idle[item] = None
                idle.move_to_end(item, last=not item.is_superseded)

    def removed(self, item: Evictable) -> None:
        if isinstance(item, PageNode):
            self._policy.removed(item)
            return
        if item in self._aside:
            self._aside.discard(item)
        self._policy.removed(item)
        for owner in self._owners.get(item, ()):
            self._idle.get(owner, OrderedDict()).pop(item, None)
        if not item.is_attached:
            self._forget(item)

    def changed(self, item: Evictable) -> None:
        if isinstance(item, Snapshot):
            if item.is_superseded:
                self._release(item)
            for owner in self._owners.get(item, ()):
                idle = self._idle.get(owner)
                if idle is not None and item in idle:
                    idle.move_to_end(item, last=not item.is_superseded)
        self._policy.changed(item)

    def victim(self, need: Need) -> Evictable | None:
        self._expire()
        for owner in self._over:
            for snapshot in self._idle.get(owner, ()):
                if snapshot not in self._aside:
                    return snapshot
        victim = self._policy.victim(need)
        if victim is None and self._aside:
            # Nothing else is left: the wish that ends first is not granted any longer.
            self._release(min(self._aside, key=lambda snapshot: self._holds[snapshot]))
            victim = self._policy.victim(need)
        return victim

    # Parts

    def _is_held(self, snapshot: Snapshot) -> bool:
        return self._holds.get(snapshot, 0.0) > self._clock()

    def _expire(self) -> None:
        now_s = self._clock()
        while self._expiry and self._expiry[0][0] <= now_s:
            until_s, _, snapshot = heappop(self._expiry)
            if self._holds.get(snapshot) == until_s:
                self._release(snapshot)

    def _release(self, snapshot: Snapshot) -> None:
        self._holds.pop(snapshot, None)
        if snapshot in self._aside:
            self._aside.discard(snapshot)
            self._policy.added(snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        self._holds.pop(snapshot, None)
        for owner in self._owners.pop(snapshot, ()):
            self._num_owned[owner] -= 1
            self._compare(owner)
            if not self._num_owned[owner]:
                del self._num_owned[owner]
                self._idle.pop(owner, None)

    def _compare(self, owner: Hashable) -> None:
        limit = self._family_rows if isinstance(owner, tuple) and owner[0] == "family" else self._tenant_rows
        if limit is not None and self._num_owned[owner] > limit:
            self._over.add(owner)
        else:
            self._over.discard(owner)


def _rows_of_share(share: float, num_rows: int) -> int | None:
    """None: no limit."""
    return None if share >= 1 else max(int(share * num_rows), LEAST_ROWS)
