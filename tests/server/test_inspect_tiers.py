"""`turnkeep inspect` on colder tiers: of a running server over HTTP, and of a folder, as text and as JSON."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cache_driver import CacheDriver
from live_server import live_server, make_text_model
from scripted_engine import Script
from tier_driver import TieredDriver

from turnkeep.cache.tiers.record import TierBudget
from turnkeep.cache.tiers.shared_folder import LOCK_NAME, layout_folder, lock_folder
from turnkeep.server import cli
from turnkeep.server.inspect_tiers import ServerTiers, folder_tiers, server_tiers
from turnkeep.server.tier_options import FOLDER

LAYOUT = b"a layout".ljust(32)
PROMPT = list(range(100, 150))
ANSWER = list(range(200, 210))


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))


def written(base: Path, **options: Any) -> TieredDriver:
    """An engine that has had three conversations, of which one came back."""
    driver = TieredDriver(base, layout=LAYOUT, is_shared=True, num_pages=200, num_rows=40, **options)
    for salt in range(3):
        driver.turn([token + 1000 * salt for token in PROMPT], ANSWER, f"c{salt}", trunk=20, turn_start=50)
        driver.idle()
    driver.cache.clear()
    driver.settle_background()
    driver.open_brought([*(token + 2000 for token in PROMPT), *ANSWER, 1], "c2")
    return driver


def stats_of(driver: CacheDriver) -> tuple[dict[str, float], dict[str, float]]:
    stats = driver.cache.stats()
    return (
        {f"cache_{name}": value for name, value in stats.gauge_values().items()},
        {f"cache_{name}": value for name, value in stats.counter_values().items()},
    )


def test_report_says_what_each_tier_holds_and_did(tmp_path: Path) -> None:
    driver = written(tmp_path, host=TierBudget(0, 0), disk=TierBudget(1 << 20, 1500))
    report = server_tiers(*stats_of(driver))
    (disk,) = report.tiers
    assert disk.tier == "disk"
    assert (disk.page_budget_bytes, disk.snapshot_budget_bytes) == (1 << 20, 1500)
    files = list(layout_folder(tmp_path, LAYOUT).glob("*.*"))
    assert disk.page_bytes == sum(path.stat().st_size for path in files if path.suffix == ".pages")
    assert disk.snapshot_bytes == sum(path.stat().st_size for path in files if path.suffix == ".snapshot") <= 1500
    assert disk.num_page_records + disk.num_snapshot_records == len(files)
    assert (disk.num_hits, disk.num_hit_tokens) == (1, 59)
    assert disk.num_evicted > 0
    assert report.written_bytes >= disk.page_bytes
    assert report.read_bytes > 0
    assert report.loaded_bytes > 0
    assert (report.num_failed_loads, report.num_ignored_files) == (0, 0)


def test_a_server_without_tiers_has_an_empty_report() -> None:
    assert server_tiers(*stats_of(CacheDriver())) == ServerTiers((), 0, 0, 0, 0, 0, 0, 0, 0)


async def test_the_command_asks_a_running_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = written(tmp_path)
    gauges, counters = stats_of(driver)
    async with live_server(Script(), text_model=make_text_model(), api_keys=("secret",)) as server:
        real = server.engine._stats_now

        def with_tiers(**options: bool) -> Any:
            stats = real(**options)
            stats.gauges.update(gauges)
            stats.counters.update(counters)
            return stats

        monkeypatch.setattr(server.engine, "_stats_now", with_tiers)
        command = ["inspect", "--url", server.url]
        assert await asyncio.to_thread(cli.main, [*command, "--api-key", "secret"]) == 0
        text = capsys.readouterr().out
        for words in ("Colder tiers", "host", "disk", "1.0 GiB", "to disk", "Other models hold"):
            assert words in text
        monkeypatch.setenv("TURNKEEP_API_KEY", "secret")
        assert await asyncio.to_thread(cli.main, [*command, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert [tier["tier"] for tier in report["tiers"]] == ["host", "disk"]
        assert report["tiers"][0]["num_hits"] == 1
        monkeypatch.setenv("TURNKEEP_API_KEY", "wrong")
        assert await asyncio.to_thread(cli.main, command) == 1
        assert "401" in capsys.readouterr().err


def test_the_command_shows_what_lies_in_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    driver = written(state / FOLDER)
    before = {path: path.stat().st_mtime_ns for path in state.rglob("*")}
    other = state / FOLDER / ("0" * 32)
    other.mkdir()
    (other / LOCK_NAME).touch()
    (other / "record.pages").write_bytes(b"x" * 2048)
    os.utime(other / "record.pages", (1, 1))
    command = ["inspect", "demo", "--state-dir", str(state)]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "Layers by kind" in text
    for words in ("Disk cache in", LAYOUT.hex()[:12], "in use", "000000000000", "2.0 KiB"):
        assert words in text
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["disk_caches"]
    assert [layout["is_running"] for layout in found] == [True, False]
    assert found[0]["page_bytes"] == driver.tiers.index.disk.used_bytes["pages"]
    assert (found[1]["num_page_records"], found[1]["page_bytes"]) == (1, 2048)
    driver.tiers.close()
    assert not any(layout.is_running for layout in folder_tiers(state / FOLDER))
    assert before.items() <= {path: path.stat().st_mtime_ns for path in state.rglob("*")}.items() | {
        (state / FOLDER, before[state / FOLDER])
    }
    os.close(lock_folder(other, timeout_s=0.0))


def test_without_a_state_folder_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    monkeypatch.setenv("TURNKEEP_STATE_DIR", str(state))
    assert cli.main(["inspect", "demo"]) == 0
    assert "Disk cache" not in capsys.readouterr().out
    assert not state.exists()
