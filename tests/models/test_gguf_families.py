"""GGUF files of every family: written as llama.cpp's converter writes them, they give the model of the HF folder.

The names come from the gguf package's own tables, and the changes of the tensors from what its converter does.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES
from safetensors.torch import save_file

from turnkeep.models.catalog import ModelFilesError, find_model
from turnkeep.models.config import KINDS_WITH_KV, ModelConfig
from turnkeep.models.weights import WeightsError, load_model, random_tensors

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """A config without what GGUF files have no place for."""
    dropped = ("chunk_size", "mamba_chunk_size", "time_step_limit", "rope_scaling")
    return {key: value for key, value in values.items() if key not in dropped}


def falcon(values: dict[str, Any]) -> dict[str, Any]:
    return plain(values) | {"mamba_norm_before_gate": False}


def delta(values: dict[str, Any]) -> dict[str, Any]:
    """With norm_topk_prob as it is published: the file does not tell."""
    return plain(values) | ({"norm_topk_prob": True} if values["model_type"] == "qwen3_next" else {})


# The file holds neither the order of the layers nor the rotary base of those that slide: both are the family's.
GEMMA3 = FAMILIES["gemma3_text"][0] | {
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 10,
    "rope_parameters": {"full_attention": {"rope_theta": 5000.0}, "sliding_attention": {"rope_theta": 10000.0}},
}
# family -> (architecture, configurations)
FILES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "qwen2": ("qwen2", [plain(values) for values in FAMILIES["qwen2"][:2]]),
    "qwen3": ("qwen3", [plain(values) for values in FAMILIES["qwen3"]]),
    "gemma3_text": ("gemma3", [GEMMA3]),
    "mamba2": ("mamba2", [plain(values) for values in FAMILIES["mamba2"][:2]]),
    "granitemoehybrid": ("granitehybrid", [plain(values) for values in FAMILIES["granitemoehybrid"][:3]]),
    "falcon_h1": (
        "falcon-h1",
        [falcon(FAMILIES["falcon_h1"][0]), falcon(FAMILIES["falcon_h1"][3] | {"mlp_bias": False})],
    ),
    "lfm2": ("lfm2", [plain(values) for values in FAMILIES["lfm2"][:2]]),
    "qwen3_next": ("qwen3next", [delta(values) for values in (FAMILIES["qwen3_next"][0], FAMILIES["qwen3_next"][2])]),
    "qwen3_5_text": ("qwen35", [delta(values) for values in FAMILIES["qwen3_5_text"]]),
    "qwen3_5_moe_text": ("qwen35moe", [delta(values) for values in FAMILIES["qwen3_5_moe_text"]]),
    "nemotron_h": (
        "nemotron_h_moe",
        [plain(values) for values in FAMILIES["nemotron_h"][:3] if "n_group" not in values],
    ),
}
FILES["falcon_h1"][1].append(falcon(FAMILIES["falcon_h1"][3] | {"mlp_bias": False, "mamba_rms_norm": True}))
FILES["nemotron_h"][1][0]["hybrid_override_pattern"] = "ME*EM"
CASES = [(family, index) for family, (_, configs) in FILES.items() for index in range(len(configs))]
DENSE_NEMOTRON = plain(FAMILIES["nemotron_h"][0]) | {"hybrid_override_pattern": "M-*M-"}


def as_converted(values: dict[str, Any], tensors: Tensors) -> Tensors:
    """The tensors as the converter changes them, still under Hugging Face names."""
    family = values["model_type"]
    changed: Tensors = {}
    if family.startswith("qwen3_5"):
        tensors = {name: with_tiled_heads(values, name, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            changed[name] = -np.exp(tensor)[:, None]
        elif name.endswith((".D",)):
            changed[name] = tensor[:, None]
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            changed[name] = tensor.reshape(values.get("mamba_n_groups") or values["n_groups"], -1)
        elif name.endswith(("conv1d.weight", "conv.conv.weight")):
            changed[name] = tensor.squeeze(1)
        elif family == "granitemoehybrid" and any(f".{key}_proj." in name for key in "qk"):
            heads = values["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            changed[name] = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        elif name.endswith(("shared_mlp.input_linear.weight", "experts.gate_up_proj")):
            stem = name.replace("input_linear.weight", "").replace("experts.gate_up_proj", "experts.")
            gate, up = np.split(tensor, 2, axis=-2)
            changed |= {f"{stem}gate": gate, f"{stem}up": up}
        elif name.endswith("in_proj_qkvz.weight"):
            qkv, z = by_kind(values, tensor)
            stem = name.removesuffix("qkvz.weight")
            changed |= {f"{stem}qkv.weight": qkv, f"{stem}z.weight": z}
        elif has_norms_around_zero(family, name):
            changed[name] = tensor + 1
        else:
            changed[name] = multiplied(values, name, tensor) if family == "falcon_h1" else tensor
    return changed


def has_norms_around_zero(family: str, name: str) -> bool:
    if not name.endswith("norm.weight") or "linear_attn" in name:
        return False
    return family == "gemma3_text" or family.startswith(("qwen3_5", "qwen3_next"))


def by_kind(values: dict[str, Any], tensor: Array) -> tuple[Array, Array]:
    """Rows of the projection of Qwen3-Next, key head by key head, as q, k and v of all heads, and the gate."""
    keys, per_key = values["linear_num_key_heads"], values["linear_num_value_heads"] // values["linear_num_key_heads"]
    key_dim, inner = values["linear_key_head_dim"], per_key * values["linear_value_head_dim"]
    groups = np.split(tensor.reshape(keys, -1, tensor.shape[1]), np.cumsum([key_dim, key_dim, inner]), axis=1)
    q, k, v, z = (group.reshape(-1, tensor.shape[1]) for group in groups)
    return np.concatenate((q, k, v)), z


def with_tiled_heads(values: dict[str, Any], name: str, tensor: Array) -> Array:
    """A tensor of Qwen3.5 with its value heads as llama.cpp repeats key heads: 0, 1, .. again and again."""
    keys, heads = values["linear_num_key_heads"], values["linear_num_value_heads"]
    num_before = 2 * keys * values["linear_key_head_dim"]

    def tiled(part: Array) -> Array:
        grouped = part.reshape(keys, heads // keys, -1, *part.shape[1:])
        return np.ascontiguousarray(grouped.swapaxes(0, 1)).reshape(part.shape)

    if name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return tiled(tensor)
    if name.endswith(("in_proj_qkv.weight", "linear_attn.conv1d.weight")):
        return np.concatenate((tensor[:num_before], tiled(tensor[num_before:])))
    return tiled(tensor.T).T if name.endswith("linear_attn.out_proj.weight") else tensor


def multiplied(values: dict[str, Any], name: str, tensor: Array) -> Array:
    """A tensor of Falcon-H1 with the multipliers that the converter puts into it."""
    gate, down = values.get("mlp_multipliers") or (1.0, 1.0)
    attention_in = values["attention_in_multiplier"]
    if "mamba.in_proj.weight" in name:
        inner, groups = values["mamba_d_ssm"], values["mamba_n_groups"] * values["mamba_d_state"]
        rows = (inner, inner, groups, groups, values["mamba_n_heads"])
        factors = np.repeat(values.get("ssm_multipliers") or [1.0] * 5, rows).astype(np.float32)
        return np.asarray(tensor * values["ssm_in_multiplier"] * factors[:, None], dtype=np.float32)
    factor = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": values["key_multiplier"] * attention_in,
        "q_proj": attention_in,
        "v_proj": attention_in,
        "o_proj": values["attention_out_multiplier"],
        "out_proj": values["ssm_out_multiplier"],
        "lm_head": values["lm_head_multiplier"],
        "embed_tokens": values["embedding_multiplier"],
    }
    return tensor * np.float32(next((factor[key] for key in factor if f"{key}." in name), 1.0))


def stored_name(names: Any, name: str, has_experts: bool) -> str:
    """The name in the file, from the gguf package's table."""
    block = name.split(".layers.")[-1].split(".")[0]
    shared = "_shexp" if has_experts else ""
    special = {
        "shared_mlp.gate": f"ffn_gate{shared}.weight",
        "shared_mlp.up": f"ffn_up{shared}.weight",
        "shared_mlp.output_linear.weight": f"ffn_down{shared}.weight",
        "block_sparse_moe.experts.gate": "ffn_gate_exps.weight",
        "block_sparse_moe.experts.up": "ffn_up_exps.weight",
        "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
        "mlp.experts.gate": "ffn_gate_exps.weight",
        "mlp.experts.up": "ffn_up_exps.weight",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "mixer.experts.up_proj": "ffn_up_exps.weight",
        "mixer.experts.down_proj": "ffn_down_exps.weight",
    }
    for ending, stored in special.items():
        if name.endswith(ending):
            return f"blk.{block}.{stored}"
    # As the converter renames before it looks names up.
    name = name.replace("mamba.dt_bias", "mamba.dt_proj.bias").replace("mixer.dt_bias", "mixer.dt_proj.bias")
    name = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")
    for candidate in (name, name.replace("dt_proj.bias", "dt.bias")):
        stored = names.get_name(candidate, try_suffixes=(".weight", ".bias"))
        if stored is not None:
            return str(stored)
    raise AssertionError(f"the gguf package knows no {name}")


