"""Llama and what shares its shape (SmolLM2): attention with rotary positions and a gated MLP in every block.

Configuration and tensor names only. A block is two layers of the decoder: attention, then MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnkeep.models.config import AttentionConfig, ConfigFields, LayerKind, ModelConfig, SlidingConfig
from turnkeep.models.mixer_fields import in_blocks, read_rotated_attention, read_silu_mlp
from turnkeep.models.mixer_sources import BlockNames, LayerNames, block_weight_map
from turnkeep.models.weight_map import WeightMap

NAMES = BlockNames("input_layernorm", "post_attention_layernorm", "norm", LayerNames())


def read_attention_blocks(
    fields: ConfigFields, attention: AttentionConfig, kinds: Sequence[LayerKind] | None = None
) -> ModelConfig:
    """A decoder of blocks of this attention and a gated MLP; `kinds` says which blocks slide. Raises ConfigError."""
    if kinds is None:
        kinds = ["attention"] * fields.integer("num_hidden_layers")
    slides = "sliding" in kinds
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layer_kinds=in_blocks(kinds, "mlp"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        residual_in_fp32=False,
        max_position_embeddings=fields.integer("max_position_embeddings", default=2048),
        mamba2=None,
        attention=attention,
        mlp=read_silu_mlp(fields),
        sliding=SlidingConfig(fields.integer("sliding_window"), attention.rope) if slides else None,
    )


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Llama checkpoint. Raises ConfigError."""
    return read_attention_blocks(fields, read_rotated_attention(fields, fields.integer("hidden_size")))


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Llama checkpoint."""
    return block_weight_map(config, NAMES, ignored=(".rotary_emb.inv_freq",))
