"""Small configurations in Hugging Face form, for tests of every room. Torch-free.

Sizes are odd on purpose: nothing may rely on powers of two, on one group, or on equal head counts.
"""

from __future__ import annotations

from typing import Any, Literal

TinyKind = Literal["hybrid", "attention_only", "attention_free"]

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


def tiny_config(kind: TinyKind) -> dict[str, Any]:
    """A fresh config dict: "hybrid" (Mamba-2, attention, MLP), "attention_only" (Llama), "attention_free".

    Raises ValueError for another kind.
    """
    if kind == "hybrid":
        return _NEMOTRON_H | {"hybrid_override_pattern": "M-M*-M*"}
    if kind == "attention_free":
        return _NEMOTRON_H | {"hybrid_override_pattern": "M-MM-"}
    if kind == "attention_only":
        return dict(_LLAMA)
    raise ValueError(f"no tiny configuration {kind!r} (known: hybrid, attention_only, attention_free)")
