"""A process may die between any two things it does to the disk, and in the middle of any of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cache_driver import MODEL_KINDS, ModelKind
from tier_driver import TieredDriver

from turnkeep.cache.tiers import record_files
from turnkeep.cache.tiers.record import TierBudget

SMALL = TierBudget(4000, 1500)


class Death(BaseException):
    """The process is gone."""


class MortalDisk:
    """Dies at the n-th thing that changes the folder; what was written before stays, half of what is being written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_lives: int) -> None:
        self.num_lives = num_lives
        replace, unlink, open_file = os.replace, Path.unlink, os.open

        def mortal_replace(source: Path, target: Path) -> None:
            if self._dies():
                half = os.path.getsize(source) // 2
                os.truncate(source, half)
                raise Death
            replace(source, target)

        def mortal_unlink(path: Path, missing_ok: bool = False) -> None:
            if self._dies():
                raise Death
            unlink(path, missing_ok=missing_ok)

        def mortal_open(path: Path, flags: int, *rest: int) -> int:
            if flags & os.O_CREAT and self._dies():
                raise Death
            return open_file(path, flags, *rest)

        monkeypatch.setattr(record_files.os, "replace", mortal_replace)
        monkeypatch.setattr(record_files.os, "open", mortal_open)
        monkeypatch.setattr(Path, "unlink", mortal_unlink)

    def _dies(self) -> bool:
        self.num_lives -= 1
        return self.num_lives < 0


def live(folder: Path, kind: ModelKind) -> None:
    """Four conversations in a tier that holds two or three of them."""
    driver = TieredDriver(folder, kind, num_pages=120, num_rows=30, disk=SMALL, host=TierBudget(0, 0), checks=False)
    for number in range(4):
        prompt = [1000 * number + token for token in range(30)]
        run = driver.turn(prompt, [7, 8, 9], f"c{number}", trunk=6, turn_start=30)
        driver.idle()
        driver.turn([*run.token_ids, 5, 6], [7, 8], f"c{number}", turn_start=35)
        driver.idle()


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_dying_at_any_point_leaves_a_folder_to_go_on_from(
    kind: ModelKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnkeep.cache.tiers.offloader.RUN_BYTES", 100)
    num_points = num_hits = 0
    is_alive = False
    while not is_alive:
        folder = tmp_path / str(num_points)
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            disk = MortalDisk(patch, num_points)
            try:
                live(folder, kind)
                is_alive = True
            except Death:
                assert disk.num_lives < 0
        after = TieredDriver(folder, kind, num_pages=120, num_rows=30)
        assert not list(folder.glob("*.part"))
        assert not after.counters.num_ignored_files
        for number in range(4):
            after.bring([*(1000 * number + token for token in range(30)), 7, 8, 9, 5, 6, 7, 8, 1])  # content is checked
        num_hits += after.counters.num_hits.total()
        num_points += 1
    assert num_points > 20
    assert num_hits > num_points
