"""What is read of a draft head: which layers a config tells of, whether a checkpoint has them, and refusals that say
what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import FAMILIES
from safetensors.torch import save_file

from turnkeep.models.catalog import find_model
from turnkeep.models.checkpoint_files import TensorsInMemory
from turnkeep.models.config import ConfigError, ModelConfig
from turnkeep.models.draft_heads.loading import (
    fill_draft_head,
    load_draft_head,
    quickest_dtype,
    random_draft_head,
    random_draft_tensors,
)
from turnkeep.models.draft_heads.presence import why_no_draft_head
from turnkeep.models.model_source import ModelFilesError
from turnkeep.models.tiny import tiny_config
from turnkeep.models.weights import WeightsError, load_model, random_tensors

HEAD = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "mlp"]}
HYBRID = tiny_config("hybrid") | HEAD
EXPERTS = tiny_config("experts") | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
NEXT, DENSE = FAMILIES["qwen3_next"][0], FAMILIES["qwen3_5_text"][0]


def write(folder: Path, values: dict[str, Any], tensors: dict[str, torch.Tensor], *, num_files: int = 1) -> Any:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors")
        return find_model(str(folder))
    files = {name: f"model-{index % num_files}.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    index = {"weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return find_model(str(folder))


def whole(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    config = ModelConfig.from_dict(values)
    return random_tensors(config, 1) | random_draft_tensors(config, 2)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        (HYBRID, ("attention", "mlp")),
        (EXPERTS, ("attention", "moe")),
        (HYBRID | {"num_nextn_predict_layers": 0}, ()),
        (HYBRID | {"mtp_layers_block_type": None}, ()),
        (HYBRID | {"mtp_layers_block_type": ["mamba", "mlp"]}, ()),
        (NEXT, ("attention", "moe")),
        (NEXT | {"mlp_only_layers": [0]}, ("attention", "mlp")),
        (NEXT | {"num_nextn_predict_layers": 0}, ()),
        (DENSE, ()),
        (DENSE | {"mtp_num_hidden_layers": 1}, ("attention", "mlp")),
        (tiny_config("attention_only"), ()),
    ],
)  # fmt: skip
def test_a_config_tells_the_layers_of_its_draft_head(values: dict[str, Any], kinds: tuple[str, ...]) -> None:
    config = ModelConfig.from_dict(values)
    assert config.draft_kinds == kinds
    assert config.num_draft_kv_layers == kinds.count("attention")


def test_sizes_that_only_the_draft_head_needs_are_read() -> None:
    config = ModelConfig.from_dict(tiny_config("attention_free") | HEAD)
    assert "attention" not in config.layer_kinds
    assert random_draft_head(config, 1).config.attention is not None


def test_an_unknown_layer_of_the_draft_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown type 'wave'"):
        ModelConfig.from_dict(HYBRID | {"mtp_layers_block_type": ["wave"]})


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_and_model_load_from_the_same_files(tmp_path: Path, num_files: int, dtype: str) -> None:
    source = write(tmp_path, HYBRID, whole(HYBRID), num_files=num_files)
    config = ModelConfig.from_dict(HYBRID)
    assert why_no_draft_head(source, config) is None
    load_model(source, dtype=dtype)
    expected = random_draft_head(config, 2, dtype=dtype)
    pairs = zip(load_draft_head(source, dtype=dtype).named_parameters(), expected.named_parameters(), strict=True)
    assert [name for (name, ours), (_, wanted) in pairs if not torch.equal(ours, wanted)] == []


def test_experts_of_the_head_may_be_stored_one_by_one(tmp_path: Path) -> None:
    tensors = whole(NEXT)
    prefix = "mtp.layers.0.mlp.experts."
    up, down = tensors.pop(f"{prefix}gate_up_proj"), tensors.pop(f"{prefix}down_proj")
    for expert in range(6):
        gate, rest = up[expert].chunk(2)
        tensors[f"{prefix}{expert}.gate_proj.weight"] = gate.contiguous()
        tensors[f"{prefix}{expert}.up_proj.weight"] = rest.contiguous()
        tensors[f"{prefix}{expert}.down_proj.weight"] = down[expert].contiguous()
    source = write(tmp_path, NEXT, tensors)
    assert why_no_draft_head(source, ModelConfig.from_dict(NEXT)) is None
    expected = random_draft_head(ModelConfig.from_dict(NEXT), 2)
    pairs = zip(load_draft_head(source, dtype="float32").parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(ours, wanted) for ours, wanted in pairs)


def test_a_checkpoint_saved_without_its_head_is_told_of_and_still_loads(tmp_path: Path) -> None:
    config = ModelConfig.from_dict(NEXT)
    source = write(tmp_path, NEXT, random_tensors(config, 1))
    reason = why_no_draft_head(source, config)
    assert reason is not None
    assert "the checkpoint has no draft head" in reason
    load_model(source, dtype="float32")
    with pytest.raises(WeightsError, match="tensors of the draft head are missing"):
        load_draft_head(source, dtype="float32")


def test_a_head_of_which_a_part_is_missing_names_the_part(tmp_path: Path) -> None:
    tensors = whole(HYBRID)
    del tensors["mtp.layers.1.final_layernorm.weight"]
    source = write(tmp_path, HYBRID, tensors)
    reason = why_no_draft_head(source, ModelConfig.from_dict(HYBRID))
    assert reason == "the checkpoint's draft head lacks 1 of its tensors: mtp.layers.1.final_layernorm.weight"


def test_a_model_type_without_heads_says_so(tmp_path: Path) -> None:
    values = tiny_config("attention_only")
    source = write(tmp_path, values, random_tensors(ModelConfig.from_dict(values), 1))
    reason = why_no_draft_head(source, ModelConfig.from_dict(values))
    assert reason is not None
    assert "'llama'" in reason
    with pytest.raises(WeightsError, match="tells of no draft head"):
        load_draft_head(source, dtype="float32")


def test_tensors_of_other_shapes_are_listed() -> None:
    config = ModelConfig.from_dict(HYBRID)
    tensors = random_draft_tensors(config, 1) | {"mtp.layers.0.enorm.weight": torch.ones(3)}
    with pytest.raises(WeightsError, match=r"enorm.weight: \[3\] instead of \[48\]"):
        fill_draft_head(config, TensorsInMemory(tensors), dtype="float32")


def test_weights_whose_names_cannot_be_read_name_the_file(tmp_path: Path) -> None:
    source = write(tmp_path, HYBRID, whole(HYBRID))
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0no json!")
    with pytest.raises(ModelFilesError, match=r"model\.safetensors cannot be read as safetensors"):
        why_no_draft_head(source, ModelConfig.from_dict(HYBRID))


def test_small_heads_draft_in_float32_and_large_ones_in_the_models_type() -> None:
    assert quickest_dtype(ModelConfig.from_dict(HYBRID), torch.bfloat16) == torch.float32
    assert (
        quickest_dtype(ModelConfig.from_dict(HYBRID | {"intermediate_size": 50_000}), torch.bfloat16) == torch.bfloat16
    )


def test_the_bundled_model_has_its_head() -> None:
    source = find_model("demo")
    assert why_no_draft_head(source, ModelConfig.from_dict(source.config_dict())) is None
