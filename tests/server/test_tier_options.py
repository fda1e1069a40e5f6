"""Options of the colder tiers on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnkeep.cache.tiers.config import TierConfig
from turnkeep.server import cli


def tiers(*arguments: str) -> TierConfig:
    return cli.server_config(cli.make_parser().parse_args(["serve", *arguments])).engine.cache.tiers


def test_disk_tier_lies_in_the_state_folder_by_default(tmp_path: Path) -> None:
    assert tiers("--state-dir", str(tmp_path)) == TierConfig(folder=str(tmp_path / "cache"))


def test_sizes_are_given_whole_or_for_pages_and_snapshots() -> None:
    given = tiers("--state-dir", "s", "--host-cache", "1GiB", "--disk-cache", "3MiB:1MiB", "--int8-snapshots")
    assert given == TierConfig(
        host_bytes=1 << 30,
        disk_bytes=4 << 20,
        disk_snapshot_bytes=1 << 20,
        folder="s/cache",
        int8_snapshots=True,
    )
    assert tiers("--state-dir", "s", "--disk-cache", "0").disk_bytes == 0


@pytest.mark.parametrize("size", ["x", "1GiB:", ":1GiB", "-1"])
def test_a_wrong_size_is_wrong_usage(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.make_parser().parse_args(["serve", f"--disk-cache={size}"])
    assert left.value.code == 2
    assert "not a size" in capsys.readouterr().err


def test_with_redis_and_no_folder_asked_for_there_is_no_disk_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNKEEP_STATE_DIR")
    assert tiers("--redis-url", "redis://127.0.0.1:1/0").folder is None
    assert tiers("--redis-url", "redis://127.0.0.1:1/0", "--state-dir", "s").folder == "s/cache"
