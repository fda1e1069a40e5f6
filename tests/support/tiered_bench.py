"""A scheduler bench with colder tiers whose background work happens when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from content_probe import ContentProbe
from scheduler_builders import Bench, FakeClock, make_bench
from tier_driver import AMPLE, LAYOUT, SteppedBackground

from turnkeep.cache.spec import CacheSpec, StatePart
from turnkeep.cache.tiers.cold_tiers import NO_BUDGET, ColdTiers
from turnkeep.cache.tiers.disk_tier import DiskTier
from turnkeep.cache.tiers.record import Bytes, TierBudget
from turnkeep.cache.tiers.tier_counters import TierCounters

CELL_BYTES = 16


class ProbeContent:
    """PoolContent of a probe: token and hash of every slot, a hash a row."""

    row_bytes = 8
    slot_bytes = CELL_BYTES
    row_parts = (StatePart("hash", 1, (2,), "float32"),)

    def __init__(self, probe: ContentProbe) -> None:
        self._probe = probe
        self.page_bytes = probe.page_size * CELL_BYTES

    def describe(self) -> str:
        return "hashes"

    def read_pages(self, pages: Sequence[int]) -> Bytes:
        cells = [self._probe.pages[page] for page in pages]
        return np.array(cells, dtype=np.int64).reshape(-1).view(np.uint8)

    def write_pages(self, pages: Sequence[int], content: Bytes) -> None:
        cells = content.view(np.int64).reshape(len(pages), -1, 2).tolist()
        for page, slots in zip(pages, cells, strict=True):
            self._probe.pages[page] = [(token, history) for token, history in slots]

    def read_snapshot(self, row: int, page: int, num_slots: int) -> Bytes:
        slots = [value for cell in self._probe.pages[page][:num_slots] for value in cell]
        return np.array([self._probe.rows[row], *slots], dtype=np.int64).view(np.uint8)

    def write_snapshot(self, row: int, page: int, num_slots: int, content: Bytes) -> None:
        self._probe.rows[row], *slots = content.copy().view(np.int64).tolist()
        for slot in range(num_slots):
            self._probe.pages[page][slot] = (slots[2 * slot], slots[2 * slot + 1])


class TieredBench:
    """`bench` as ever; a new one on the same folder is an engine that started again."""

    def __init__(self, folder: Path | None, *, host: TierBudget = AMPLE, **options: Any) -> None:
        self.background = SteppedBackground()
        self.counters = TierCounters()

        def make_tiers(spec: CacheSpec, probe: ContentProbe, clock: FakeClock) -> ColdTiers:
            disk = None if folder is None else DiskTier(folder, LAYOUT, self.background, self.counters, clock=clock)
            return ColdTiers(
                spec,
                LAYOUT,
                ProbeContent(probe),
                self.background,
                clock=clock,
                counters=self.counters,
                host_budget=host,
                disk_budget=NO_BUDGET if folder is None else AMPLE,
                disk=disk,
            )

        self.bench: Bench = make_bench(make_tiers=make_tiers, **options)

    def evict_all(self) -> None:
        """Everything leaves the device, and reaches the disk if there is one."""
        self.bench.cache.clear()
        self.settle()

    def settle(self) -> None:
        """Whatever waits in the background happens and is told."""
        tiers = self.bench.cache.tiers
        assert tiers is not None
        while self.background.run() or self.background.ended or tiers.loader.is_handing_over:
            tiers.poll()
        self.bench.cache.check()
