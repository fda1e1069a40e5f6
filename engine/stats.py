"""Counters and gauges of scheduler and cache by name, as they travel to the server."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from turnkeep.engine.messages import Stats

if TYPE_CHECKING:
    from turnkeep.scheduler.scheduler import Scheduler

_GAUGES = ("num_running", "num_waiting", "num_suspended")


def gather_stats(scheduler: Scheduler, step_seconds: float, *, requested: bool, reading: int) -> Stats:
    """One Stats message as of now. Cache values are named `cache_...`, the scheduler's by their own names."""
    own = scheduler.stats()
    cache = scheduler.cache_stats()
    counters: dict[str, float] = {"step_seconds": step_seconds}
    for field in fields(own):
        if field.name not in _GAUGES:
            _add(counters, field.name, getattr(own, field.name))
    counters |= scheduler.draft_values()
    gauges = {"max_running": float(scheduler.max_running)}
    gauges |= {f"cache_{name}": float(value) for name, value in cache.gauge_values().items()}
    counters |= {f"cache_{name}": float(value) for name, value in cache.counter_values().items()}
    return Stats(
        num_steps=own.num_steps,
        num_running=own.num_running,
        num_waiting=own.num_waiting,
        num_suspended=own.num_suspended,
        num_free_pages=cache.num_free_pages,
        num_free_rows=cache.num_free_rows,
        gauges=gauges,
        counters=counters,
        requested=requested,
        reading=reading,
    )


def _add(table: dict[str, float], name: str, value: Any) -> None:
    """One number, or a mapping of reasons to numbers as `name.reason`."""
    if isinstance(value, dict):
        for key, part in value.items():
            table[f"{name}.{key}"] = float(part)
    elif isinstance(value, int | float):
        table[name] = float(value)
