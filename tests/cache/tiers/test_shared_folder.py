"""Several models and engines in one folder: one budget for all of it, and nobody's files are touched while he runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cache_driver import MODEL_KINDS, ModelKind
from tier_driver import TieredDriver

from turnkeep.cache.tiers.cold_tiers import LOOK_PERIOD_S
from turnkeep.cache.tiers.record import TierBudget
from turnkeep.cache.tiers.shared_folder import (
    LOCK_NAME,
    DiskTierError,
    FolderShare,
    held_bytes,
    layout_folder,
    lock_folder,
)

LAYOUTS = {name: name.encode().ljust(32) for name in ("first", "second", "third")}
BUDGET = TierBudget(9_000, 9_000)  # four or five conversations
BUDGETS = {"hybrid": BUDGET, "attention_only": TierBudget(17_000, 1_000), "attention_free": TierBudget(0, 18_000)}
ANSWER = list(range(200, 210))


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 40))


@contextmanager
def running(base: Path, model: str, kind: ModelKind = "hybrid") -> Iterator[TieredDriver]:
    """An engine of this model that runs; a new one is a restart."""
    budget = BUDGETS[kind]
    driver = TieredDriver(
        base,
        kind,
        layout=LAYOUTS[model],
        disk=budget,
        host=TierBudget(0, 0),
        num_pages=300,
        num_rows=60,
        is_shared=True,
    )
    yield driver
    driver.tiers.close()


def converse(driver: TieredDriver, base: Path, numbers: range) -> None:
    """A turn of each of these conversations reaches the disk. The budget holds after everything that is done to it."""
    for number in numbers:
        driver.turn(prompt(number), ANSWER, f"c{number}", trunk=8, turn_start=40)
        driver.clock.now_s += LOOK_PERIOD_S
        while driver.tiers.use_idle_time(is_awaited=False) or driver.background.queued:
            while driver.background.run(1):
                assert held_bytes(base) <= BUDGET.num_bytes
            driver.tiers.poll()
        driver.cache.clear()  # what is on disk already


def held_by(base: Path, model: str) -> int:
    """Bytes of the files of one model."""
    folder = layout_folder(base, LAYOUTS[model])
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.exists() else 0


def num_known(driver: TieredDriver, numbers: range) -> list[int]:
    """Tokens that each conversation's next turn finds; what is found is read, and its content checked."""
    return [driver.bring([*prompt(number), *ANSWER, 1], f"c{number}").num_tokens for number in numbers]


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_one_budget_bounds_the_files_of_all_models_and_the_longest_unused_go_first(
    kind: ModelKind, tmp_path: Path
) -> None:
    with running(tmp_path, "first", kind) as first:
        converse(first, tmp_path, range(3))
        assert all(num_known(first, range(3)))  # so the first conversation was used before the last
    with running(tmp_path, "second", kind) as second:
        converse(second, tmp_path, range(3))
    with running(tmp_path, "first", kind) as first:
        found = num_known(first, range(3))
        assert found[-1] > 0, "the newest is there as long as there is room for it"
        assert found == sorted(found)
    with running(tmp_path, "second", kind) as second:
        held = held_by(tmp_path, "first")
        converse(second, tmp_path, range(3, 40))
        assert held_by(tmp_path, "second") > BUDGET.num_bytes * 2 // 3, "who runs has what it needs of the room"
        assert held_by(tmp_path, "first") < held


def test_what_all_conversations_begin_with_goes_last(tmp_path: Path) -> None:
    trunk = list(range(24))
    prompts = [[*trunk, *range(1000 * number, 1000 * number + 16)] for number in range(1, 4)]
    with running(tmp_path, "first") as first:
        for number, one in enumerate(prompts):
            first.turn(one, ANSWER, f"c{number}", trunk=24, turn_start=40)
            first.idle()
    held = held_by(tmp_path, "first")
    share = FolderShare(tmp_path, tmp_path / ("a" * 32), held)
    share.look()
    share.make_room(600)
    assert 0 < held_by(tmp_path, "first") <= held - 600
    with running(tmp_path, "first") as first:
        assert first.bring([*prompts[2], *ANSWER, 1], "c2").num_tokens == 49
        assert first.bring([*prompts[0], *ANSWER, 1], "c0").num_tokens < 49


