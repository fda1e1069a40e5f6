"""Reading of the config fields that several families spell alike: rotary positions, Mamba-2 sizes, layer types.

Torch-free. Raises ConfigError naming the field, like `ConfigFields` itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any, Literal

from turnkeep.models.config import (
    AttentionConfig,
    ConfigFields,
    LayerKind,
    Mamba2Config,
    MLPConfig,
    RopeConfig,
)

SEQUENCE_NAMES: dict[str, LayerKind] = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
}


def read_rope(fields: ConfigFields, head_dim: int, default_theta: float = 10000.0) -> RopeConfig:
    """Rotary parameters from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
    parameters = fields.get("rope_parameters", "rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise fields.error(f"the rotary parameters must be an object, not {parameters!r}")
    rope = ConfigFields({"rope_theta": fields.get("rope_theta"), **parameters}, fields.model_type)
    theta = rope.number("rope_theta", default=default_theta)
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.error("partial_rotary_factor is not supported: the whole head must be rotated")
    kind = rope.get("rope_type", "type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "llama3":
        scaling = (rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor"))
        return RopeConfig(theta, llama3=(*scaling, rope.integer("original_max_position_embeddings")))
    if kind == "divisors":
        divisors = tuple(float(value) for value in rope.get("divisors") or ())
        if len(divisors) != head_dim // 2:
            raise fields.error(f"{len(divisors)} rotary divisors for a head of {head_dim}: {head_dim // 2} are needed")
        return RopeConfig(theta, divisors=divisors)
    raise fields.error(f"rope type {kind!r} is not supported (supported: default, llama3)")


def read_head_dim(fields: ConfigFields, hidden_size: int, num_heads: int, *, is_rotated: bool) -> int:
    """Width of a head: `head_dim`, else hidden_size / num_attention_heads."""
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error(f"hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}")
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    if is_rotated and head_dim % 2:
        raise fields.error(f"head_dim = {head_dim} must be even to be rotated")
    return head_dim


def read_rotated_attention(fields: ConfigFields, hidden_size: int, default_theta: float = 10000.0) -> AttentionConfig:
    """Attention whose heads are rotated whole, with biases where `attention_bias` is set."""
    num_heads, num_kv_heads = fields.grouped_heads()
    head_dim = read_head_dim(fields, hidden_size, num_heads, is_rotated=True)
    has_bias = fields.flag("attention_bias", default=False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=read_rope(fields, head_dim, default_theta),
        has_bias=has_bias,
        has_out_bias=has_bias,
    )


ATTENTION_NAMES: dict[str, LayerKind] = {"full_attention": "attention", "sliding_attention": "sliding"}


def read_attention_kinds(fields: ConfigFields) -> tuple[LayerKind, ...]:
    """Which blocks see the whole context and which the last tokens, as Qwen2 and Qwen3 spell it."""
    if fields.get("layer_types") is not None:
        return read_sequence_kinds(fields, ATTENTION_NAMES)
    num_layers = fields.integer("num_hidden_layers")
    num_full = fields.integer("max_window_layers", default=28, minimum=0)
    slides = fields.flag("use_sliding_window", default=False) and fields.get("sliding_window") is not None
    return tuple("sliding" if slides and block >= num_full else "attention" for block in range(num_layers))


def read_silu_mlp(fields: ConfigFields) -> MLPConfig:
    """A gated MLP with SiLU, with biases where `mlp_bias` is set."""
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    return MLPConfig(
        intermediate_size=fields.integer("intermediate_size"),
        activation="silu",
        is_gated=True,
        has_bias=fields.flag("mlp_bias", default=False),
    )


def read_dt_limit(fields: ConfigFields) -> tuple[float, float]:
    """The interval that Mamba-2's step sizes are clamped to."""
    # time_step_min and time_step_max only describe how dt_bias was initialised; the bound of the trained model is
    # time_step_limit. JSON has no infinity, so an upper limit may also be written as null, as text, or as an object
    # {"__float__": "Infinity"}.
    limit: Any = fields.get("time_step_limit", "mamba_dt_limit")
    if limit is None:
        return 0.0, inf
    try:
        low, high = limit
        high = high.get("__float__") if isinstance(high, Mapping) else high
        low, high = float(low), inf if high is None else float(high)
    except (TypeError, ValueError):
        raise fields.error(f"field 'time_step_limit' must be two numbers, not {limit!r}") from None
    if not 0.0 <= low < high:
        raise fields.error(f"field 'time_step_limit' must be an interval of positive numbers, not {limit!r}")
    return low, high


def read_block_mamba2(fields: ConfigFields, hidden_size: int) -> Mamba2Config:
    """Mamba-2 as the families with blocks spell it: mamba_n_heads, mamba_d_head, mamba_d_state, ..."""
    num_heads, num_groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups", default=1)
    inner = fields.integer("mamba_d_ssm", default=fields.integer("mamba_expand", default=2) * hidden_size)
    given = fields.get("mamba_d_head")
    head_dim = inner // num_heads if given in (None, "auto") else fields.integer("mamba_d_head")
    if head_dim * num_heads != inner:
        raise fields.error(f"{num_heads} heads of {head_dim} do not make up an inner size of {inner}")
    if num_heads % num_groups:
        raise fields.error(f"mamba_n_heads = {num_heads} is not a multiple of mamba_n_groups = {num_groups}")
    has_bias = fields.flag("mamba_proj_bias", default=False)
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=head_dim,
        state_size=fields.integer("mamba_d_state"),
        num_groups=num_groups,
        conv_width=fields.integer("mamba_d_conv", default=4, minimum=2),
        chunk_size=fields.integer("mamba_chunk_size", default=256),
        dt_limit=read_dt_limit(fields),
        has_conv_bias=fields.flag("mamba_conv_bias", default=True),
        has_bias=has_bias,
        has_out_bias=has_bias,
    )


def read_sequence_kinds(fields: ConfigFields, names: Mapping[str, LayerKind]) -> tuple[LayerKind, ...]:
    """The kind of every block's sequence mixer, from a list of layer type names."""
    types = fields.get("layers_block_type", "layer_types")
    if types is None:
        raise fields.error("field 'layer_types' is missing")
    if not isinstance(types, Sequence) or not types:
        raise fields.error(f"the layer types must be a list of names, not {types!r}")
    for position, name in enumerate(types):
        if name not in names:
            raise fields.error(f"layer {position} has the unknown type {name!r} (known: {', '.join(names)})")
    num_layers = fields.get("num_hidden_layers")
    if num_layers is not None and num_layers != len(types):
        raise fields.error(f"num_hidden_layers = {num_layers} but {len(types)} layer types are listed")
    return tuple(names[name] for name in types)


def in_blocks(kinds: Sequence[LayerKind], channel: Literal["mlp", "moe"]) -> tuple[LayerKind, ...]:
    """Every sequence mixer followed by the channel mixer of its block."""
    return tuple(kind for sequence in kinds for kind in (sequence, channel))


def read_multiplier(fields: ConfigFields, name: str) -> float:
    """A constant factor, 1 when it is missing. Raises ConfigError for what is not a finite number."""
    value = fields.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise fields.error(f"field {name!r} must be a number, not {value!r}")
    return float(value)


def read_multipliers(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """A list of `count` constant factors, all 1 when it is missing."""
    values = fields.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list | tuple) or len(values) != count:
        raise fields.error(f"field {name!r} must be a list of {count} numbers, not {values!r}")
    return tuple(read_multiplier(ConfigFields({name: value}, fields.model_type), name) for value in values)


def with_partial_rope(attention: AttentionConfig, rotary_dim: int) -> AttentionConfig:
    """The same attention with only the first `rotary_dim` channels of a head rotated."""
    rope = attention.rope
    return attention if rope is None else replace(attention, rope=replace(rope, rotary_dim=rotary_dim))
