"""Sizes and places of the colder tiers, and the engine that starts whatever their folder is like."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cache_driver import CacheDriver, cache_spec
from tier_driver import DriverContent

from turnkeep.cache.config import CacheConfig
from turnkeep.cache.tiers.config import TierConfig
from turnkeep.cache.tiers.shared_folder import LOCK_NAME, lock_folder
from turnkeep.engine import tier_building
from turnkeep.engine.tier_building import BuiltTiers, build_tiers, default_host_bytes, layout_digest

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_building, "lock_folder", lambda folder: lock_folder(folder, timeout_s=0.0))


def build(folder: Path | None, fingerprint: bytes | None = b"weights", **settings: int | bool) -> BuiltTiers:
    tiers = TierConfig(folder=None if folder is None else str(folder), **settings)  # type: ignore[arg-type]
    content = DriverContent(CacheDriver())
    return build_tiers(cache_spec(), CacheConfig(tiers=tiers), content, fingerprint, 64 * MIB)


def test_disk_tier_is_on_where_there_is_a_folder(tmp_path: Path) -> None:
    built = build(tmp_path / "state" / "cache", disk_bytes=10 * MIB)
    assert built.tiers is not None
    assert built.tiers.index.disk.budget.num_bytes == 10 * MIB
    assert 0 < built.tiers.index.disk.budget.snapshot_bytes < 10 * MIB
    (folder,) = (tmp_path / "state" / "cache").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert "disk cache 10 MiB" in built.summary


def test_budgets_of_pages_and_snapshots_can_be_named(tmp_path: Path) -> None:
    built = build(tmp_path, disk_bytes=10 * MIB, disk_snapshot_bytes=MIB, host_bytes=2 * MIB, host_snapshot_bytes=0)
    assert built.tiers is not None
    assert built.tiers.index.disk.budget.page_bytes == 9 * MIB
    assert built.tiers.index.host.budget.page_bytes == 2 * MIB


@pytest.mark.parametrize("case", ["no folder", "size 0", "weights unknown"])
def test_without_disk_a_cpu_needs_no_colder_tier(case: str, tmp_path: Path) -> None:
    if case == "no folder":
        built = build(None)
    else:
        built = build(tmp_path, disk_bytes=0) if case == "size 0" else build(tmp_path, fingerprint=None)
    assert built == BuiltTiers(None, "no colder tier")
    assert not list(tmp_path.iterdir())


def test_without_prefix_caching_there_are_no_tiers(tmp_path: Path) -> None:
    cache = CacheConfig(prefix_caching=False, tiers=TierConfig(folder=str(tmp_path)))
    assert build_tiers(cache_spec(), cache, DriverContent(CacheDriver()), b"weights", MIB).tiers is None


def test_a_folder_in_use_is_a_notice(tmp_path: Path) -> None:
    first = build(tmp_path)
    second = build(tmp_path)
    assert first.tiers is not None
    assert not first.notices
    assert second.tiers is None
    assert "in use by another engine" in second.notices[0]


def test_a_file_in_place_of_the_folder_is_a_notice(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    assert "cannot be used" in build(tmp_path / "cache").notices[0]


def test_folders_of_other_models_make_room_unless_they_are_in_use(tmp_path: Path) -> None:
    used, old, shared, new, foreign = (tmp_path / name for name in ("a" * 32, "b" * 32, "c" * 32, "d" * 32, "foreign"))
    for folder in (used, old, shared, new, foreign):
        folder.mkdir()
        (folder / LOCK_NAME).touch()
        (folder / "record.pages").write_bytes(b"x" * MIB)
    (shared / "notes.txt").write_text("not ours")
    for path in [*used.iterdir(), *old.iterdir(), *shared.iterdir(), *foreign.iterdir()]:
        os.utime(path, (1, 1))
    held = lock_folder(used)
    built = build(tmp_path, disk_bytes=2 * MIB)
    assert "disk cache 2 MiB with 0.0 MiB in use, 2.0 MiB of it by other models" in built.summary
    assert not old.exists()
    assert [path.name for path in shared.iterdir()] == ["notes.txt"]
    for folder in (used, new, foreign):
        assert (folder / "record.pages").exists(), folder
    os.close(held)


def test_host_tier_is_sized_by_what_the_device_is() -> None:
    assert default_host_bytes(1 << 40, has_accelerator=False, has_disk=False) == 0
    assert default_host_bytes(64 * MIB, has_accelerator=False, has_disk=True) == 8 * MIB
    assert default_host_bytes(1 << 40, has_accelerator=False, has_disk=True) == 256 * MIB
    assert default_host_bytes(MIB, has_accelerator=True, has_disk=False) == MIB


def test_layout_digest_knows_weights_types_and_how_it_is_written() -> None:
    content = DriverContent(CacheDriver())
    digests = {
        layout_digest(cache_spec(), TierConfig(), content, b"weights"),
        layout_digest(cache_spec(), TierConfig(), content, b"other weights"),
        layout_digest(cache_spec(page_size=8), TierConfig(), content, b"weights"),
        layout_digest(cache_spec(), TierConfig(int8_snapshots=True), content, b"weights"),
    }
    content.describe = lambda: "other types"  # type: ignore[method-assign]
    digests.add(layout_digest(cache_spec(), TierConfig(), content, b"weights"))
    assert len(digests) == 5
