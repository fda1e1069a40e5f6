"""A cache driver with colder tiers: files in a folder, background work that happens when a test says so, restarts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from cache_driver import CacheDriver, ModelKind, Run, cache_spec

from turnkeep.cache.cache_manager import PrefixMatch
from turnkeep.cache.spec import StatePart
from turnkeep.cache.tiers.cold_tiers import NO_BUDGET, ColdTiers
from turnkeep.cache.tiers.disk_tier import DiskTier
from turnkeep.cache.tiers.offloader import QUIET_S
from turnkeep.cache.tiers.record import Bytes, TierBudget
from turnkeep.cache.tiers.shared_folder import FolderShare, layout_folder, lock_folder
from turnkeep.cache.tiers.tier_counters import TierCounters

T = TypeVar("T")
LAYOUT = b"layout of the tests".ljust(32)
AMPLE = TierBudget(1 << 30, 1 << 30)
HASH_BYTES = 8


class SteppedBackground:
    """Background whose work is done by `run`."""

    def __init__(self) -> None:
        self.urgent: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self.queued: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self.ended: deque[tuple[Callable[[Any], None], Any]] = deque()

    def submit(
        self, work: Callable[[], T], done: Callable[[T | BaseException], None], *, is_urgent: bool = False
    ) -> None:
        (self.urgent if is_urgent else self.queued).append((work, done))

    def run(self, max_number: int | None = None) -> int:
        """Do so much of what waits; all of it when None."""
        number = 0
        while (self.urgent or self.queued) and number != max_number:
            work, done = (self.urgent or self.queued).popleft()
            result: Any
            try:
                result = work()
            except Exception as error:
                result = error
            self.ended.append((done, result))
            number += 1
        return number

    def poll(self) -> int:
        ended, self.ended = self.ended, deque()
        for done, result in ended:
            done(result)
        return len(ended)

    def wait(self, timeout_s: float) -> bool:
        self.run(1)
        return bool(self.ended)

    def close(self) -> None:
        self.urgent.clear()
        self.queued.clear()


class DriverContent:
    """PoolContent of a driver's cells and rows: eight bytes a slot and a row."""

    slot_bytes = HASH_BYTES
    row_parts = (StatePart("hash", 1, (2,), "float32"),)

    def __init__(self, driver: CacheDriver) -> None:
        self._driver = driver
        self.row_bytes = HASH_BYTES if driver.kind != "attention_only" else 0
        self.page_bytes = driver.page_size * HASH_BYTES

    def describe(self) -> str:
        return "hashes"

    def read_pages(self, pages: Sequence[int]) -> Bytes:
        return np.array([self._driver.cells[page] for page in pages], dtype=np.int64).reshape(-1).view(np.uint8)

    def write_pages(self, pages: Sequence[int], content: Bytes) -> None:
        rows = content.view(np.int64).reshape(len(pages), -1).tolist()
        for page, cells in zip(pages, rows, strict=True):
            self._driver.cells[page][:] = cells

    def read_snapshot(self, row: int, page: int, num_slots: int) -> Bytes:
        values = [*self._driver.rows[row : row + self.row_bytes // HASH_BYTES], *self._driver.cells[page][:num_slots]]
        return np.array(values, dtype=np.int64).view(np.uint8)

    def write_snapshot(self, row: int, page: int, num_slots: int, content: Bytes) -> None:
        slots = content.copy().view(np.int64).tolist()
        if self.row_bytes:
            self._driver.rows[row] = slots.pop(0)
        self._driver.cells[page][:num_slots] = slots[:num_slots]


class TieredDriver(CacheDriver):
    """`folder` None: host memory alone. A new driver on the same folder is a process that started again.

    is_shared: its files lie in a folder of its layout in there, with those of other layouts under one budget, and
    belong to it until `tiers.close`.
    """

    def __init__(
        self,
        folder: Path | None,
        kind: ModelKind = "hybrid",
        *,
        host: TierBudget = AMPLE,
        disk: TierBudget = AMPLE,
        layout: bytes = LAYOUT,
        is_shared: bool = False,
        **options: Any,
    ) -> None:
        self.background = SteppedBackground()
        self.counters = TierCounters()

        def make_tiers(driver: CacheDriver) -> ColdTiers:
            store = None
            if folder is not None:
                own = layout_folder(folder, layout) if is_shared else folder
                lock = lock_folder(own, timeout_s=0.0) if is_shared else None
                share = FolderShare(folder, own, disk.num_bytes) if is_shared else None
                store = DiskTier(
                    own, layout, self.background, self.counters, clock=driver.clock, lock=lock, share=share
                )
            return ColdTiers(
                cache_spec(kind, driver.page_size),
                layout,
                DriverContent(driver),
                self.background,
                clock=driver.clock,
                counters=self.counters,
                host_budget=host,
                disk_budget=NO_BUDGET if folder is None else disk,
                disk=store,
            )

        super().__init__(kind, make_tiers=make_tiers, **options)
        assert self.cache.tiers is not None
        self.tiers: ColdTiers = self.cache.tiers

    def idle(self) -> None:
        """Time passes in which nothing runs: everything that is worth it reaches the disk."""
        self.clock.now_s += 2 * QUIET_S
        while self.tiers.use_idle_time(is_awaited=False):
            self.background.run()
            self.tiers.poll()
        self.settle_background()

    def settle_background(self) -> None:
        """Everything in the background happens and is told."""
        while self.background.run() or self.background.ended or self.tiers.loader.is_handing_over:
            self.tiers.poll()
        self.check()

    def bring(
        self, token_ids: Sequence[int], conversation_id: str | None = None, *, cache_root: str = ""
    ) -> PrefixMatch:
        """The match after colder tiers have brought what they have, as a request that waits would get it."""
        match = self.match(token_ids, cache_root)
        cold = self.tiers.find(match)
        if cold is not None:
            self.tiers.load(cold, match, conversation_id)
            self.settle_background()
        return self.match(token_ids, cache_root)

    def open_brought(self, token_ids: Sequence[int], conversation_id: str | None = None) -> Run:
        run = self.open_match(self.bring(token_ids, conversation_id), conversation_id)
        assert run is not None
        return run

    def assert_empty(self) -> None:
        while self.tiers.loader.is_handing_over:  # it holds what is there of it
            self.tiers.poll()
        super().assert_empty()

    def check(self) -> None:
        super().check()
        if self.checks:
            self.tiers.index.check()
