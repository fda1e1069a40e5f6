"""Falcon-H1: attention and Mamba-2 side by side in every block, then a gated MLP, with a multiplier on every product.

Configuration and tensor names only. The multipliers are folded into the weights.
"""

from __future__ import annotations

from dataclasses import replace

from turnkeep.models.config import ConfigFields, Mamba2Config, ModelConfig, Multipliers
from turnkeep.models.mixer_fields import (
    in_blocks,
    read_block_mamba2,
    read_multiplier,
    read_multipliers,
    read_rotated_attention,
    read_silu_mlp,
)
from turnkeep.models.mixer_sources import BlockNames, LayerNames, block_weight_map
from turnkeep.models.weight_map import WeightMap

NAMES = BlockNames("input_layernorm", "pre_ff_layernorm", "final_layernorm", LayerNames(mlp="feed_forward."))


def _read_mamba2(fields: ConfigFields, hidden_size: int) -> Mamba2Config:
    mamba2 = replace(read_block_mamba2(fields, hidden_size), has_out_bias=fields.flag("projectors_bias", default=False))
    if not fields.flag("mamba_rms_norm", default=False):
        return replace(mamba2, output="gate")
    norm_first = fields.flag("mamba_norm_before_gate", default=True)
    return replace(mamba2, output="norm_then_gate" if norm_first else "gate_then_norm")


def _read_multipliers(fields: ConfigFields) -> Multipliers:
    gate, x, B, C, dt = read_multipliers(fields, "ssm_multipliers", 5)
    mlp_gate, mlp_down = read_multipliers(fields, "mlp_multipliers", 2)
    return Multipliers(
        embedding=read_multiplier(fields, "embedding_multiplier"),
        logits=read_multiplier(fields, "lm_head_multiplier"),
        attention_in=read_multiplier(fields, "attention_in_multiplier"),
        attention_out=read_multiplier(fields, "attention_out_multiplier"),
        key=read_multiplier(fields, "key_multiplier"),
        mamba2_in=read_multiplier(fields, "ssm_in_multiplier"),
        mamba2_out=read_multiplier(fields, "ssm_out_multiplier"),
        mamba2_parts=(gate, x, B, C, dt),
        mlp_gate=mlp_gate,
        mlp_down=mlp_down,
    )


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Falcon-H1 checkpoint. Raises ConfigError."""
    hidden_size = fields.integer("hidden_size")
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layer_kinds=in_blocks(["parallel"] * fields.integer("num_hidden_layers"), "mlp"),
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        residual_in_fp32=False,
        max_position_embeddings=fields.integer("max_position_embeddings", default=8192),
        mamba2=_read_mamba2(fields, hidden_size),
        attention=read_rotated_attention(fields, hidden_size),
        mlp=read_silu_mlp(fields),
        multipliers=_read_multipliers(fields),
    )


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Falcon-H1 checkpoint."""
    return block_weight_map(config, NAMES, ignored=(".mup_vector",))
