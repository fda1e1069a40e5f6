"""The colder tiers of one cache behind one face: what the cache reports to them, and what the scheduler asks of them.

Everything runs in the engine's thread except what `background` does. Nothing here decides what leaves the device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from turnkeep.cache.prefix_match import PrefixMatch
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.retention import Retention
from turnkeep.cache.spec import CacheSpec
from turnkeep.cache.tiers.background import Background
from turnkeep.cache.tiers.cold_index import ColdIndex, ColdMatch
from turnkeep.cache.tiers.disk_tier import DiskTier
from turnkeep.cache.tiers.keys import owner_key
from turnkeep.cache.tiers.loader import Loader, LoadState
from turnkeep.cache.tiers.offloader import Offloader
from turnkeep.cache.tiers.pool_content import PoolContent
from turnkeep.cache.tiers.record import Record, TierBudget
from turnkeep.cache.tiers.takeover import Takeover
from turnkeep.cache.tiers.tier_counters import TierCounters, TierReading

log = logging.getLogger(__name__)

NO_BUDGET = TierBudget(0, 0)
LOOK_PERIOD_S = 5.0  # between two looks at what other engines hold of the same disk budget
WAIT_S = 0.005  # for a read, while nothing runs: messages wait no longer than this


class ColdTiers:
    """Host memory and, with `disk`, a folder. `attach` must be called by the cache that it serves."""

    def __init__(
        self,
        spec: CacheSpec,
        layout: bytes,
        pool: PoolContent,
        background: Background,
        *,
        clock: Callable[[], float],
        counters: TierCounters,
        host_budget: TierBudget,
        disk_budget: TierBudget = NO_BUDGET,
        disk: DiskTier | None = None,
    ) -> None:
        """layout: digest of everything that defines the bytes. Reads the names of what `disk` holds already.

        disk_budget: of the whole folder; while other engines use it too, a part of it is for this one.
        """
        self.counters = counters
        self.index = ColdIndex(
            spec.page_size,
            has_pages=spec.kv is not None,
            has_state=spec.state is not None,
            host=host_budget,
            disk=disk_budget,
            on_erased=self._erase,
        )
        self._spec = spec
        self._layout = layout
        self._pool = pool
        self._background = background
        self._disk = disk
        self._disk_budget = disk_budget
        self._clock = clock
        self._next_look_s = clock() + LOOK_PERIOD_S
        self.offloader = Offloader(
            layout,
            spec.page_size,
            pool=pool,
            index=self.index,
            disk=disk,
            counters=counters,
            clock=clock,
            has_pages=spec.kv is not None,
            has_state=spec.state is not None,
        )
        self._loader: Loader | None = None
        if disk is not None:
            self._read_folder(disk)

    def attach(self, reclaimer: Reclaimer, retention: Retention) -> None:
        """Serve this cache from now on."""
        reclaimer.offloader = self.offloader
        takeover = Takeover(
            self._layout, self._spec.page_size, pool=self._pool, reclaimer=reclaimer, retention=retention
        )
        self._loader = Loader(
            self._layout,
            index=self.index,
            disk=self._disk,
            reclaimer=reclaimer,
            takeover=takeover,
            offloader=self.offloader,
            counters=self.counters,
            clock=self._clock,
        )
        reclaimer.give_way = self._loader.give_way

    # The scheduler

    @property
    def loader(self) -> Loader:
        assert self._loader is not None, "the tiers serve no cache yet"
        return self._loader

    def find(self, match: PrefixMatch) -> ColdMatch | None:
        """What they hold of a prompt beyond a match of the device."""
        return self.loader.find(match)

    def load(
        self, cold: ColdMatch, match: PrefixMatch, conversation_id: str | None, *, may_start: bool = True
    ) -> LoadState:
        """Bring it to the device; see Loader."""
        return self.loader.load(cold, match, conversation_id, may_start=may_start)

    def expect(self, cache_root: str, conversation_id: str) -> None:
        """A conversation's next prompt will be here soon."""
        self.loader.expect(cache_root, conversation_id)

    def forget(self, cache_root: str, conversation_id: str) -> None:
        """A conversation will not return: nothing of its own stays, in memory or on disk."""
        self.index.forget(owner_key(cache_root, conversation_id))

    def poll(self) -> bool:
        """Take over what has ended in the background. True when a load is done: who waits should look again.

        Takes a few milliseconds at most while there is something to hand over.
        """
        self._background.poll()
        share = None if self._disk is None else self._disk.share
        if share is not None and self._clock() >= self._next_look_s:
            self._next_look_s = self._clock() + LOOK_PERIOD_S
            self._background.submit(share.look, self._take_share)
        self.loader.hand_over()
        return self.loader.take_num_ended() > 0

    def use_idle_time(self, *, is_awaited: bool) -> bool:
        """Nothing runs. is_awaited: some request waits, perhaps for a load; then wait a moment for it.

        True when something was done, or `poll` has something to do, so that more may be to do.
        """
        if self.loader.is_handing_over:
            return True
        if is_awaited and self.loader.is_loading:
            self._background.wait(WAIT_S)
            return True
        return self.offloader.write_ahead()

    def flush(self, limit_s: float) -> None:
        """The engine leaves: write what a next one could go on from, as far as there is time."""
        if self._disk is None:
            return
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            self._background.poll()
            if not self.offloader.write_ahead(is_hurried=True):
                if not self._disk.backlog_bytes:
                    return
                self._background.wait(0.05)

    def close(self) -> None:
        """The cache is not used any more."""
        self.loader.give_way()
        self._background.close()
        if self._disk is not None:
            self._disk.close()

    # Reports

    def reading(self) -> TierReading:
        """Gauges and counters as of now."""
        tiers = (("host", self.index.host), ("disk", self.index.disk))
        evicted = {f"tier_num_evicted.{name}": float(tier.num_evicted) for name, tier in tiers}
        return TierReading(self._gauges(), self.counters.values() | evicted)

    def _gauges(self) -> dict[str, float]:
        values: dict[str, float] = {"tier_num_unwritten": float(self.offloader.num_unwritten)}
        if self._disk is not None and self._disk.share is not None:
            values["tier_disk_other_bytes"] = float(self._disk.share.num_other_bytes)
        for name, tier in (("host", self.index.host), ("disk", self.index.disk)):
            for kind in ("pages", "snapshot"):
                label = "page" if kind == "pages" else kind
                values[f"tier_{name}_{label}_bytes"] = float(tier.used_bytes[kind])
                values[f"tier_{name}_max_{label}_bytes"] = float(tier.max_used_bytes[kind])
                values[f"tier_{name}_{label}_budget_bytes"] = float(tier.budget.of(kind))
                values[f"tier_{name}_num_{label}_records"] = float(tier.num_records(kind))
        return values

    def _take_share(self, num_bytes: int | BaseException) -> None:
        """So much of the folder may be ours until the next look."""
        if isinstance(num_bytes, int):
            self.index.disk.budget = self._disk_budget.within(num_bytes)
            self.index.enforce_budgets()

    def _erase(self, record: Record) -> None:
        if self._disk is not None:
            self._disk.erase(record)

    def _read_folder(self, disk: DiskTier) -> None:
        """Names only: content is read when a prompt asks for it. What lacks something it needs is erased."""
        found = disk.scan()
        order = {file.name.key: number for number, file in enumerate(found)}
        num_orphans = 0
        records: list[Record] = []
        # A run before the runs and snapshots that need it.
        for file in sorted(found, key=lambda file: (file.name.start, file.name.kind)):
            record = Record(file.name, disk.content_bytes(file), file.file_bytes)
            if self.index.add(record):
                self.index.disk.add(record)
                records.append(record)
            else:
                disk.erase(record)
                num_orphans += 1
        for record in sorted(records, key=lambda record: order[record.name.key]):
            self.index.own(record)
            self.index.touch(record)
        for record in records:
            is_useless = self._spec.state is not None and record.name.kind == "pages" and not record.users
            if is_useless and record.is_attached:
                self.index.remove(record)
        if disk.share is None:
            self.index.enforce_budgets()
        else:
            self._take_share(disk.share.look())
            disk.share.make_room(self.index.disk.num_bytes)
        log.info("%d records found on disk, %d without what they need", len(records), num_orphans)
