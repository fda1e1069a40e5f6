"""Loading safetensors: single files, shards, name spellings, dtypes, and errors that list every difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from turnkeep.models.catalog import find_model
from turnkeep.models.config import ModelConfig
from turnkeep.models.decoder import Decoder
from turnkeep.models.tiny import tiny_config
from turnkeep.models.weights import WeightsError, load_model, random_model, random_tensors

Tensors = dict[str, torch.Tensor]


def write_model(folder: Path, kind: Any, tensors: Tensors | None = None, **changes: Any) -> Tensors:
    values = tiny_config(kind) | changes
    tensors = random_tensors(ModelConfig.from_dict(values), 1) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return tensors


def assert_same_weights(model: Decoder, expected: Decoder) -> None:
    pairs = zip(model.named_parameters(), expected.named_parameters(), strict=True)
    assert [name for (name, ours), (_, wanted) in pairs if not torch.equal(ours, wanted)] == []


@pytest.mark.parametrize("kind", ["hybrid", "attention_only", "attention_free"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_file_loads(tmp_path: Path, kind: Any, dtype: str) -> None:
    write_model(tmp_path, kind)
    model = load_model(find_model(str(tmp_path)), dtype=dtype)
    assert_same_weights(model, random_model(ModelConfig.from_dict(tiny_config(kind)), 1, dtype=dtype))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def test_only_the_large_matrices_take_the_model_dtype(tmp_path: Path) -> None:
    write_model(tmp_path, "attention_free")
    model = load_model(find_model(str(tmp_path)), dtype=torch.bfloat16)
    kept = {name.split(".")[-1] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"A", "D", "dt_bias", "conv_weight", "conv_bias", "norm_weight"}


def test_shards_named_by_an_index_load(tmp_path: Path) -> None:
    tensors = write_model(tmp_path, "hybrid")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + index % 3}-of-00003.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
    steps: list[tuple[str, int, int]] = []
    model = load_model(find_model(str(tmp_path)), dtype="float32", progress=lambda *step: steps.append(step))
    assert_same_weights(model, random_model(ModelConfig.from_dict(tiny_config("hybrid")), 1))
    assert steps[-1] == ("weights", model.weight_bytes, model.weight_bytes)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.safetensors is missing"):
        load_model(find_model(str(tmp_path)), dtype="float32")
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}), encoding="utf-8")
    with pytest.raises(WeightsError, match="is not an index of safetensors files in its folder"):
        load_model(find_model(str(tmp_path)), dtype="float32")


def test_both_prefixes_of_nemotron_h_load_and_the_draft_head_is_kept_aside(tmp_path: Path) -> None:
    tensors = random_tensors(ModelConfig.from_dict(tiny_config("hybrid")), 1)
    renamed = {name.replace("backbone.", "model."): tensor for name, tensor in tensors.items()}
    renamed["mtp.layers.0.norm.weight"] = torch.ones(48)
    write_model(tmp_path, "hybrid", renamed)
    model = load_model(find_model(str(tmp_path)), dtype="float32")
    assert_same_weights(model, random_model(ModelConfig.from_dict(tiny_config("hybrid")), 1))


def test_a_tied_head_that_is_stored_again_must_equal_the_embedding(tmp_path: Path) -> None:
    tensors = random_tensors(ModelConfig.from_dict(tiny_config("attention_only")), 1)
    head = tensors["model.embed_tokens.weight"].clone()
    write_model(tmp_path, "attention_only", tensors | {"lm_head.weight": head})
    assert load_model(find_model(str(tmp_path)), dtype="float32").lm_head is None
    head[3, 3] += 1.0
    write_model(tmp_path, "attention_only", tensors | {"lm_head.weight": head})
    with pytest.raises(WeightsError, match="differs from the embedding, though tie_word_embeddings is set"):
        load_model(find_model(str(tmp_path)), dtype="float32")


def test_derived_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors(ModelConfig.from_dict(tiny_config("attention_only")), 1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    write_model(tmp_path, "attention_only", tensors)
    load_model(find_model(str(tmp_path)), dtype="float32")


def test_one_error_lists_missing_unexpected_and_misshapen_tensors(tmp_path: Path) -> None:
    tensors = random_tensors(ModelConfig.from_dict(tiny_config("hybrid")), 1)
    del tensors["backbone.layers.0.mixer.D"], tensors["lm_head.weight"]
    tensors["backbone.layers.9.mixer.D"] = torch.ones(6)
    tensors["backbone.layers.3.mixer.k_proj.weight"] = torch.ones(24, 47)
    tensors["backbone.layers.0.mixer.conv1d.weight"] = torch.ones(116, 4)
    write_model(tmp_path, "hybrid", tensors)
    with pytest.raises(WeightsError) as caught:
        load_model(find_model(str(tmp_path)), dtype="float32")
    error = caught.value
    assert set(error.missing) == {"backbone.layers.0.mixer.D", "lm_head.weight"}
    assert error.unexpected == ("backbone.layers.9.mixer.D",)
    assert set(error.misshapen) == {
        "backbone.layers.3.mixer.k_proj.weight: [24, 47] instead of [24, 48]",
        "backbone.layers.0.mixer.conv1d.weight: [116, 4] instead of [116, 1, 4]",
    }
    for name in (*error.missing, *error.unexpected, *error.misshapen):
        assert name in str(error)


def test_a_long_list_of_differences_is_cut_with_a_count(tmp_path: Path) -> None:
    write_model(tmp_path, "hybrid", {"x": torch.ones(1)})
    with pytest.raises(WeightsError, match=r"missing \(\d+\): .*, and \d+ more; unexpected \(1\): x"):
        load_model(find_model(str(tmp_path)), dtype="float32")


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    write_model(tmp_path, "hybrid")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no weights \(looked for model\.safetensors"):
        load_model(find_model(str(tmp_path)), dtype="float32")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    with pytest.raises(WeightsError, match=r"only pickled weights \(pytorch_model\.bin\).*can run any code"):
        load_model(find_model(str(tmp_path)), dtype="float32")


def test_damaged_and_quantised_files_are_refused(tmp_path: Path) -> None:
    tensors = write_model(tmp_path, "hybrid")
    narrow = tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}
    write_model(tmp_path, "hybrid", narrow)
    with pytest.raises(WeightsError, match=r"lm_head\.weight is stored as F8_E4M3; quantised"):
        load_model(find_model(str(tmp_path)), dtype="float32")
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(WeightsError, match="cannot be read as safetensors"):
        load_model(find_model(str(tmp_path)), dtype="float32")


def test_random_models_depend_on_the_seed_alone() -> None:
    config = ModelConfig.from_dict(tiny_config("hybrid"))
    first, again, other = (random_model(config, seed) for seed in (4, 4, 5))
    assert_same_weights(first, again)
    assert not torch.equal(first.embedding, other.embedding)


def test_a_dtype_that_models_cannot_have_is_refused() -> None:
    config = ModelConfig.from_dict(tiny_config("hybrid"))
    for dtype in ("int8", "nothing", torch.float64):
        with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16"):
            random_model(config, 1, dtype=dtype)