def write_metadata(writer: Any, values: dict[str, Any], config: ModelConfig) -> None:
    sequence = [kind for kind in config.layer_kinds if kind not in ("mlp", "moe")]
    blocks = list(config.layer_kinds) if values["model_type"] in ("nemotron_h", "mamba2") else sequence
    writer.add_block_count(len(blocks))
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(config.mlp.intermediate_size if config.mlp else 0)
    if config.attention:
        kv_heads = config.attention.num_kv_heads
        writer.add_head_count(config.attention.num_heads)
        has_kv = [kind in KINDS_WITH_KV for kind in blocks]
        writer.add_head_count_kv(kv_heads if all(has_kv) else [kv_heads if has else 0 for has in has_kv])
        writer.add_key_length(config.attention.head_dim)
        if config.attention.rope:
            writer.add_rope_freq_base(config.attention.rope.theta)
    if config.mamba2:
        writer.add_ssm_conv_kernel(config.mamba2.conv_width)
        writer.add_ssm_inner_size(config.mamba2.inner_size)
        writer.add_ssm_state_size(config.mamba2.state_size)
        writer.add_ssm_time_step_rank(config.mamba2.num_heads)
        writer.add_ssm_group_count(config.mamba2.num_groups)
    if config.gated_delta:
        writer.add_ssm_conv_kernel(config.gated_delta.conv_width)
        writer.add_ssm_inner_size(config.gated_delta.inner_size)
        writer.add_ssm_state_size(config.gated_delta.key_dim)
        writer.add_ssm_time_step_rank(config.gated_delta.num_value_heads)
        writer.add_ssm_group_count(config.gated_delta.num_key_heads)
        assert config.attention
        assert config.attention.rope
        writer.add_rope_dimension_count(config.attention.rope.rotary_dim)
    if config.sliding:
        writer.add_sliding_window(config.sliding.window)
    if config.short_conv:
        writer.add_shortconv_l_cache(config.short_conv.width)
    if config.moe:
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.num_chosen)
        writer.add_expert_feed_forward_length(config.moe.expert_size)
        writer.add_expert_weights_norm(config.moe.normalises)
        writer.add_expert_weights_scale(config.moe.weight_scale)
        if config.moe.shared:
            writer.add_expert_shared_feed_forward_length(config.moe.shared.intermediate_size)
        if config.moe.latent_size:
            writer.add_moe_latent_size(config.moe.latent_size)
    if values["model_type"] == "granitemoehybrid":
        writer.add_attention_scale(values["attention_multiplier"])
        writer.add_embedding_scale(values["embedding_multiplier"])
        writer.add_residual_scale(values["residual_multiplier"])
        writer.add_logit_scale(values["logits_scaling"])
        writer.add_rope_scaling_finetuned(values.get("position_embedding_type") == "rope")


