"""When will it be wanted again? Learnt online from how long conversations and shared prefixes stayed away.

Per class of waiter a life table holds returns and seconds waited in bins of age; those who never come back stay in it
as waiting seconds, so that death is learnt too. A class is shrunk towards its parent, all classes towards a prior that
is close to "as long again as it has been quiet". Knows nothing of tokens, pages or snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count, pairwise
from math import exp, floor, log
from typing import Literal

WaitKind = Literal["tool", "text", "trunk", "branch", "suspended", "left"]
ClassKey = tuple[WaitKind, int, int]

NUM_BINS = 44
EDGES_S = [1.25**index for index in range(NUM_BINS)]  # upper ends: 1 s ... about 4 hours
WIDTHS_S = [EDGES_S[0], *(upper - lower for lower, upper in pairwise(EDGES_S))]
REFRESH = 50  # observations after which a table's index is built again
ROOT_WEIGHT, ROOT_HAZARD = 4.0, 0.1  # waiters' worth of prior; its hazard times age
CLASS_WEIGHT = 10.0  # waiters' worth of the parent's hazard in a class
GAP_MEMORY = 0.3  # weight of the newest gap in a waiter's mean
LOG_BUCKET = log(2.5)
MAX_AGED = 256  # waiters that one event lets grow older
MAX_RETURNS = 4096  # a table that saw more forgets half: habits change in a long uptime


class LifeTable:
    """Hazard of return by age, shrunk towards the parent's."""

    def __init__(self, parent: LifeTable | None = None) -> None:
        self._parent = parent
        self._returns = [0.0] * NUM_BINS
        self._seconds = [0.0] * NUM_BINS
        self._num_returns = 0
        self._num_new = 0
        self._index: list[float] | None = None

    def add(self, age_bin: int, seconds: float, *, is_return: bool) -> None:
        """One waiter spent so many seconds in a bin and came back in it, or did not."""
        self._seconds[age_bin] += seconds
        self._num_new += 1
        if is_return:
            self._returns[age_bin] += 1
            self._num_returns += 1
            if self._num_returns > MAX_RETURNS:
                self._forget_half()
        if self._parent is not None:
            self._parent.add(age_bin, seconds, is_return=is_return)

    def hazard(self, age_bin: int) -> float:
        """Returns a second at this age."""
        width = WIDTHS_S[age_bin]
        if self._parent is not None:
            weight, prior = CLASS_WEIGHT * width, self._parent.hazard(age_bin)
        else:
            weight, prior = ROOT_WEIGHT * width, ROOT_HAZARD / (EDGES_S[age_bin] - width / 2)
        return (self._returns[age_bin] + weight * prior) / (self._seconds[age_bin] + weight)

    def index(self, age_bin: int) -> float:
        """Best chance of a return per second held, over all ages at which one could give up (Gittins' index)."""
        if self._index is None or self._num_new > REFRESH:
            self._num_new = 0
            self._index = self._build()
        return self._index[age_bin]

    def _build(self) -> list[float]:
        hazards = [self.hazard(age_bin) for age_bin in range(NUM_BINS)]
        chances = [1 - exp(-min(50.0, hazard * width)) for hazard, width in zip(hazards, WIDTHS_S, strict=True)]
        held = [
            chance / hazard if hazard * width > 1e-9 else width
            for chance, hazard, width in zip(chances, hazards, WIDTHS_S, strict=True)
        ]
        index = []
        for age_bin in range(NUM_BINS):
            best = chance = seconds = 0.0
            alive = 1.0
            for later in range(age_bin, NUM_BINS):
                chance += alive * chances[later]
                seconds += alive * held[later]
                alive *= 1 - chances[later]
                best = max(best, chance / seconds)
            index.append(best)
        return index

    def _forget_half(self) -> None:
        self._returns = [number / 2 for number in self._returns]
        self._seconds = [number / 2 for number in self._seconds]
        self._num_returns //= 2


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody who may come back: the next turn of a line of conversation, or the next use of a shared prefix.

    mean_log_gaps: by kind, the running mean of the logarithm of its own gaps in seconds.
    """

    num_uses: int = 0
    kind: WaitKind | None = None
    mean_log_gaps: dict[WaitKind, float] = field(default_factory=dict)
    table: LifeTable | None = None
    age_bin: int = 0
    since_s: float = 0.0
    is_waiting: bool = False


class ReturnForecast:
    """The life tables of all classes, and the clock that lets waiters grow older. O(log waiters) per event."""

    def __init__(self) -> None:
        self._root = LifeTable()
        self._kinds: dict[WaitKind, LifeTable] = {}
        self._classes: dict[ClassKey, LifeTable] = {}
        self._timers: list[tuple[float, int, Waiter, float]] = []  # when, tie, who, since when it waits
        self._ticks = count()

    def wait(self, waiter: Waiter, kind: WaitKind, now_s: float) -> None:
        """From now on `waiter` is away; an earlier wait is forgotten."""
        waiter.kind = kind
        waiter.table = self._table(waiter, kind)
        waiter.age_bin, waiter.since_s, waiter.is_waiting = 0, now_s, True
        heappush(self._timers, (now_s + EDGES_S[0], next(self._ticks), waiter, now_s))

    def returned(self, waiter: Waiter, now_s: float) -> None:
        """It came back, if it was away."""
        if not waiter.is_waiting:
            return
        self._grow_older(waiter, now_s)
        assert waiter.table is not None
        assert waiter.kind is not None
        gap_s, age_bin = max(now_s - waiter.since_s, 0.0), waiter.age_bin
        lower_s = EDGES_S[age_bin - 1] if age_bin else 0.0
        waiter.table.add(age_bin, max(gap_s - lower_s, 0.0), is_return=True)
        log_gap, old = log(max(gap_s, 0.5)), waiter.mean_log_gaps.get(waiter.kind)
        waiter.mean_log_gaps[waiter.kind] = log_gap if old is None else old + GAP_MEMORY * (log_gap - old)
        waiter.is_waiting = False

    def give_up(self, waiter: Waiter) -> None:
        """It is known not to come back; nothing is learnt from it."""
        waiter.is_waiting = False

    def advance(self, now_s: float) -> Iterator[Waiter]:
        """Those whose age reached another bin since the last call: their index changed.

        At most MAX_AGED of them: after a quiet night everybody is due at once, and nobody should wait for that.
        """
        num_left = MAX_AGED
        while num_left and self._timers and self._timers[0][0] <= now_s:
            _, _, waiter, since_s = heappop(self._timers)
            if not waiter.is_waiting or waiter.since_s != since_s:
                continue
            num_left -= 1
            self._grow_older(waiter, now_s)
            if waiter.age_bin + 1 < NUM_BINS:
                heappush(self._timers, (since_s + EDGES_S[waiter.age_bin], next(self._ticks), waiter, since_s))
            yield waiter

    def index(self, waiter: Waiter) -> float:
        """Return index of a waiter; one that is being served counts as one that has just left."""
        if waiter.table is None:
            return self._table(waiter, "text").index(0)
        return waiter.table.index(waiter.age_bin if waiter.is_waiting else 0)

    def first_index(self, kind: WaitKind) -> float:
        """Return index of somebody unknown who starts to wait now."""
        return self._table(Waiter(), kind).index(0)

    def _grow_older(self, waiter: Waiter, now_s: float) -> None:
        """Move a waiter to the bin of its present age, through all in between. At most NUM_BINS of them."""
        assert waiter.table is not None
        while waiter.age_bin + 1 < NUM_BINS and waiter.since_s + EDGES_S[waiter.age_bin] <= now_s:
            waiter.table.add(waiter.age_bin, WIDTHS_S[waiter.age_bin], is_return=False)
            waiter.age_bin += 1

    def _table(self, waiter: Waiter, kind: WaitKind) -> LifeTable:
        mean = waiter.mean_log_gaps.get(kind)
        key = (kind, -1 if mean is None else floor(mean / LOG_BUCKET), min(waiter.num_uses, 2))
        table = self._classes.get(key)
        if table is None:
            parent = self._kinds.get(kind)
            if parent is None:
                # Hardly any prompt is ever left: what is learnt of those says nothing of who is away.
                parent = self._kinds[kind] = LifeTable(None if kind == "branch" else self._root)
            table = self._classes[key] = LifeTable(parent)
        return table
