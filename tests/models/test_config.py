"""Reading configurations: both spellings of the layer types, derived sizes, and errors that name the field."""

from __future__ import annotations

import json
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Any, get_args

import pytest
from model_families import FAMILIES

from turnkeep.models import catalog
from turnkeep.models.config import ConfigError, ModelConfig, RopeConfig
from turnkeep.models.registry import MODEL_TYPES
from turnkeep.models.tiny import TinyKind, tiny_config


def changed(kind: Any, **changes: Any) -> dict[str, Any]:
    """A tiny config with fields replaced; a field set to None counts as missing."""
    return tiny_config(kind) | changes


@pytest.mark.parametrize(
    "layers",
    [
        {"hybrid_override_pattern": "M-*M"},
        {"layers_block_type": ["mamba", "mlp", "attention", "mamba"]},
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
        {"layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
    ],
)
def test_every_spelling_of_the_layer_types_is_read(layers: dict[str, Any]) -> None:
    values = changed("hybrid", hybrid_override_pattern=None) | layers
    config = ModelConfig.from_dict(values)
    assert config.layer_kinds == ("mamba2", "mlp", "attention", "mamba2")
    assert (config.num_attention_layers, config.num_recurrent_layers) == (1, 2)


def test_a_hybrid_config_has_the_sizes_of_its_pools() -> None:
    config = ModelConfig.from_dict(tiny_config("hybrid"))
    assert (config.num_kv_heads, config.head_dim) == (2, 12)
    assert config.mamba2 is not None
    assert config.mamba2.dt_limit == (0.0, inf)
    assert config.state_parts() == (
        ("conv", 3, (6 * 10 + 2 * 2 * 14, 3), "float32"),
        ("ssm", 3, (6, 10, 14), "float32"),
    )


def test_an_attention_only_config_has_two_layers_a_block_and_no_state() -> None:
    config = ModelConfig.from_dict(tiny_config("attention_only"))
    assert config.layer_kinds == ("attention", "mlp", "attention", "mlp")
    assert config.state_parts() == ()
    assert config.head_dim == 8


def test_an_attention_free_config_needs_no_attention_fields() -> None:
    values = {key: value for key, value in tiny_config("attention_free").items() if "attention" not in key}
    config = ModelConfig.from_dict({key: value for key, value in values.items() if key != "head_dim"})
    assert (config.attention, config.num_kv_heads, config.head_dim, config.num_attention_layers) == (None, 0, 0, 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope_theta": 5000.0}, RopeConfig(5000.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(7.0)),
        (
            {
                "rope_theta": 9.0,
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 64,
                },
            },
            RopeConfig(9.0, llama3=(8.0, 1.0, 4.0, 64)),
        ),
    ],
)
def test_both_layouts_of_the_rotary_fields_are_read(fields: dict[str, Any], expected: RopeConfig) -> None:
    config = ModelConfig.from_dict(changed("attention_only", rope_theta=None) | fields)
    assert config.attention is not None
    assert config.attention.rope == expected


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("hybrid", {"model_type": None}, "no model_type"),
        ("hybrid", {"model_type": "rwkv"}, "'rwkv' is not supported.*llama, mamba2, nemotron_h"),
        ("hybrid", {"hidden_size": None}, "'hidden_size' is missing"),
        ("hybrid", {"hidden_size": "48"}, "'hidden_size' must be an integer"),
        ("hybrid", {"hidden_size": 0}, "'hidden_size' must be an integer of at least 1"),
        ("hybrid", {"vocab_size": True}, "'vocab_size' must be an integer"),
        ("hybrid", {"hybrid_override_pattern": None}, "'layers_block_type'.*is missing"),
        ("hybrid", {"hybrid_override_pattern": "M?"}, "layer 1 has the unknown type '\\?'"),
        ("hybrid", {"hybrid_override_pattern": "M-E"}, "'n_routed_experts' is missing"),
        ("hybrid", {"layers_block_type": 7}, "must be a list of names or a pattern"),
        ("hybrid", {"num_hidden_layers": 3}, "num_hidden_layers = 3 but 7 layer types"),
        ("hybrid", {"n_groups": 4}, "mamba_num_heads = 6 is not a multiple of n_groups = 4"),
        ("hybrid", {"num_key_value_heads": 4}, "num_attention_heads = 6 is not a multiple"),
        ("hybrid", {"time_step_limit": [1.0]}, "'time_step_limit' must be two numbers"),
        ("hybrid", {"time_step_limit": [2.0, 1.0]}, "'time_step_limit' must be an interval"),
        ("hybrid", {"mlp_hidden_act": "gelu"}, "mlp_hidden_act = 'gelu' is not supported"),
        ("hybrid", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act = 'gelu' is not supported"),
        ("hybrid", {"sliding_window": 128}, "sliding_window is not supported"),
        ("hybrid", {"tie_word_embeddings": "no"}, "'tie_word_embeddings' must be true or false"),
        ("hybrid", {"layer_norm_epsilon": -1e-5}, "'layer_norm_epsilon' must be a positive number"),
        ("attention_only", {"hidden_size": 50}, "hidden_size = 50 is not a multiple of num_attention_heads = 6"),
        ("attention_only", {"head_dim": 7}, "head_dim = 7 must be even"),
        ("attention_only", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ("attention_only", {"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
        ("attention_only", {"rope_scaling": {"type": "llama3"}}, "'factor' is missing"),
        ("attention_only", {"rope_scaling": "llama3"}, "rotary parameters must be an object"),
        ("attention_only", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_a_bad_config_is_an_error_that_names_the_field(kind: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(changed(kind, **changes))


def test_the_config_of_the_bundled_model_is_read() -> None:
    path = Path(catalog.__file__).parent / "demo" / "config.json"
    config = ModelConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    assert {"mamba2", "attention", "mlp"} == set(config.layer_kinds)
    assert config.mamba2 is not None
    assert config.mamba2.dt_limit == (0.0, inf)


def test_a_config_cannot_be_changed_after_it_was_read() -> None:
    config = ModelConfig.from_dict(tiny_config("hybrid"))
    with pytest.raises(AttributeError):
        config.hidden_size = 3  # type: ignore[misc]


def test_an_unknown_tiny_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="no tiny configuration 'large'"):
        tiny_config("large")  # type: ignore[arg-type]


def test_catalog_and_config_do_not_import_torch() -> None:
    code = (
        "import sys; import turnkeep.models.catalog, turnkeep.models.config, turnkeep.models.registry, "
        "turnkeep.models.tiny, turnkeep.models.weight_map; "
        "turnkeep.models.config.ModelConfig.from_dict(turnkeep.models.tiny.tiny_config('hybrid')); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": _source_folder()})


def _source_folder() -> str:
    import turnkeep

    assert turnkeep.__file__ is not None
    return str(turnkeep.__file__).removesuffix("/turnkeep/__init__.py")


def test_every_model_type_of_the_tiny_configurations_is_registered() -> None:
    kinds: tuple[Any, ...] = get_args(TinyKind)
    assert {tiny_config(kind)["model_type"] for kind in kinds} <= set(MODEL_TYPES)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"layer_types": ["full_attention", "chunked"]}, "layer 1 has the unknown type 'chunked'"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_window' is missing"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported"),
        ("gemma3_text", {"sliding_window": None}, "'sliding_window' is missing"),
        ("mamba2", {"num_heads": 7}, "7 heads of 10 do not make up 2 \\(expand\\) \\* 40"),
        ("mamba2", {"n_groups": 3}, "num_heads = 8 is not a multiple of n_groups = 3"),
        ("granitemoehybrid", {"layer_types": None}, "'layer_types' is missing"),
        ("granitemoehybrid", {"layer_types": ["mamba", "rnn"]}, "layer 1 has the unknown type 'rnn'"),
        ("granitemoehybrid", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 of 6 experts"),
        ("granitemoehybrid", {"residual_multiplier": "x"}, "'residual_multiplier' must be a number"),
        ("granitemoehybrid", {"logits_scaling": 0}, "'logits_scaling' must be a positive number"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "'ssm_multipliers' must be a list of 5 numbers"),
        ("falcon_h1", {"mamba_d_head": 7}, "6 heads of 7 do not make up an inner size of 60"),
        ("falcon_h1", {"mamba_n_groups": 4}, "mamba_n_heads = 6 is not a multiple of mamba_n_groups = 4"),
        ("bamba", {"attn_layer_indices": [9]}, "'attn_layer_indices' must list layers below 3"),
        ("bamba", {"num_attention_heads": 8, "num_key_value_heads": 8}, "must be a multiple of 4"),
        ("lfm2", {"layer_types": ["conv", "mamba"]}, "layer 1 has the unknown type 'mamba'"),
        ("lfm2", {"num_hidden_layers": 9}, "num_hidden_layers = 9 but 4 layer types"),
        ("nemotron_h", {"n_group": 3}, "8 experts cannot be ranked in 3 groups"),
        ("nemotron_h", {"n_group": 4, "num_experts_per_tok": 3}, "num_experts_per_tok = 3 of 1 of 4 groups"),
    ],
)
def test_a_bad_config_of_a_family_is_an_error_that_names_the_field(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(FAMILIES[family][0] | changes)


def test_both_spellings_of_lfm2_layers_and_of_its_mlp_size_are_read() -> None:
    values = FAMILIES["lfm2"][0]
    config = ModelConfig.from_dict(values)
    assert config.mlp is not None
    assert config.mlp.intermediate_size == 72  # 2 / 3 of 100 is 66, rounded up to a multiple of 8
    assert config.state_parts("float16", "bfloat16") == (("conv", 3, (48, 2), "bfloat16"),)
    old = {key: value for key, value in values.items() if key not in ("layer_types", "intermediate_size")}
    assert ModelConfig.from_dict(old | {"full_attn_idxs": [2], "block_ff_dim": 100}) == config


def test_a_parallel_layer_has_keys_and_a_state() -> None:
    config = ModelConfig.from_dict(FAMILIES["falcon_h1"][0])
    assert config.layer_kinds == ("parallel", "mlp", "parallel", "mlp")
    assert (config.num_attention_layers, config.num_recurrent_layers) == (2, 2)
    assert (config.kv_index(2), config.state_index(2)) == (1, 1)