def test_a_smaller_budget_holds_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in ("first", "second"):
        with running(tmp_path, model) as driver:
            converse(driver, tmp_path, range(2))
    monkeypatch.setitem(BUDGETS, "hybrid", TierBudget(1500, 1500))
    with running(tmp_path, "second") as driver:
        driver.settle_background()
        assert held_bytes(tmp_path) <= 3000


def test_engines_that_run_at_once_have_equal_parts_and_lose_nothing_to_each_other(tmp_path: Path) -> None:
    with running(tmp_path, "first") as first, running(tmp_path, "second") as second:
        for start in range(0, 24, 3):
            converse(first, tmp_path, range(start, start + 3))
            converse(second, tmp_path, range(start, start + 3))
        for driver in (first, second):
            assert driver.tiers.index.disk.budget.num_bytes == BUDGET.num_bytes // 2
            assert held_by(tmp_path, "first" if driver is first else "second") == driver.tiers.index.disk.num_bytes
            assert driver.tiers.index.disk.num_bytes > BUDGET.num_bytes // 4
            assert num_known(driver, range(23, 24)) == [49]
            assert not driver.counters.num_ignored_files, "no file was damaged or taken away"


def test_a_newcomer_has_what_is_left_until_the_other_has_given_its_half(tmp_path: Path) -> None:
    with running(tmp_path, "first") as first:
        converse(first, tmp_path, range(12))
        with running(tmp_path, "second") as second:
            left = BUDGET.num_bytes - held_by(tmp_path, "first")
            assert second.tiers.index.disk.budget.num_bytes == left < BUDGET.num_bytes // 2
            first.clock.now_s += LOOK_PERIOD_S
            first.tiers.poll()
            first.settle_background()
            assert held_bytes(tmp_path) <= BUDGET.num_bytes // 2
            converse(second, tmp_path, range(12))
            assert second.tiers.index.disk.budget.num_bytes == BUDGET.num_bytes // 2
        first.clock.now_s += LOOK_PERIOD_S
        first.tiers.poll()
        first.settle_background()
        assert first.tiers.index.disk.budget == BUDGET, "alone again"
        converse(first, tmp_path, range(20, 40))
        assert held_by(tmp_path, "second") < BUDGET.num_bytes // 3


def test_an_engine_that_starts_between_a_look_and_an_erasure_keeps_its_files(tmp_path: Path) -> None:
    with running(tmp_path, "first") as first:
        converse(first, tmp_path, range(2))
    own = tmp_path / ("a" * 32)
    share = FolderShare(tmp_path, own, 1000)
    assert share.look() == 1000
    held = held_bytes(tmp_path)
    with running(tmp_path, "first") as first:
        share.make_room(1000)
        assert held_bytes(tmp_path) == held
        assert num_known(first, range(2)) == [49, 49]
    assert share.look() == 1000
    share.make_room(1000)
    assert held_bytes(tmp_path) == 0
    assert not list(tmp_path.iterdir()), "nor does an empty folder stay"


def test_files_of_nobody_known_are_neither_counted_nor_touched(tmp_path: Path) -> None:
    for folder in (tmp_path / "notes", tmp_path / ("b" * 32)):
        folder.mkdir()
        (folder / "record.pages").write_bytes(b"x" * 5000)
    (tmp_path / ("c" * 32)).mkdir()
    (tmp_path / ("c" * 32) / LOCK_NAME).touch()
    (tmp_path / ("c" * 32) / "notes.txt").write_bytes(b"x" * 5000)
    share = FolderShare(tmp_path, tmp_path / ("a" * 32), 1000)
    assert share.look() == 1000
    assert share.num_other_bytes == held_bytes(tmp_path) == 0
    share.make_room(5000)
    assert len(list(tmp_path.rglob("*.*"))) == 3


def test_a_lock_that_was_removed_with_its_folder_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("a" * 32)
    old = lock_folder(folder)
    waits = threading.Event()
    real_open = os.open

    def seen_open(path: Path, *rest: int) -> int:
        descriptor = real_open(path, *rest)
        waits.set()
        return descriptor

    monkeypatch.setattr(os, "open", seen_open)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(lock_folder(folder, timeout_s=30.0)))
    thread.start()
    assert waits.wait(30.0)
    (folder / LOCK_NAME).unlink()
    folder.rmdir()
    os.close(old)
    thread.join()
    with pytest.raises(DiskTierError, match="in use"):
        lock_folder(folder, timeout_s=0.0)
    os.close(found[0])
