"""`turnkeep inspect`: sizes that equal those of the decoder and of its pools for every kind of model, text and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import save_file

from turnkeep.engine.config import EngineConfig
from turnkeep.engine.sizing import cache_spec
from turnkeep.models.catalog import find_model
from turnkeep.models.config import ModelConfig
from turnkeep.models.draft_heads.loading import random_draft_head, random_draft_tensors
from turnkeep.models.tiny import TinyKind, tiny_config
from turnkeep.models.weights import random_model
from turnkeep.server import cli
from turnkeep.server.inspect_model import ModelReport, inspect_model

MIB = 1024 * 1024


def write_model(folder: Path, values: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


def inspected(tmp_path: Path, kind: TinyKind, memory_bytes: int = 8 * MIB, **settings: Any) -> ModelReport:
    path = write_model(tmp_path / kind, tiny_config(kind))
    config = EngineConfig(model=path, **settings)
    return inspect_model(find_model(path), config, dtype="float32", memory_bytes=memory_bytes, lengths=(64, 500, 600))


@pytest.mark.parametrize("kind", get_args(TinyKind))
def test_the_report_has_the_sizes_of_the_decoder_and_of_its_pools(tmp_path: Path, kind: TinyKind) -> None:
    report = inspected(tmp_path, kind)
    config = ModelConfig.from_dict(tiny_config(kind))
    model = random_model(config, 1)
    assert report.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert report.weight_bytes == model.weight_bytes
    spec = cache_spec(config, report.page_size, "float32")
    assert report.kv_bytes_per_token * report.page_size == spec.bytes_per_page
    assert report.snapshot_bytes == spec.bytes_per_row
    groups = {group.kind: group for group in report.layers}
    assert {name: group.count for name, group in groups.items() if name != "embeddings"} == {
        name: config.layer_kinds.count(name) for name in config.layer_kinds
    }
    for field in ("num_parameters", "kv_bytes_per_token", "snapshot_bytes"):
        assert sum(getattr(group, field) for group in report.layers) == getattr(report, field)


def test_a_token_goes_through_the_chosen_experts_only(tmp_path: Path) -> None:
    report = inspected(tmp_path, "experts")
    idle = 2 * (6 - 2) * 2 * 20 * 48  # two layers, four experts idle, two matrices of 20 x 48 each
    assert report.num_parameters - report.num_active_parameters == idle
    dense = inspected(tmp_path, "hybrid")
    assert dense.num_parameters == dense.num_active_parameters


def test_conversations_fit_as_their_pages_and_snapshots_allow(tmp_path: Path) -> None:
    report = inspected(tmp_path, "hybrid")
    assert [fit.num_tokens for fit in report.fits] == [64, 500]  # 600 is longer than the model's limit of 512
    short, long = report.fits
    assert short.bytes_each == 64 * report.kv_bytes_per_token + 2 * report.snapshot_bytes
    assert long.bytes_each == 512 * report.kv_bytes_per_token + 2 * report.snapshot_bytes  # 32 whole pages
    for fit in report.fits:
        reserved = report.page_size * report.kv_bytes_per_token + 2 * report.snapshot_bytes
        assert fit.num_conversations == (8 * MIB - reserved) // fit.bytes_each > 0
    narrow = inspected(tmp_path, "hybrid", kv_dtype="bfloat16")
    assert narrow.kv_bytes_per_token * 2 == report.kv_bytes_per_token
    # States this small are outweighed by the inputs since the last grid line.
    assert inspected(tmp_path, "hybrid", state_dtype="float16").snapshot_bytes > report.snapshot_bytes
    assert inspected(tmp_path, "hybrid", memory_bytes=1).fits[0].num_conversations == 0


def test_a_draft_head_is_told_of_where_the_checkpoint_has_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tiny_config("hybrid") | {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "mlp"]}
    config = ModelConfig.from_dict(values)
    path = write_model(tmp_path / "plain", values)
    settings = {"config": EngineConfig(model=path), "dtype": "float32", "memory_bytes": 8 * MIB, "lengths": (64,)}
    assert inspect_model(find_model(path), **settings).draft_head is None  # type: ignore[arg-type]
    save_file(random_draft_tensors(config, 1), tmp_path / "plain" / "model.safetensors")
    head = inspect_model(find_model(path), **settings).draft_head  # type: ignore[arg-type]
    assert head is not None
    assert head.num_parameters == sum(parameter.numel() for parameter in random_draft_head(config, 1).parameters())
    assert (head.count, head.kv_bytes_per_token, head.snapshot_bytes) == (2, 2 * 2 * 12 * 4, 48 * 4)
    assert cli.main(["inspect", path, "--memory", "8MiB", "--dtype", "float32"]) == 0
    assert "A draft head of 2 layers" in capsys.readouterr().out


def test_the_command_prints_tables_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "small-model", tiny_config("experts"))
    assert cli.main(["inspect", path, "--memory", "8MiB", "--tokens", "100", "--dtype", "float32"]) == 0
    text = capsys.readouterr().out
    for words in ("small-model (nemotron_h)", "of them for each token", "mamba2", "moe", "What fits in 8.0 MiB", "100"):
        assert words in text
    command = ["inspect", path, "--json", "--state-dtype", "bfloat16", "--tokens", "7", "--tokens", "9"]
    assert cli.main([*command, "--memory", "1GiB"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model_type"], report["state_dtype"], report["memory_bytes"]) == ("nemotron_h", "bfloat16", 1 << 30)
    assert [fit["num_tokens"] for fit in report["fits"]] == [7, 9]
    assert {group["kind"] for group in report["layers"]} == {"embeddings", "mamba2", "moe", "attention"}


def test_a_model_that_cannot_be_served_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model(tmp_path / "strange", {"model_type": "rwkv"})
    assert cli.main(["inspect", path]) == 1
    assert "model type 'rwkv' is not supported" in capsys.readouterr().err
    assert cli.main(["inspect", str(tmp_path / "nothing")]) == 1
    assert "no model" in capsys.readouterr().err
