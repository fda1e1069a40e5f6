"""Small random configurations of every model family, in Hugging Face form, and the reference model of the same weights.

Sizes are odd on purpose; each family has several configurations that switch on what its checkpoints may have.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_ATTENTION = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 14,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_LLAMA = _ATTENTION | {"model_type": "llama", "rope_theta": 10000.0}
_QWEN2 = _ATTENTION | {"model_type": "qwen2", "rope_theta": 10000.0}
_QWEN3 = _ATTENTION | {"model_type": "qwen3", "head_dim": 10, "rope_theta": 1000.0}
_GEMMA3 = _ATTENTION | {
    "model_type": "gemma3_text",
    "head_dim": 10,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 9,
    "query_pre_attn_scalar": 12,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
_MAMBA2_ONLY = {
    "model_type": "mamba2",
    "vocab_size": 89,
    "hidden_size": 40,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 10,
    "state_size": 14,
    "expand": 2,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GRANITE = (
    _ATTENTION
    | _MAMBA2
    | {
        "model_type": "granitemoehybrid",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
        "shared_intermediate_size": 52,
        "num_local_experts": 0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0625,
        "logits_scaling": 6.0,
        "tie_word_embeddings": True,
    }
)
_FALCON = (
    _ATTENTION
    | _MAMBA2
    | {
        "model_type": "falcon_h1",
        "mamba_d_ssm": 60,
        "mamba_d_head": 10,
        "rope_theta": 100000.0,
        "embedding_multiplier": 5.65,
        "lm_head_multiplier": 0.039,
        "attention_in_multiplier": 0.9,
        "attention_out_multiplier": 0.94,
        "key_multiplier": 0.39,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.24,
        "ssm_multipliers": [0.35, 0.5, 0.18, 0.7, 0.31],
        "mlp_multipliers": [0.88, 0.22],
    }
)
_BAMBA = _ATTENTION | _MAMBA2 | {"model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1]}
_LFM2 = {
    "model_type": "lfm2",
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "block_multiple_of": 8,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NEMOTRON = {
    "model_type": "nemotron_h",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "ssm_state_size": 14,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 36,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_DELTA = {
    "vocab_size": 89,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DELTA_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}
_TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "rms_norm_eps": 1e-6,  # as published; over more layers of random weights it leaves little of the tolerance
}
_NEXT = _DELTA | _DELTA_EXPERTS | {"model_type": "qwen3_next"}
_QWEN3_5 = _DELTA | {"model_type": "qwen3_5_text"}
_QWEN3_5_MOE = _DELTA | _DELTA_EXPERTS | {"model_type": "qwen3_5_moe_text"}

FAMILIES: dict[str, list[dict[str, Any]]] = {
    "llama": [
        _LLAMA,
        _LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE},
        _LLAMA | {"head_dim": 10, "num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True},
    ],
    "qwen2": [
        _QWEN2,
        _QWEN2 | {"tie_word_embeddings": True, "num_key_value_heads": 1, "rope_theta": 1000000.0},
        _QWEN2 | {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_parameters": LLAMA3_ROPE},
        _QWEN2 | {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    ],
    "qwen3": [
        _QWEN3,
        _QWEN3 | {"tie_word_embeddings": True, "num_key_value_heads": 1, "attention_bias": True},
        _QWEN3 | {"head_dim": 16, "num_key_value_heads": 6, "num_hidden_layers": 3},
    ],
    "gemma3_text": [
        _GEMMA3,
        _GEMMA3 | {"sliding_window": 1, "num_key_value_heads": 1, "attention_bias": True},
        _GEMMA3
        | {"sliding_window": 200, "tie_word_embeddings": False, "num_attention_heads": 4, "num_key_value_heads": 4},
    ],
    "mamba2": [
        _MAMBA2_ONLY,
        _MAMBA2_ONLY | {"n_groups": 1, "tie_word_embeddings": True, "use_bias": True, "residual_in_fp32": False},
        _MAMBA2_ONLY | {"use_conv_bias": False, "conv_kernel": 3, "chunk_size": 7, "time_step_limit": [0.05, 0.3]},
    ],
    "granitemoehybrid": [
        _GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 28},
        _GRANITE | {"position_embedding_type": "rope", "rope_theta": 10000.0, "attention_bias": True},
        _GRANITE | {"tie_word_embeddings": False, "mamba_proj_bias": True, "mamba_n_groups": 1},
        _GRANITE | {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "num_local_experts": 3},
    ],
    "falcon_h1": [
        _FALCON,
        _FALCON | {"mamba_rms_norm": True, "projectors_bias": True, "mamba_proj_bias": True, "attention_bias": True},
        _FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True},
        _FALCON | {"mamba_n_groups": 1, "mlp_bias": True, "ssm_multipliers": None, "mlp_multipliers": None},
    ],
    "bamba": [
        _BAMBA,
        _BAMBA | {"tie_word_embeddings": True, "mamba_n_groups": 1, "attention_bias": True, "mlp_bias": True},
        _BAMBA | {"mamba_proj_bias": True, "mamba_conv_bias": False, "attn_layer_indices": [0, 2]},
    ],
    "lfm2": [
        _LFM2,
        _LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "num_key_value_heads": 6},
        _LFM2 | {"tie_word_embeddings": False, "layer_types": ["conv"] * 2, "num_hidden_layers": 2},
    ],
    "qwen3_next": [
        _NEXT,
        _NEXT | {"mlp_only_layers": [0], "decoder_sparse_step": 2, "tie_word_embeddings": True, "attention_bias": True},
        _NEXT | _TWO_LAYERS | {"norm_topk_prob": False, "linear_num_key_heads": 6, "linear_conv_kernel_dim": 3},
    ],
    "qwen3_5_text": [
        _QWEN3_5,
        _QWEN3_5 | {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1, "head_dim": 24},
        _QWEN3_5 | _TWO_LAYERS | {"linear_num_key_heads": 1, "linear_num_value_heads": 5, "rope_parameters": None},
    ],
    "qwen3_5_moe_text": [
        _QWEN3_5_MOE,
        _QWEN3_5_MOE | _TWO_LAYERS | {"tie_word_embeddings": True, "num_experts_per_tok": 1},
        _QWEN3_5_MOE | _TWO_LAYERS | {"num_attention_heads": 3, "linear_conv_kernel_dim": 2, "num_experts": 4},
    ],
    "nemotron_h": [
        _NEMOTRON | {"hybrid_override_pattern": "ME*EM-"},
        _NEMOTRON | {"hybrid_override_pattern": "E*ME", "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
        _NEMOTRON | {"hybrid_override_pattern": "M*E", "moe_latent_size": 22, "mlp_bias": True, "n_routed_experts": 5},
        _NEMOTRON | {"hybrid_override_pattern": "-M*M", "tie_word_embeddings": True, "num_key_value_heads": 1},
    ],
}


def reference_model(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    """transformers' model of this configuration with exactly these weights, in float32."""
    with warnings.catch_warnings():
        # Imports of the reference library warn about optional packages.
        warnings.simplefilter("ignore")
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = {key: value for key, value in values.items() if key != "model_type" and value is not None}
        if values["model_type"] == "nemotron_h":
            # The reference clamps the step size at time_step_min, in its full forward only.
            fields["time_step_min"] = (fields.pop("time_step_limit", None) or (0.0, None))[0] or 1e-12
        config = AutoConfig.for_model(values["model_type"], **fields)
        # The default one for experts wants sizes that are multiples of 16 bytes.
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    if values["model_type"] == "nemotron_h":
        tensors = {name.replace("backbone.", "model.", 1): tensor for name, tensor in tensors.items()}
    if model.config.tie_word_embeddings:
        names = ("model.embed_tokens.weight", "model.embeddings.weight", "backbone.embeddings.weight")
        tensors = {**tensors, "lm_head.weight": next(tensors[name] for name in names if name in tensors)}
    model.load_state_dict(dict(tensors), strict=True)
    return model.float().eval()
