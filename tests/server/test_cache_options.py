"""Cache settings on the command line and in a file: the same names, the same rules."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from turnkeep.cache.config import CacheConfig, SnapshotPolicy
from turnkeep.server import cli
from turnkeep.server.config import ServerConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations of the servers that were started."""
    configs: list[ServerConfig] = []
    monkeypatch.setattr(cli, "run_serve", lambda options: configs.append(cli.server_config(options)))
    monkeypatch.setenv("TURNKEEP_STATE_DIR", "/nowhere")
    return configs


def cache_of(config: ServerConfig) -> CacheConfig:
    return msgspec.structs.replace(config.engine.cache, tiers=CacheConfig().tiers)


EVERYTHING = CacheConfig(
    prefix_caching=False,
    reuse_policy="per_request",
    max_num_turns=3,
    max_conversation_share=0.25,
    max_tenant_share=0.5,
    idle_ttl_s=60.0,
    max_retention_s=600.0,
    max_held_share=0.125,
    eviction_policy="lru",
    snapshots=SnapshotPolicy(
        template_boundaries=False,
        branch_snapshots=False,
        declared_boundaries=False,
        periodic_snapshot_interval=64,
        additional_snapshot_offsets_from_start=(128, 256),
        additional_snapshot_offsets_from_end=(0,),
    ),
)
TOML = """
port = 9000
max_running = 3

[cache]
prefix_caching = false
reuse_policy = "per_request"
max_num_turns = 3
max_conversation_share = 0.25
max_tenant_share = 0.5
idle_ttl_s = 60
max_retention_s = 600.0
max_held_share = 0.125
eviction_policy = "lru"

[cache.snapshots]
template_boundaries = false
branch_snapshots = false
declared_boundaries = false
periodic_snapshot_interval = 64
additional_snapshot_offsets_from_start = [128, 256]
additional_snapshot_offsets_from_end = [0]
"""
YAML = """
port: 9000
max_running: 3
cache:
  prefix_caching: false
  reuse_policy: per_request
  max_num_turns: 3
  max_conversation_share: 0.25
  max_tenant_share: 0.5
  idle_ttl_s: 60
  max_retention_s: 600.0
  max_held_share: 0.125
  eviction_policy: lru
  snapshots:
    template_boundaries: false
    branch_snapshots: false
    declared_boundaries: false
    periodic_snapshot_interval: 64
    additional_snapshot_offsets_from_start: [128, 256]
    additional_snapshot_offsets_from_end: [0]
"""


def test_without_options_the_settings_are_the_defaults(served: list[ServerConfig]) -> None:
    assert cli.main(["serve"]) == 0
    assert cache_of(served[0]) == CacheConfig()


def test_every_setting_has_an_option_of_its_name(served: list[ServerConfig]) -> None:
    arguments = (
        "--no-prefix-caching --reuse-policy per_request --max-num-turns 3 --eviction-policy lru "
        "--max-conversation-share 0.25 --max-tenant-share 0.5 --idle-ttl-s 60 --max-retention-s 600 "
        "--max-held-share 0.125 "
        "--no-template-boundaries --no-branch-snapshots --no-declared-boundaries --periodic-snapshot-interval 64 "
        "--additional-snapshot-offsets-from-start 128 --additional-snapshot-offsets-from-start 256 "
        "--additional-snapshot-offsets-from-end 0"
    )
    assert cli.main(["serve", *arguments.split()]) == 0
    assert cache_of(served[0]) == EVERYTHING


@pytest.mark.parametrize(("name", "text"), [("turnkeep.toml", TOML), ("turnkeep.yaml", YAML)])
def test_a_file_says_what_options_say(name: str, text: str, tmp_path: Path, served: list[ServerConfig]) -> None:
    (tmp_path / name).write_text(text)
    assert cli.main(["serve", "--config", str(tmp_path / name)]) == 0
    assert cache_of(served[0]) == EVERYTHING
    assert (served[0].port, served[0].engine.max_running) == (9000, 3)


def test_the_command_line_goes_before_the_file(tmp_path: Path, served: list[ServerConfig]) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(TOML)
    assert cli.main(["serve", "--config", str(path), "--port", "9001", "--prefix-caching"]) == 0
    assert served[0].port == 9001
    assert cache_of(served[0]).prefix_caching


@pytest.mark.parametrize(
    "text",
    [
        "periodic_snapshot_interval = 64.0",
        "periodic_snapshot_interval = true",
        "periodic_snapshot_interval = -1",
        'additional_snapshot_offsets_from_end = ["a"]',
        '[cache]\nreuse_policy = "always"',
    ],
)
def test_a_file_is_checked_like_the_command_line(
    text: str, tmp_path: Path, served: list[ServerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--config", str(path)])
    assert left.value.code == 2
    assert "usage:" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.toml", "port = ", "Invalid value"),
        ("a.yaml", "port: [", "not YAML"),
        ("a.yaml", "- 1", "settings by name"),
        ("a.toml", "additional_snapshot_offsets_from_start = [true]", "neither a number nor a text"),
        ("a.toml", "port = 2000-01-01", "neither a number nor a text"),
        ("a.toml", 'config = "b.toml"', "cannot name another"),
        ("a.toml", "snapshot_interval = 64", "no setting called snapshot_interval"),
        ("a.toml", "periodic_snapshot_interva = 64", "no setting called periodic_snapshot_interva"),
        ("a.toml", "help = true", "no setting called help"),
        ("a.toml", "port = [1, 2]", "port takes one value"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_in_one_line(
    name: str, text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert cli.main(["serve", "--config", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert reason in line


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--config", "missing.toml"]) == 1
    assert "missing.toml: No such file" in capsys.readouterr().err


def test_the_old_name_of_the_interval_warns_and_excludes_the_new_one(
    served: list[ServerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    old = ["--mamba-state-cache-interval", "128"]
    assert cli.main(["serve", *old]) == 0
    assert served[0].engine.cache.snapshots.periodic_snapshot_interval == 128
    assert "mamba_state_cache_interval is deprecated" in capsys.readouterr().err
    assert cli.main(["serve", *old, "--periodic-snapshot-interval", "0"]) == 1
    assert "only one of them" in capsys.readouterr().err


def test_an_offset_from_the_start_is_positive(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--additional-snapshot-offsets-from-start", "0"]) == 1
    assert "must be a whole number of at least 1" in capsys.readouterr().err
