"""Small configurations in Hugging Face form, for tests of every room. Torch-free.

Sizes are odd on purpose: nothing may rely on powers of two, on one group, or on equal head counts.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

TinyKind = Literal[
    "hybrid", "attention_only", "attention_free", "sliding", "short_conv", "parallel", "experts", "gated_delta"
]

_NEMOTRON_H: dict[str, Any] = {
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
    "time_step_limit": [0.0, None],
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rms_norm_eps": 1e-5,
    "sliding_window": 9,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 10,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "block_multiple_of": 8,
    "layer_types": ["conv", "full_attention", "conv"],
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_FALCON_H1: dict[str, Any] = {
    "model_type": "falcon_h1",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "mamba_d_ssm": 60,
    "mamba_n_heads": 6,
    "mamba_d_head": 10,
    "mamba_d_state": 14,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 36,
}

_QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 76,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_config(kind: TinyKind) -> dict[str, Any]:
    """A fresh config dict: "hybrid" (Mamba-2, attention, MLP), "attention_only" (Llama), "attention_free", "sliding"
    (Gemma 3: attention that mostly slides), "short_conv" (LFM2: short convolutions and attention), "parallel"
    (Falcon-H1: attention beside Mamba-2), "experts" (Mamba-2, attention, mixture of experts), "gated_delta" (gated
    delta nets and gated attention).

    Raises ValueError for another kind.
    """
    if kind == "hybrid":
        return _NEMOTRON_H | {"hybrid_override_pattern": "M-M*-M*"}
    if kind == "attention_free":
        return _NEMOTRON_H | {"hybrid_override_pattern": "M-MM-"}
    if kind == "attention_only":
        return dict(_LLAMA)
    if kind == "sliding":
        return dict(_GEMMA3)
    if kind == "short_conv":
        return dict(_LFM2)
    if kind == "parallel":
        return dict(_FALCON_H1)
    if kind == "gated_delta":
        return dict(_QWEN3_5)
    if kind == "experts":
        return _NEMOTRON_H | _EXPERTS | {"hybrid_override_pattern": "ME*E"}
    raise ValueError(f"no tiny configuration {kind!r} (known: {', '.join(get_args(TinyKind))})")
