"""Where the command line keeps stored responses and conversations."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from turnkeep.server import cli
from turnkeep.server.config import ServerConfig


def options(*arguments: str) -> ServerConfig:
    return cli.server_config(cli.make_parser().parse_args(["serve", *arguments]))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TURNKEEP_STATE_DIR", "XDG_STATE_HOME", "TURNKEEP_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_state_lies_in_the_users_state_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / ".local" / "state" / "turnkeep"
    assert options().state_dir == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    assert options().state_dir == str(home / "xdg" / "turnkeep")
    monkeypatch.setenv("TURNKEEP_STATE_DIR", str(home / "mine"))
    assert options().state_dir == str(home / "mine")
    assert options("--state-dir", "given").state_dir == "given"


def test_a_home_that_cannot_be_used_means_memory_and_is_said(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    (home / ".local").write_text("a file")
    assert options().state_dir is None
    assert "will not survive a restart" in caplog.text


def test_with_redis_no_folder_is_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = options("--redis-url", "redis://127.0.0.1:1/0")
    assert (config.redis_url, config.state_dir) == ("redis://127.0.0.1:1/0", None)
    monkeypatch.setenv("TURNKEEP_REDIS_URL", "redis://127.0.0.1:2/0")
    assert options().redis_url == "redis://127.0.0.1:2/0"
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--state-dir", "FILE"), ("--redis-url", "http://127.0.0.1:1")])
def test_a_place_that_cannot_be_used_is_one_line(
    home: Path, arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / "taken"
    file.write_text("")
    name, value = arguments
    assert cli.main(["serve", "--port", "0", name, value.replace("FILE", str(file))]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("turnkeep: error: ")
    assert "taken" in lines[0] or "Redis URL" in lines[0]
