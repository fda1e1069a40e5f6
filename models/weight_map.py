"""Which checkpoint tensors make up each parameter of a decoder: names and shapes, no tensors.

A parameter is one or more checkpoint tensors joined along their first dimension (q, k and v become one matrix at
load, so that a decode step runs one product instead of three), with an optional change of form. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from turnkeep.models.config import AttentionConfig, Mamba2Config, MLPConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor of the checkpoint: its name there and the shape it must have."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """Parts joined along dimension 0, then: "drop_dim1" [C, 1, W] -> [C, W]; "negative_exp" a -> -exp(a) (float32)."""

    parts: tuple[TensorPart, ...]
    change: Literal["drop_dim1", "negative_exp"] | None = None


@dataclass(frozen=True, slots=True)
class WeightMap:
    """All parameters of a decoder. `canonical` turns any accepted spelling of a tensor name into the one in `sources`;
    `kept_aside` are prefixes of known tensors that this decoder does not use, `ignored` suffixes of derived ones."""

    sources: dict[str, ParameterSource]
    canonical: Callable[[str], str]
    kept_aside: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def one(name: str, *shape: int) -> ParameterSource:
    """A parameter that is stored as it is used."""
    return ParameterSource((TensorPart(name, shape),))


def joined(prefix: str, rows: dict[str, int], suffix: str, *inner: int) -> ParameterSource:
    """Tensors `prefix + key + suffix` of shape [rows, *inner], joined in the order of `rows`."""
    return ParameterSource(tuple(TensorPart(f"{prefix}{key}{suffix}", (count, *inner)) for key, count in rows.items()))


def mamba2_sources(prefix: str, config: Mamba2Config, hidden_size: int) -> dict[str, ParameterSource]:
    """Parameters of a Mamba-2 mixer under the names that all published families share."""
    inner, heads, conv_dim = config.inner_size, config.num_heads, config.conv_dim
    projected = inner + conv_dim + heads
    sources = {
        "in_proj_weight": one(f"{prefix}in_proj.weight", projected, hidden_size),
        "conv_weight": ParameterSource(
            (TensorPart(f"{prefix}conv1d.weight", (conv_dim, 1, config.conv_width)),), "drop_dim1"
        ),
        "dt_bias": one(f"{prefix}dt_bias", heads),
        "A": ParameterSource((TensorPart(f"{prefix}A_log", (heads,)),), "negative_exp"),
        "D": one(f"{prefix}D", heads),
        "norm_weight": one(f"{prefix}norm.weight", inner),
        "out_proj_weight": one(f"{prefix}out_proj.weight", hidden_size, inner),
    }
    if config.has_conv_bias:
        sources["conv_bias"] = one(f"{prefix}conv1d.bias", conv_dim)
    if config.has_bias:
        sources["in_proj_bias"] = one(f"{prefix}in_proj.bias", projected)
        sources["out_proj_bias"] = one(f"{prefix}out_proj.bias", hidden_size)
    return sources


def attention_sources(prefix: str, config: AttentionConfig, hidden_size: int) -> dict[str, ParameterSource]:
    """Parameters of an attention mixer from q_proj, k_proj, v_proj and o_proj."""
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
    sources = {
        "qkv_proj_weight": joined(prefix, rows, ".weight", hidden_size),
        "o_proj_weight": one(f"{prefix}o_proj.weight", hidden_size, width),
    }
    if config.has_bias:
        sources["qkv_proj_bias"] = joined(prefix, rows, ".bias")
        sources["o_proj_bias"] = one(f"{prefix}o_proj.bias", hidden_size)
    return sources


def mlp_sources(prefix: str, config: MLPConfig, hidden_size: int) -> dict[str, ParameterSource]:
    """Parameters of an MLP mixer from (gate_proj,) up_proj and down_proj."""
    size = config.intermediate_size
    rows = {"gate_proj": size, "up_proj": size} if config.is_gated else {"up_proj": size}
    sources = {
        "up_proj_weight": joined(prefix, rows, ".weight", hidden_size),
        "down_proj_weight": one(f"{prefix}down_proj.weight", hidden_size, size),
    }
    if config.has_bias:
        sources["up_proj_bias"] = joined(prefix, rows, ".bias")
        sources["down_proj_bias"] = one(f"{prefix}down_proj.bias", hidden_size)
    return sources


def mixer_sources(index: int, prefix: str, config: ModelConfig) -> dict[str, ParameterSource]:
    """Parameters of the mixer of layer `index`, keyed by their names in the decoder."""
    kind, hidden_size = config.layer_kinds[index], config.hidden_size
    if kind == "mamba2" and config.mamba2:
        sources = mamba2_sources(prefix, config.mamba2, hidden_size)
    elif kind == "attention" and config.attention:
        sources = attention_sources(prefix, config.attention, hidden_size)
    elif kind == "mlp" and config.mlp:
        sources = mlp_sources(prefix, config.mlp, hidden_size)
    else:
        raise ValueError(f"layer {index} is of kind {kind!r} but the config has no sizes for it")
    return {f"layers.{index}.mixer.{name}": source for name, source in sources.items()}
