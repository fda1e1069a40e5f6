"""Ids of the hub, with a stand-in for the package that downloads: nothing here uses the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnkeep.models.catalog import ModelNotFound, find_model
from turnkeep.models.hub import fetch_model, is_hub_id
from turnkeep.models.tiny import tiny_config
from turnkeep.server import cli


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """A hub with one model, "someone/small"; returns what was asked of it."""
    folder = tmp_path / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny_config("hybrid")), encoding="utf-8")
    (tmp_path / "empty").mkdir()
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "someone/empty":
            return str(tmp_path / "empty")
        if name != "someone/small":
            raise OSError("401 Client Error: repository not found")
        return str(folder)

    module = ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked


def test_an_id_becomes_a_folder_without_code_and_pickled_weights(hub: Any) -> None:
    folder = fetch_model("someone/small")
    assert find_model(str(folder)).config_dict() == tiny_config("hybrid")
    ((name, patterns),) = hub
    assert name == "someone/small"
    assert not {"*.py", "*.bin", "*.pt", "*"} & set(patterns)


def test_what_cannot_be_had_is_a_model_that_was_not_found(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"'someone/other' cannot be had: 401 .*not found"):
        fetch_model("someone/other")
    with pytest.raises(ModelNotFound, match=r"'someone/empty' has no config\.json"):
        fetch_model("someone/empty")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match=r"needs the package huggingface_hub: pip install 'turnkeep\[hub\]'"):
        fetch_model("someone/small")


def test_only_an_owner_and_a_name_that_are_no_path_are_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_id("ibm-granite/granite-4.0-h-tiny")
    for name in ("demo", "./a/b", "/a/b", "a/b/c", "../b", "a/", "~/b"):
        assert not is_hub_id(name)
    (tmp_path / "models" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("models/here")


def test_the_command_line_goes_to_the_hub_only_when_it_is_allowed(hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "someone/small"]) == 1
    assert "--allow-hub" in capsys.readouterr().err
    assert hub == []
    assert cli.main(["inspect", "someone/small", "--allow-hub", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "nemotron_h"
    options = cli.make_parser().parse_args(["serve", "someone/small", "--allow-hub"])
    config = cli.server_config(options)
    assert config.served_model_names == ("someone/small",)
    assert Path(config.engine.model).name == "0123abcd"
