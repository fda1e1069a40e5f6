"""LFM2: gated short convolutions with some attention blocks between them, each with a gated MLP.

Configuration and tensor names only.
"""

from __future__ import annotations

from dataclasses import replace

from turnkeep.models.config import ConfigFields, LayerKind, MLPConfig, ModelConfig, ShortConvConfig
from turnkeep.models.mixer_fields import in_blocks, read_rotated_attention, read_sequence_kinds
from turnkeep.models.mixer_sources import BlockNames, LayerNames, block_weight_map
from turnkeep.models.weight_map import WeightMap

NAMES = BlockNames(
    "operator_norm",
    "ffn_norm",
    "embedding_norm",
    LayerNames(
        mlp="feed_forward.",
        mlp_up=("w1", "w3"),
        mlp_down="w2",
        attention_out="out_proj",
        q_norm="q_layernorm",
        k_norm="k_layernorm",
    ),
)
SEQUENCE_NAMES: dict[str, LayerKind] = {"conv": "short_conv", "full_attention": "attention"}


def _read_mlp_size(fields: ConfigFields) -> int:
    size = fields.integer("block_ff_dim", "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    # The size in the config is that of an MLP without gate: two thirds of it, scaled, rounded up to a multiple.
    size = int(fields.number("block_ffn_dim_multiplier", default=1.0) * int(2 * size / 3))
    multiple = fields.integer("block_multiple_of", default=256)
    return -(-size // multiple) * multiple


def _read_kinds(fields: ConfigFields) -> tuple[LayerKind, ...]:
    if fields.get("layer_types") is not None:
        return read_sequence_kinds(fields, SEQUENCE_NAMES)
    num_layers = fields.integer("num_hidden_layers")
    positions = fields.get("full_attn_idxs")
    positions = list(range(num_layers)) if positions is None else positions
    if not isinstance(positions, list) or any(not isinstance(p, int) or not 0 <= p < num_layers for p in positions):
        raise fields.error(f"field 'full_attn_idxs' must list layers below {num_layers}, not {positions!r}")
    return tuple("attention" if position in positions else "short_conv" for position in range(num_layers))


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of an LFM2 checkpoint. Raises ConfigError."""
    hidden_size, kinds = fields.integer("hidden_size"), _read_kinds(fields)
    attention = None
    if "attention" in kinds:
        plain = read_rotated_attention(fields, hidden_size, default_theta=1000000.0)
        attention = replace(plain, has_bias=False, has_out_bias=False, has_qk_norm=True)
    width, has_bias = fields.integer("conv_L_cache", default=3, minimum=2), fields.flag("conv_bias", default=False)
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layer_kinds=in_blocks(kinds, "mlp"),
        norm_eps=fields.number("norm_eps", default=1e-5),
        tie_word_embeddings=fields.flag("tie_embedding", "tie_word_embeddings", default=True),
        residual_in_fp32=False,
        max_position_embeddings=fields.integer("max_position_embeddings", default=128000),
        mamba2=None,
        attention=attention,
        mlp=MLPConfig(_read_mlp_size(fields), "silu", is_gated=True, has_bias=False),
        short_conv=ShortConvConfig(width, has_bias) if "short_conv" in kinds else None,
    )


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of an LFM2 checkpoint."""
    return block_weight_map(config, NAMES)