def write_gguf(path: Path, architecture: str, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config = ModelConfig.from_dict(values)
    writer = gguf.GGUFWriter(path, architecture)
    write_metadata(writer, values, config)
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, len(config.layer_kinds))
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    for name, array in as_converted(values, arrays).items():
        writer.add_tensor(stored_name(names, name, config.moe is not None), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(model: Any, make_driver: Callable[..., Any]) -> torch.Tensor:
    tokens = random.Random(1).choices(range(model.config.vocab_size), k=40)
    logits: torch.Tensor = make_driver(model).step([(0, tokens)])[0]
    return logits


def assert_same_model(tmp_path: Path, architecture: str, values: dict[str, Any], make_driver: Any) -> None:
    tensors = random_tensors(ModelConfig.from_dict(values), 2)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    write_gguf(tmp_path / "model.gguf", architecture, values, tensors)
    expected = logits_of(load_model(find_model(str(folder)), dtype="float32"), make_driver)
    ours = logits_of(load_model(find_model(str(tmp_path / "model.gguf")), dtype="float32"), make_driver)
    # Norms around zero are stored plus one, which costs a last bit of each.
    torch.testing.assert_close(ours, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize(("family", "index"), CASES)
def test_a_gguf_file_gives_the_model_of_the_folder(
    tmp_path: Path, family: str, index: int, make_driver: Callable[..., Any]
) -> None:
    architecture, configs = FILES[family]
    assert_same_model(tmp_path, architecture, configs[index], make_driver)


def test_a_dense_nemotron_h_file_gives_the_model_of_the_folder(tmp_path: Path, make_driver: Any) -> None:
    assert_same_model(tmp_path, "nemotron_h", DENSE_NEMOTRON, make_driver)


def test_the_blocks_of_a_draft_head_are_left_out(tmp_path: Path) -> None:
    values = DENSE_NEMOTRON
    path = tmp_path / "model.gguf"
    tensors = random_tensors(ModelConfig.from_dict(values), 2)
    write_gguf(path, "nemotron_h", values, tensors)
    source = find_model(str(path))
    metadata = source.header.metadata  # type: ignore[attr-defined]
    metadata["nemotron_h.nextn_predict_layers"] = 1
    assert ModelConfig.from_dict(source.config_dict()).layer_kinds == ("mamba2", "mlp", "attention", "mamba2")
    assert not any(".layers.4." in name for name in source.tensor_names())  # type: ignore[attr-defined]


def test_a_tied_falcon_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    values = falcon(FAMILIES["falcon_h1"][2])
    write_gguf(tmp_path / "model.gguf", "falcon-h1", values, random_tensors(ModelConfig.from_dict(values), 2))
    with pytest.raises(ModelFilesError, match="lacks the multiplier of the logits"):
        find_model(str(tmp_path / "model.gguf")).config_dict()


def test_a_partly_rotated_granite_file_is_refused(tmp_path: Path) -> None:
    values = plain(FAMILIES["granitemoehybrid"][1])
    path = tmp_path / "model.gguf"
    write_gguf(path, "granitehybrid", values, random_tensors(ModelConfig.from_dict(values), 2))
    source = find_model(str(path))
    source.header.metadata["granitehybrid.rope.dimension_count"] = 4  # type: ignore[attr-defined]
    with pytest.raises(ModelFilesError, match="rotating a part of the head is not supported"):
        source.config_dict()


def test_a_missing_tensor_is_named_as_in_a_checkpoint(tmp_path: Path) -> None:
    values = plain(FAMILIES["mamba2"][0])
    tensors = random_tensors(ModelConfig.from_dict(values), 2)
    del tensors["backbone.layers.1.mixer.D"]
    write_gguf(tmp_path / "model.gguf", "mamba2", values, tensors)
    with pytest.raises(WeightsError, match=r"missing \(1\): backbone\.layers\.1\.mixer\.D"):
        load_model(find_model(str(tmp_path / "model.gguf")), dtype="float32")
