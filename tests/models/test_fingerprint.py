"""The name of a model's weights changes with them."""

from __future__ import annotations

import os
from pathlib import Path

from turnkeep.models.fingerprint import model_fingerprint
from turnkeep.models.hf_folder import HFFolder


def make_model(folder: Path, weights: bytes = b"w" * 200_000, config: str = "{}") -> bytes:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(weights)
    os.utime(folder / "model.safetensors", (1, 1))
    return model_fingerprint(HFFolder("m", folder))


def test_equal_files_have_equal_fingerprints(tmp_path: Path) -> None:
    assert make_model(tmp_path / "a") == make_model(tmp_path / "b")


def test_config_weights_and_time_of_change_all_count(tmp_path: Path) -> None:
    first = make_model(tmp_path / "m")
    seen = {first, make_model(tmp_path / "m", config='{"x": 1}'), make_model(tmp_path / "m", b"w" * 199_999 + b"v")}
    seen.add(make_model(tmp_path / "m", b"w" * 200_001))
    make_model(tmp_path / "m")
    os.utime(tmp_path / "m" / "model.safetensors", (2, 2))
    seen.add(model_fingerprint(HFFolder("m", tmp_path / "m")))
    assert len(seen) == 5
