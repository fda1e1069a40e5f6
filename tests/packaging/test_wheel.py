"""The wheel holds exactly the code of the rooms, under the one name turnkeep, with the bundled model."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("cache", "clients", "engine", "kernels", "models", "scheduler", "server")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from what git tracks (a clone), not from what happens to lie in the folder."""
    source = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, tracked):
        origin, target = ROOT / name.decode(), source / name.decode()
        if not origin.exists() and not origin.is_symlink():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_symlink():
            target.symlink_to(origin.readlink())
        else:
            target.write_bytes(origin.read_bytes())
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        "-w",
        str(out),
        ".",
    ]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_holds_every_module_of_the_rooms(wheel_names: set[str]) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    expected = {f"turnkeep/{name}" for name in tracked if name.endswith(".py") and (ROOT / name).exists()}
    in_wheel = {name for name in wheel_names if name.endswith(".py")}
    assert in_wheel == expected | {"turnkeep/__init__.py"}


def test_wheel_holds_the_bundled_model_and_the_type_marker(wheel_names: set[str]) -> None:
    folder = "turnkeep/models/demo/"
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert folder + name in wheel_names
    assert "turnkeep/py.typed" in wheel_names


def test_wheel_installs_nothing_under_another_name(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"turnkeep"}
