"""What is particular to Qwen3-Next and Qwen3.5 checkpoints: order of rows, norms around 0, draft head, vision tower."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from model_families import FAMILIES

from turnkeep.models.checkpoint_files import TensorsInMemory
from turnkeep.models.config import ConfigError, ModelConfig
from turnkeep.models.decoder import Decoder
from turnkeep.models.weights import WeightsError, fill_decoder, random_tensors

NEXT = FAMILIES["qwen3_next"][0]
DENSE = FAMILIES["qwen3_5_text"][0]


def filled(values: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Decoder:
    return fill_decoder(ModelConfig.from_dict(values), TensorsInMemory(tensors), dtype="float32")


def test_layers_and_state_of_a_model() -> None:
    config = ModelConfig.from_dict(NEXT)
    assert config.layer_kinds == ("gated_delta", "moe") * 3 + ("attention", "moe")
    assert config.num_recurrent_layers == 3
    assert config.num_attention_layers == 1
    assert [(part.name, part.num_layers, part.shape) for part in config.state_parts()] == [
        ("conv", 3, (2 * 2 * 12 + 60, 3)),
        ("delta", 3, (6, 12, 10)),
    ]
    attention = config.attention
    assert attention is not None
    assert attention.has_gate
    assert attention.rope is not None
    assert attention.rope.rotary_dim == 4


def test_dense_layers_stand_between_those_with_experts() -> None:
    kinds = ModelConfig.from_dict(NEXT | {"mlp_only_layers": [3], "decoder_sparse_step": 2}).layer_kinds
    assert kinds[1::2] == ("mlp", "moe", "mlp", "mlp")


def test_rows_stored_by_key_head_are_put_kind_by_kind() -> None:
    tensors = random_tensors(ModelConfig.from_dict(NEXT), 1)
    model = filled(NEXT, tensors)
    # 2 key heads: q and k of 12 rows, then v and z of 3 value heads of 10 rows each.
    packed = tensors["model.layers.0.linear_attn.in_proj_qkvz.weight"].view(2, 12 + 12 + 30 + 30, 48)
    projected = dict(model.named_parameters())["layers.0.mixer.in_proj_weight"]
    assert torch.equal(projected[12:24], packed[1, :12])
    assert torch.equal(projected[24:36], packed[0, 12:24])
    assert torch.equal(projected[48 + 30 : 48 + 60], packed[1, 24:54])
    assert torch.equal(projected[108 : 108 + 30], packed[0, 54:])
    strengths = tensors["model.layers.0.linear_attn.in_proj_ba.weight"].view(2, 6, 48)
    assert torch.equal(projected[168:174], strengths[:, :3].reshape(6, 48))


def test_norms_around_zero_become_factors() -> None:
    tensors = random_tensors(ModelConfig.from_dict(DENSE), 2)
    parameters = dict(filled(DENSE, tensors).named_parameters())
    for name, stored in {
        "norm_weight": "model.norm.weight",
        "layers.0.norm_weight": "model.layers.0.input_layernorm.weight",
        "layers.6.mixer.q_norm_weight": "model.layers.3.self_attn.q_norm.weight",
    }.items():
        assert torch.equal(parameters[name], tensors[stored] + 1.0)
    heads = tensors["model.layers.0.linear_attn.norm.weight"]
    assert torch.equal(parameters["layers.0.mixer.norm_weight"], heads)


def test_draft_head_and_vision_tower_are_known_and_not_loaded() -> None:
    tensors = random_tensors(ModelConfig.from_dict(DENSE), 3)
    deeper = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    deeper |= {"mtp.fc.weight": torch.zeros(3), "model.visual.blocks.0.norm1.weight": torch.zeros(2)}
    text = {key: value for key, value in DENSE.items() if key not in ("model_type", "tie_word_embeddings")}
    whole = {"model_type": "qwen3_5", "text_config": text | {"model_type": "qwen3_5_text"}, "vision_config": {}}
    model, plain = filled(whole, deeper), filled(DENSE, tensors)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(ours, expected) for ours, expected in pairs)


def test_experts_may_be_stored_one_by_one() -> None:
    tensors = random_tensors(ModelConfig.from_dict(NEXT), 4)
    apart = dict(tensors)
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        up, down = apart.pop(f"{prefix}gate_up_proj"), apart.pop(f"{prefix}down_proj")
        for expert in range(6):
            gate, up_part = up[expert].chunk(2)
            apart[f"{prefix}{expert}.gate_proj.weight"] = gate.contiguous()
            apart[f"{prefix}{expert}.up_proj.weight"] = up_part.contiguous()
            apart[f"{prefix}{expert}.down_proj.weight"] = down[expert]
    pairs = zip(filled(NEXT, apart).parameters(), filled(NEXT, tensors).parameters(), strict=True)
    assert all(torch.equal(ours, expected) for ours, expected in pairs)


def test_an_unknown_tensor_beside_the_draft_head_is_reported() -> None:
    tensors = random_tensors(ModelConfig.from_dict(DENSE), 5) | {"model.layers.0.linear_attn.extra": torch.zeros(1)}
    with pytest.raises(WeightsError, match=r"unexpected \(1\): model.layers.0.linear_attn.extra"):
        filled(DENSE, tensors)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (NEXT | {"linear_num_value_heads": 5}, "linear_num_value_heads = 5 is not a multiple"),
        (NEXT | {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 of 6"),
        (NEXT | {"mlp_only_layers": 3}, "mlp_only_layers"),
        (NEXT | {"layer_types": ["linear_attention"]}, "num_hidden_layers = 4 but 1"),
        (NEXT | {"layer_types": ["mamba"] * 4}, "unknown type 'mamba'"),
        (NEXT | {"rope_parameters": {"partial_rotary_factor": 0.2}}, "rotates 3 of the 16"),
        (NEXT | {"rope_parameters": {"partial_rotary_factor": 2}}, "rotates 32 of the 16"),
        (NEXT | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        (NEXT | {"rope_parameters": [1]}, "must be an object"),
        (NEXT | {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"model_type": "qwen3_5", "text_config": "text"}, "text_config"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig.from_dict(values)
