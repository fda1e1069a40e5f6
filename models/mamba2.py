"""Mamba-2: the attention-free family, one Mamba-2 mixer a layer. Configuration and tensor names only."""

from __future__ import annotations

from turnkeep.models.config import ConfigFields, LayerKind, Mamba2Config, ModelConfig
from turnkeep.models.mixer_fields import read_dt_limit
from turnkeep.models.mixer_sources import LayerNames, mixer_sources, outer_sources
from turnkeep.models.weight_map import WeightMap, one

NAMES = LayerNames(mamba2="mixer.")
# Nothing in a model without attention depends on positions; this only bounds what a request may ask for by default.
DEFAULT_MAX_POSITIONS = 1 << 20


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Mamba-2 checkpoint. Raises ConfigError."""
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    hidden_size, expand = fields.integer("hidden_size"), fields.integer("expand", default=2)
    head_dim = fields.integer("head_dim", default=64)
    num_heads, num_groups = fields.integer("num_heads"), fields.integer("n_groups", default=8)
    if num_heads * head_dim != expand * hidden_size:
        raise fields.error(f"{num_heads} heads of {head_dim} do not make up {expand} (expand) * {hidden_size}")
    if num_heads % num_groups:
        raise fields.error(f"num_heads = {num_heads} is not a multiple of n_groups = {num_groups}")
    has_bias = fields.flag("use_bias", default=False)
    kind: LayerKind = "mamba2"
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layer_kinds=(kind,) * fields.integer("num_hidden_layers"),
        norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        residual_in_fp32=fields.flag("residual_in_fp32", default=True),
        max_position_embeddings=fields.integer("max_position_embeddings", default=DEFAULT_MAX_POSITIONS),
        mamba2=Mamba2Config(
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=fields.integer("state_size", default=128),
            num_groups=num_groups,
            conv_width=fields.integer("conv_kernel", default=4, minimum=2),
            chunk_size=fields.integer("chunk_size", default=256),
            dt_limit=read_dt_limit(fields),
            has_conv_bias=fields.flag("use_conv_bias", default=True),
            has_bias=has_bias,
            has_out_bias=has_bias,
        ),
        attention=None,
        mlp=None,
    )


def _canonical(name: str) -> str:
    # The first published checkpoints say "embedding".
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Mamba-2 checkpoint."""
    sources = outer_sources(config, "backbone.embeddings.weight", "backbone.norm_f.weight")
    for index in range(len(config.layer_kinds)):
        prefix = f"backbone.layers.{index}."
        sources[f"layers.{index}.norm_weight"] = one(f"{prefix}norm.weight", config.hidden_size)
        sources |= mixer_sources(index, prefix, config, NAMES)
    return WeightMap(sources, _canonical)
