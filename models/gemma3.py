"""Gemma 3, text: attention that mostly slides, with norms before and after every mixer and two rotary bases.

Configuration and tensor names only. Norms are stored around 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnkeep.models.config import (
    AttentionConfig,
    ConfigFields,
    LayerKind,
    MLPConfig,
    ModelConfig,
    Multipliers,
    RopeConfig,
    SlidingConfig,
)
from turnkeep.models.mixer_fields import ATTENTION_NAMES, in_blocks, read_head_dim, read_rope, read_sequence_kinds
from turnkeep.models.mixer_sources import BlockNames, LayerNames, block_weight_map
from turnkeep.models.weight_map import WeightMap

NAMES = BlockNames(
    "input_layernorm",
    "pre_feedforward_layernorm",
    "norm",
    LayerNames(),
    sequence_post_norm="post_attention_layernorm",
    channel_post_norm="post_feedforward_layernorm",
)
REFUSED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


def _read_ropes(fields: ConfigFields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Rotary positions of the layers that see everything, and of those that slide."""
    parameters = fields.get("rope_parameters")
    if isinstance(parameters, Mapping) and "full_attention" in parameters:
        full, sliding = parameters["full_attention"], parameters.get("sliding_attention")
    else:
        full = fields.get("rope_scaling") or {}
        full = {"rope_theta": fields.number("rope_theta", default=1000000.0), **full}
        sliding = {"rope_theta": fields.number("rope_local_base_freq", default=10000.0)}
    own, local = (ConfigFields({"rope_parameters": values}, fields.model_type) for values in (full, sliding))
    return read_rope(own, head_dim, 1000000.0), read_rope(local, head_dim)


def _read_kinds(fields: ConfigFields) -> tuple[LayerKind, ...]:
    if fields.get("layer_types") is not None:
        return read_sequence_kinds(fields, ATTENTION_NAMES)
    pattern = fields.integer("sliding_window_pattern", default=6)
    num_layers = fields.integer("num_hidden_layers")
    return tuple("sliding" if (block + 1) % pattern else "attention" for block in range(num_layers))


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Gemma 3 text checkpoint. Raises ConfigError."""
    for name in REFUSED:
        if fields.get(name):
            raise fields.error(f"{name} = {fields.get(name)!r} is not supported")
    fields.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    hidden_size, kinds = fields.integer("hidden_size"), _read_kinds(fields)
    num_heads, num_kv_heads = fields.grouped_heads()
    head_dim = read_head_dim(fields, hidden_size, num_heads, is_rotated=True)
    full_rope, sliding_rope = _read_ropes(fields, head_dim)
    has_bias = fields.flag("attention_bias", default=False)
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layer_kinds=in_blocks(kinds, "mlp"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        residual_in_fp32=False,
        max_position_embeddings=fields.integer("max_position_embeddings", default=131072),
        mamba2=None,
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=full_rope,
            has_bias=has_bias,
            has_out_bias=has_bias,
            has_qk_norm=True,
            score_scale=fields.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        ),
        mlp=MLPConfig(fields.integer("intermediate_size"), "gelu_tanh", is_gated=True, has_bias=False),
        multipliers=Multipliers(embedding=hidden_size**0.5),
        sliding=SlidingConfig(fields.integer("sliding_window"), sliding_rope) if "sliding" in kinds else None,
        has_post_norms=True,
    )


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Gemma 3 text checkpoint."""
    plain = block_weight_map(config, NAMES)
    sources = {
        name: replace(source, change="plus_one") if name.endswith("norm_weight") else source
        for name, source in plain.sources.items()
    }
    return replace(plain, sources=sources)
