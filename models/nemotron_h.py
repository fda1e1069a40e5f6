"""Nemotron-H: Mamba-2, attention without rotary positions and squared-ReLU MLP layers, one mixer a layer.

Configuration and tensor names only, for both spellings of the layer types (`hybrid_override_pattern`, or a list in
`layers_block_type` / `layer_types`). The draft head's `mtp.*` tensors are known and kept aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from turnkeep.models.config import (
    AttentionConfig,
    ConfigFields,
    LayerKind,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
)
from turnkeep.models.weight_map import WeightMap, mixer_sources, one

LAYER_NAMES: dict[str, LayerKind] = {
    "M": "mamba2",
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "mlp": "mlp",
}
MOE_NAMES = ("E", "moe")


def read_layer_kinds(fields: ConfigFields) -> tuple[LayerKind, ...]:
    """The order of the layers, from a pattern string or from a list of layer type names."""
    layers = fields.get("layers_block_type", "layer_types", "hybrid_override_pattern")
    if layers is None:
        raise fields.error("field 'layers_block_type' (or 'hybrid_override_pattern') is missing")
    if not isinstance(layers, Sequence) or not layers:
        raise fields.error(f"the layer types must be a list of names or a pattern string, not {layers!r}")
    kinds: list[LayerKind] = []
    for position, name in enumerate(layers):
        if name in MOE_NAMES:
            raise fields.error(
                f"layer {position} is a mixture of experts, which is not supported yet: only the dense layers "
                "(Mamba-2, attention, MLP) have mixers"
            )
        if name not in LAYER_NAMES:
            raise fields.error(f"layer {position} has the unknown type {name!r} (known: {', '.join(LAYER_NAMES)})")
        kinds.append(LAYER_NAMES[name])
    num_layers = fields.get("num_hidden_layers")
    if num_layers is not None and num_layers != len(kinds):
        raise fields.error(f"num_hidden_layers = {num_layers} but {len(kinds)} layer types are listed")
    return tuple(kinds)


def _read_dt_limit(fields: ConfigFields) -> tuple[float, float]:
    # time_step_min and time_step_max only describe how dt_bias was initialised; the bound of the trained model is
    # time_step_limit. JSON has no infinity, so an upper limit may also be written as null or as text.
    limit: Any = fields.get("time_step_limit", "mamba_dt_limit")
    if limit is None:
        return 0.0, inf
    try:
        low, high = limit
        low, high = float(low), inf if high is None else float(high)
    except (TypeError, ValueError):
        raise fields.error(f"field 'time_step_limit' must be two numbers, not {limit!r}") from None
    if not 0.0 <= low < high:
        raise fields.error(f"field 'time_step_limit' must be an interval of positive numbers, not {limit!r}")
    return low, high


def _read_mamba2(fields: ConfigFields) -> Mamba2Config:
    fields.choice("mamba_hidden_act", ("silu", "swish"), "silu")
    num_heads, num_groups = fields.integer("mamba_num_heads"), fields.integer("n_groups", "mamba_n_groups", default=8)
    if num_heads % num_groups:
        raise fields.error(f"mamba_num_heads = {num_heads} is not a multiple of n_groups = {num_groups}")
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=fields.integer("mamba_head_dim"),
        state_size=fields.integer("ssm_state_size"),
        num_groups=num_groups,
        conv_width=fields.integer("conv_kernel", "mamba_d_conv", default=4, minimum=2),
        chunk_size=fields.integer("chunk_size", "mamba_chunk_size", default=128),
        dt_limit=_read_dt_limit(fields),
        has_conv_bias=fields.flag("use_conv_bias", "mamba_conv_bias", default=True),
        has_bias=fields.flag("use_bias", default=False),
    )


def _read_attention(fields: ConfigFields) -> AttentionConfig:
    if fields.get("sliding_window") is not None:
        raise fields.error("sliding_window is not supported: attention layers must see the whole context")
    num_heads, num_kv_heads = fields.grouped_heads()
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", "attention_head_dim"),
        rope=None,
        has_bias=fields.flag("attention_bias", default=False),
    )


def _read_mlp(fields: ConfigFields) -> MLPConfig:
    fields.choice("mlp_hidden_act", ("relu2",), "relu2")
    return MLPConfig(
        intermediate_size=fields.integer("intermediate_size"),
        activation="relu2",
        is_gated=False,
        has_bias=fields.flag("mlp_bias", default=False),
    )


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Nemotron-H checkpoint. Raises ConfigError."""
    kinds = read_layer_kinds(fields)
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layer_kinds=kinds,
        norm_eps=fields.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        residual_in_fp32=fields.flag("residual_in_fp32", default=False),
        max_position_embeddings=fields.integer("max_position_embeddings", default=4096),
        mamba2=_read_mamba2(fields) if "mamba2" in kinds else None,
        attention=_read_attention(fields) if "attention" in kinds else None,
        mlp=_read_mlp(fields) if "mlp" in kinds else None,
    )


def _canonical(name: str) -> str:
    # Published checkpoints say "backbone.", files saved by recent versions of transformers say "model.".
    return "backbone." + name.removeprefix("model.") if name.startswith("model.") else name


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Nemotron-H checkpoint."""
    hidden_size = config.hidden_size
    sources = {
        "embedding": one("backbone.embeddings.weight", config.vocab_size, hidden_size),
        "norm_weight": one("backbone.norm_f.weight", hidden_size),
    }
    for index in range(len(config.layer_kinds)):
        prefix = f"backbone.layers.{index}."
        sources[f"layers.{index}.norm_weight"] = one(f"{prefix}norm.weight", hidden_size)
        sources |= mixer_sources(index, f"{prefix}mixer.", config)
    if not config.tie_word_embeddings:
        sources["lm_head"] = one("lm_head.weight", config.vocab_size, hidden_size)
    return WeightMap(sources, _canonical, kept_aside=("mtp.",))
