"""Guards of the architecture: directions between rooms, links, torch-free rooms, sizes of files and functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKS = ROOT / "src" / "turnkeep"

# room -> rooms it may import from (besides itself)
ALLOWED = {
    "kernels": set(),
    "models": {"kernels"},
    "cache": {"kernels"},
    "scheduler": {"cache"},
    "engine": {"kernels", "models", "cache", "scheduler"},
    "server": {"models", "cache", "scheduler", "engine", "clients"},
    "clients": set(),
}
ROOMS = sorted(ALLOWED)
# The files of cache that hold tensors; nothing else there may reach a kernel.
CACHE_WITH_TENSORS = {"pool_content.py", "storage.py"}

TORCH_FREE = [
    "turnkeep",
    "turnkeep.cache.cache_manager",
    "turnkeep.scheduler.scheduler",
    "turnkeep.engine.handle",
    "turnkeep.engine.messages",
    "turnkeep.engine.config",
    "turnkeep.engine.loop",
    "turnkeep.engine.scripted",
    "turnkeep.models.catalog",
    "turnkeep.models.config",
]

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def room_files(room: str) -> list[Path]:
    return sorted(path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts)


def imported_modules(path: Path) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            found.append((node.lineno, node.module or ""))
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_imports_keep_the_direction_between_rooms(room: str) -> None:
    wrong = []
    for path in room_files(room):
        for line, module in imported_modules(path):
            parts = module.split(".")
            if parts[0] in ROOMS:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: bare import of {module}")
            if parts[0] != "turnkeep" or len(parts) < 2:
                continue
            target = parts[1]
            if target == room or target not in ROOMS:
                continue
            if target not in ALLOWED[room] or (room == "cache" and path.name not in CACHE_WITH_TENSORS):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_links_are_exactly_the_rooms() -> None:
    links = {path.name: path for path in LINKS.iterdir() if path.is_symlink()}
    assert sorted(links) == ROOMS
    for name, path in links.items():
        assert path.resolve() == ROOT / name
        assert not Path(path.readlink()).is_absolute()
        assert not (ROOT / name / "__init__.py").exists(), f"{name}/__init__.py would shadow other packages"


def test_every_room_has_code_in_git() -> None:
    for room in ROOMS:
        assert room_files(room), f"{room} is empty: a clone would lose the folder and the link would dangle"


def server_modules() -> list[str]:
    names = []
    for room in ("server", "clients", "scheduler"):
        for path in room_files(room):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(("turnkeep", *(part for part in parts if part != "__init__"))))
    return sorted(set(names))


def test_server_clients_and_scheduler_never_import_torch() -> None:
    modules = [*TORCH_FREE, *server_modules()]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    if name.endswith('__main__'):\n"
        "        continue\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def long_functions() -> list[str]:
    found = []
    for room in ROOMS:
        for path in room_files(room):
            # Triton kernels and argument parsers are exempt: splitting them hides more than it shows.
            if path.name in {"triton_kernel.py", "cli.py"}:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > MAX_FUNCTION_LINES:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    return found


def test_functions_and_files_stay_small() -> None:
    long_files = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for room in ROOMS
        for path in room_files(room)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    assert not long_files + long_functions(), "\n".join(long_files + long_functions())


def test_missing_links_give_a_clear_error(tmp_path: Path) -> None:
    package = tmp_path / "turnkeep"
    package.mkdir()
    (package / "__init__.py").write_text((LINKS / "__init__.py").read_text())
    result = subprocess.run(
        [sys.executable, "-c", "import turnkeep"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "symbolic links" in result.stderr
    assert "scheduler" in result.stderr
