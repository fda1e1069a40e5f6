"""The simulation of random workloads, in small, and that it notices what it is there for.

TURNKEEP_SIMULATED_WORKLOADS sets how many; `python -m benchmarks.admission_simulation` runs any number on all cores.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnkeep.cache.cache_manager import CacheManager
from turnkeep.scheduler.admission import Admission
from turnkeep.scheduler.request import Request
from turnkeep.scheduler.scheduler import Scheduler
from turnkeep.scheduler.step_planner import StepPlanner

NUM_WORKLOADS = int(os.environ.get("TURNKEEP_SIMULATED_WORKLOADS", "120"))


@pytest.fixture(scope="module")
def simulation() -> Iterator[ModuleType]:
    root = str(Path(__file__).parents[2])
    sys.path.append(root)
    yield importlib.import_module("benchmarks.admission_simulation")
    sys.path.remove(root)


def test_in_random_workloads_every_request_ends_and_nothing_is_lost(simulation: ModuleType) -> None:
    found = simulation.run_chunk(0, NUM_WORKLOADS)
    assert found["workloads"] == NUM_WORKLOADS
    for kind in ("length", "stop", "abort", "refused", "error", "suspensions", "bypasses", "accepted nodes"):
        assert found[kind] > 0, f"the workloads never lead to {kind}"


def _loses_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Scheduler._append

    def forgetful(self: Scheduler, request: Request, tokens: Any) -> None:
        append(self, request, tokens)
        if request.num_output_tokens == 3:
            del self._events[-1]

    monkeypatch.setattr(Scheduler, "_append", forgetful)


def _keeps_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    close = CacheManager.close

    def forgetful(self: CacheManager, seq: Any) -> None:
        if seq.num_computed_tokens == 20:
            seq.state_row = None
        close(self, seq)

    monkeypatch.setattr(CacheManager, "close", forgetful)


def _suspends_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room = StepPlanner.make_room
    monkeypatch.setattr(
        StepPlanner, "make_room", lambda self, running, suspend: make_room(self, running[::-1], suspend)
    )


def _lets_everybody_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = Admission.admit

    def unfair(self: Admission, running: list[Request]) -> list[Request]:
        for request in self._waiting:
            request.num_bypassed = 0
        return admit(self, running)

    monkeypatch.setattr(Admission, "admit", unfair)


def _forgets_a_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "drain_folds", lambda self: ())


def _takes_the_row_on_past_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is left as it was when a tree was verified: its accepted tokens are lost."""
    history_room = CacheManager.history_room

    def shorter(self: CacheManager, seq: Any, num_tokens: int) -> tuple[int, int]:
        slot, length = history_room(self, seq, num_tokens)
        return slot, max(length - 1, 0)

    monkeypatch.setattr(CacheManager, "history_room", shorter)


def _admits_what_never_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "max_computed_tokens", property(lambda self: self.num_prompt_tokens))


@pytest.mark.parametrize(
    "break_it",
    [
        _loses_a_token,
        _keeps_a_row,
        _suspends_the_oldest,
        _lets_everybody_pass,
        _forgets_a_fold,
        _takes_the_row_on_past_its_history,
        _admits_what_never_fits,
    ],
)
def test_the_simulation_notices_a_broken_scheduler(
    simulation: ModuleType, monkeypatch: pytest.MonkeyPatch, break_it: Any
) -> None:
    break_it(monkeypatch)
    with pytest.raises(simulation.Fault, match="seed"):
        simulation.run_chunk(0, 3000)
