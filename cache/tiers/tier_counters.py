"""What the colder tiers did, in numbers that only grow, under the names they have in reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass(slots=True, frozen=True)
class TierReading:
    """One reading, under flat names."""

    gauges: dict[str, float]
    counters: dict[str, float]


@dataclass(slots=True)
class TierCounters:
    """Counters by tier or reason are named `name.key`."""

    num_offloaded_snapshots: int = 0
    num_offloaded_pages: int = 0
    offloaded_bytes: int = 0  # device -> host memory
    written_bytes: int = 0  # host memory -> disk
    read_bytes: int = 0  # disk -> host memory
    loaded_bytes: int = 0  # host memory -> device
    num_expected: int = 0  # conversations whose records were read before their prompt came
    num_failed_writes: int = 0
    num_hits: Counter[str] = field(default_factory=Counter)  # by tier: loads that were matched deeper than the device
    num_hit_tokens: Counter[str] = field(default_factory=Counter)  # by tier
    num_skipped_offloads: Counter[str] = field(default_factory=Counter)  # by reason: backlog, budget
    num_failed_loads: Counter[str] = field(default_factory=Counter)  # by reason: unreadable, no_room, changed
    num_ignored_files: Counter[str] = field(default_factory=Counter)  # by reason: truncated, corrupt, foreign, missing

    def values(self) -> dict[str, float]:
        """Flat names."""
        values: dict[str, float] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Counter):
                values.update({f"tier_{one.name}.{key}": float(number) for key, number in value.items()})
            else:
                values[f"tier_{one.name}"] = float(value)
        return values
