"""Bamba: Mamba-2 blocks with some attention blocks between them, each with a gated MLP.

Configuration and tensor names only.
"""

from __future__ import annotations

from turnkeep.models.config import ConfigFields, LayerKind, ModelConfig
from turnkeep.models.mixer_fields import (
    in_blocks,
    read_block_mamba2,
    read_rotated_attention,
    read_silu_mlp,
    with_partial_rope,
)
from turnkeep.models.mixer_sources import BlockNames, LayerNames, block_weight_map
from turnkeep.models.weight_map import WeightMap

NAMES = BlockNames("input_layernorm", "pre_ff_layernorm", "final_layernorm", LayerNames(mlp="feed_forward."))


def _read_kinds(fields: ConfigFields) -> list[LayerKind]:
    num_layers, positions = fields.integer("num_hidden_layers"), fields.get("attn_layer_indices") or []
    if not isinstance(positions, list) or any(not isinstance(p, int) or not 0 <= p < num_layers for p in positions):
        raise fields.error(f"field 'attn_layer_indices' must list layers below {num_layers}, not {positions!r}")
    return ["attention" if position in positions else "mamba2" for position in range(num_layers)]


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Bamba checkpoint. Raises ConfigError."""
    hidden_size, kinds = fields.integer("hidden_size"), _read_kinds(fields)
    attention = None
    if "attention" in kinds:
        # The family rotates half of a head, and says so in its code rather than in its configs.
        parameters = fields.get("rope_parameters")
        plain = {key: value for key, value in (parameters or {}).items() if key != "partial_rotary_factor"}
        own = ConfigFields({**fields.values, "rope_parameters": plain or None}, fields.model_type)
        attention = read_rotated_attention(own, hidden_size)
        if attention.head_dim % 4:
            raise fields.error(f"head_dim = {attention.head_dim} must be a multiple of 4: half of it is rotated")
        attention = with_partial_rope(attention, attention.head_dim // 2)
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layer_kinds=in_blocks(kinds, "mlp"),
        norm_eps=fields.number("rms_norm_eps", default=1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        residual_in_fp32=False,
        max_position_embeddings=fields.integer("max_position_embeddings", default=262144),
        mamba2=read_block_mamba2(fields, hidden_size) if "mamba2" in kinds else None,
        attention=attention,
        mlp=read_silu_mlp(fields),
    )


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Bamba checkpoint."""
    return block_weight_map(config, NAMES)
