"""The checkpoint tensors of each mixer, with the multipliers of the families that have them. Torch-free.

Families agree on most names; `LayerNames` holds what they do not agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turnkeep.models.config import (
    AttentionConfig,
    GatedDeltaConfig,
    LayerKind,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Multipliers,
    ShortConvConfig,
)
from turnkeep.models.weight_map import Alternatives, ParameterSource, Sources, TensorPart, WeightMap, joined, one


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Names inside one layer of a checkpoint. The first six are prefixes of mixers; `mlp_up` lists what makes up the
    first product of an MLP, gate first; `delta_by_key_head`: a gated delta net is projected key head by key head."""

    mamba2: str = "mamba."
    gated_delta: str = "linear_attn."
    attention: str = "self_attn."
    short_conv: str = "conv."
    mlp: str = "mlp."
    shared_mlp: str = "shared_mlp."
    mlp_up: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_down: str = "down_proj"
    attention_out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    router: str = "router.weight"
    correction_bias: str = "router.e_score_correction_bias"
    experts_up: str = "experts.gate_up_proj"
    experts_down: str = "experts.down_proj"
    delta_by_key_head: bool = False


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Tensor names of a model whose blocks are a sequence mixer and a channel mixer, each behind a norm."""

    sequence_norm: str
    channel_norm: str
    final_norm: str
    layer: LayerNames
    sequence_post_norm: str = ""
    channel_post_norm: str = ""


def mamba2_sources(prefix: str, config: Mamba2Config, hidden_size: int, factors: Multipliers) -> Sources:
    """Parameters of a Mamba-2 mixer under the names that all published families share."""
    inner, heads, conv_dim = config.inner_size, config.num_heads, config.conv_dim
    groups_size = config.num_groups * config.state_size
    projected = inner + conv_dim + heads
    # The projected rows are the gate, x, B, C and dt.
    runs = list(zip((inner, inner, groups_size, groups_size, heads), factors.mamba2_parts, strict=True))
    out = factors.residual * factors.mamba2_out
    sources = {
        "in_proj_weight": one(f"{prefix}in_proj.weight", projected, hidden_size).times(
            *((rows, factor * factors.mamba2_in) for rows, factor in runs)
        ),
        "conv_weight": ParameterSource(
            (TensorPart(f"{prefix}conv1d.weight", (conv_dim, 1, config.conv_width)),), "drop_dim1"
        ),
        "dt_bias": one(f"{prefix}dt_bias", heads),
        "A": ParameterSource((TensorPart(f"{prefix}A_log", (heads,)),), "negative_exp"),
        "D": one(f"{prefix}D", heads),
        "out_proj_weight": one(f"{prefix}out_proj.weight", hidden_size, inner).times((hidden_size, out)),
    }
    if config.output != "gate":
        sources["norm_weight"] = one(f"{prefix}norm.weight", inner)
    if config.has_conv_bias:
        sources["conv_bias"] = one(f"{prefix}conv1d.bias", conv_dim)
    if config.has_bias:
        sources["in_proj_bias"] = one(f"{prefix}in_proj.bias", projected).times(*runs)
    if config.has_out_bias:
        sources["out_proj_bias"] = one(f"{prefix}out_proj.bias", hidden_size).times((hidden_size, out))
    return sources


def attention_sources(
    prefix: str, config: AttentionConfig, hidden_size: int, names: LayerNames, factors: Multipliers
) -> Sources:
    """Parameters of an attention mixer from q_proj, k_proj, v_proj and its output projection."""
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # A gate is stored with q, head by head, and stands behind it here.
    q_width, by_head = (2 * width, (config.num_heads, (config.head_dim,) * 2)) if config.has_gate else (width, None)
    rows = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
    runs = [(q_width, 1.0), (kv_width, factors.key), (kv_width, 1.0)]
    out = factors.residual * factors.attention_out
    sources = {
        "qkv_proj_weight": joined(prefix, rows, ".weight", hidden_size)
        .first_by_group(by_head)
        .times(*((count, factor * factors.attention_in) for count, factor in runs)),
        "o_proj_weight": one(f"{prefix}{names.attention_out}.weight", hidden_size, width).times((hidden_size, out)),
    }
    if config.has_qk_norm:
        sources["q_norm_weight"] = one(f"{prefix}{names.q_norm}.weight", config.head_dim)
        sources["k_norm_weight"] = one(f"{prefix}{names.k_norm}.weight", config.head_dim)
    if config.has_bias:
        sources["qkv_proj_bias"] = joined(prefix, rows, ".bias").first_by_group(by_head).times(*runs)
    if config.has_out_bias:
        sources["o_proj_bias"] = one(f"{prefix}{names.attention_out}.bias", hidden_size).times((hidden_size, out))
    return sources


def gated_delta_sources(
    prefix: str, config: GatedDeltaConfig, hidden_size: int, names: LayerNames, factors: Multipliers
) -> Sources:
    """Parameters of a gated delta net, projected key head by key head or in tensors of one kind each."""
    heads, keys, inner = config.num_value_heads, config.num_key_heads, config.inner_size
    if names.delta_by_key_head:
        qkvz = (config.key_dim, config.key_dim, inner // keys, inner // keys)
        parts: tuple[TensorPart, ...] = (
            TensorPart(f"{prefix}in_proj_qkvz.weight", (config.conv_dim + inner, hidden_size), (keys, qkvz)),
            TensorPart(f"{prefix}in_proj_ba.weight", (2 * heads, hidden_size), (keys, (heads // keys,) * 2)),
        )
    else:
        rows = {"qkv": config.conv_dim, "z": inner, "b": heads, "a": heads}
        parts = joined(f"{prefix}in_proj_", rows, ".weight", hidden_size).parts
    return {
        "in_proj_weight": ParameterSource(parts),
        "conv_weight": ParameterSource(
            (TensorPart(f"{prefix}conv1d.weight", (config.conv_dim, 1, config.conv_width)),), "drop_dim1"
        ),
        "dt_bias": one(f"{prefix}dt_bias", heads),
        "A": ParameterSource((TensorPart(f"{prefix}A_log", (heads,)),), "negative_exp"),
        "norm_weight": one(f"{prefix}norm.weight", config.value_dim),
        "out_proj_weight": one(f"{prefix}out_proj.weight", hidden_size, inner).times((hidden_size, factors.residual)),
    }


def _delta_apart(prefix: str, config: GatedDeltaConfig, hidden_size: int) -> tuple[TensorPart, ...]:
    """The other layout of a projection by key head, as GGUF files have it: only beta and the decay by key head."""
    heads, keys = config.num_value_heads, config.num_key_heads
    plain = joined(f"{prefix}in_proj_", {"qkv": config.conv_dim, "z": config.inner_size}, ".weight", hidden_size).parts
    small = TensorPart(f"{prefix}in_proj_ba.weight", (2 * heads, hidden_size), (keys, (heads // keys,) * 2))
    return (*plain, small)


def short_conv_sources(prefix: str, config: ShortConvConfig, hidden_size: int, factors: Multipliers) -> Sources:
    """Parameters of a gated short convolution."""
    sources = {
        "in_proj_weight": one(f"{prefix}in_proj.weight", 3 * hidden_size, hidden_size),
        "conv_weight": ParameterSource(
            (TensorPart(f"{prefix}conv.weight", (hidden_size, 1, config.width)),), "drop_dim1"
        ),
        "out_proj_weight": one(f"{prefix}out_proj.weight", hidden_size, hidden_size).times(
            (hidden_size, factors.residual)
        ),
    }
    if config.has_bias:
        sources["in_proj_bias"] = one(f"{prefix}in_proj.bias", 3 * hidden_size)
        sources["conv_bias"] = one(f"{prefix}conv.bias", hidden_size)
        sources["out_proj_bias"] = one(f"{prefix}out_proj.bias", hidden_size).times((hidden_size, factors.residual))
    return sources


def mlp_sources(prefix: str, config: MLPConfig, hidden_size: int, names: LayerNames, factors: Multipliers) -> Sources:
    """Parameters of an MLP mixer from the tensors of its two products."""
    size = config.intermediate_size
    runs = [(size, factors.mlp_gate), (size, 1.0)] if config.is_gated else [(size, 1.0)]
    up_names = names.mlp_up if config.is_gated else names.mlp_up[-1:]
    rows = dict.fromkeys(up_names, len(runs) * size // len(up_names))
    out = factors.residual * factors.mlp_down
    sources = {
        "up_proj_weight": joined(prefix, rows, ".weight", hidden_size).times(*runs),
        "down_proj_weight": one(f"{prefix}{names.mlp_down}.weight", hidden_size, size).times((hidden_size, out)),
    }
    if config.has_bias:
        # The gate's factor is on its sum of product and bias.
        sources["up_proj_bias"] = joined(prefix, rows, ".bias").times(*runs)
        sources["down_proj_bias"] = one(f"{prefix}{names.mlp_down}.bias", hidden_size).times((hidden_size, out))
    return sources


def moe_sources(
    prefix: str, shared_prefix: str, config: MoEConfig, hidden_size: int, names: LayerNames, factors: Multipliers
) -> Sources:
    """Parameters of a mixture of experts whose experts are stored together."""
    num_experts, size, width = config.num_experts, config.expert_size, config.latent_size or hidden_size
    rows = 2 * size if config.is_gated else size
    sources = {
        "router_weight": one(f"{prefix}{names.router}", num_experts, hidden_size),
        "experts_up_weight": one(f"{prefix}{names.experts_up}", num_experts, rows, width),
        "experts_down_weight": one(f"{prefix}{names.experts_down}", num_experts, width, size).times(
            (num_experts, factors.residual)
        ),
    }
    if config.has_correction_bias:
        sources["correction_bias"] = one(f"{prefix}{names.correction_bias}", num_experts)
    if config.latent_size is not None:
        sources["latent_down_weight"] = one(f"{prefix}fc1_latent_proj.weight", width, hidden_size)
        sources["latent_up_weight"] = one(f"{prefix}fc2_latent_proj.weight", hidden_size, width)
        if config.has_latent_bias:
            sources["latent_down_bias"] = one(f"{prefix}fc1_latent_proj.bias", width)
            sources["latent_up_bias"] = one(f"{prefix}fc2_latent_proj.bias", hidden_size)
    if config.shared is not None:
        shared = mlp_sources(shared_prefix, config.shared, hidden_size, names, factors)
        sources |= {f"shared.{name}": source for name, source in shared.items()}
    if config.has_shared_gate:
        sources["shared_gate_weight"] = one(f"{prefix}shared_expert_gate.weight", 1, hidden_size)
    return sources


def expert_alternatives(sources: Sources, prefix: str, config: MoEConfig) -> Alternatives:
    """Other layouts of the experts behind `sources`: one tensor an expert, or gate and up in tensors of their own."""
    num_experts, rows, width = sources["experts_up_weight"].parts[0].shape
    down = sources["experts_down_weight"]
    names = ("gate_proj", "up_proj") if config.is_gated else ("up_proj",)
    size = rows // len(names)
    each_up = [
        TensorPart(f"{prefix}experts.{e}.{name}.weight", (size, width)) for e in range(num_experts) for name in names
    ]
    each_down = [
        TensorPart(f"{prefix}experts.{e}.down_proj.weight", (width, config.expert_size)) for e in range(num_experts)
    ]
    apart = [TensorPart(f"{prefix}experts.{name}", (num_experts, size, width)) for name in names]
    return {
        "experts_up_weight": (ParameterSource(tuple(each_up)), ParameterSource(tuple(apart), dim=1)),
        "experts_down_weight": (ParameterSource(tuple(each_down), row_factors=down.row_factors),),
    }


def _mixer_sources(kind: LayerKind, prefix: str, config: ModelConfig, names: LayerNames) -> Sources | None:
    hidden_size, factors = config.hidden_size, config.multipliers
    if kind == "mamba2" and config.mamba2:
        return mamba2_sources(prefix + names.mamba2, config.mamba2, hidden_size, factors)
    if kind == "gated_delta" and config.gated_delta:
        return gated_delta_sources(prefix + names.gated_delta, config.gated_delta, hidden_size, names, factors)
    if kind in ("attention", "sliding") and config.attention:
        return attention_sources(prefix + names.attention, config.attention, hidden_size, names, factors)
    if kind == "parallel":
        both: tuple[LayerKind, LayerKind] = ("attention", "mamba2")
        parts = {part: _mixer_sources(part, prefix, config, names) for part in both}
        return {f"{part}.{name}": s for part, sources in parts.items() for name, s in (sources or {}).items()}
    if kind == "short_conv" and config.short_conv:
        return short_conv_sources(prefix + names.short_conv, config.short_conv, hidden_size, factors)
    if kind == "mlp" and config.mlp:
        return mlp_sources(prefix + names.mlp, config.mlp, hidden_size, names, factors)
    if kind == "moe" and config.moe:
        own, shared = prefix + names.mlp, prefix + names.shared_mlp
        return moe_sources(own, shared, config.moe, hidden_size, names, factors)
    return None


def mixer_sources(index: int, prefix: str, config: ModelConfig, names: LayerNames) -> Sources:
    """Parameters of the mixer of layer `index`, keyed by their names in the decoder; `prefix` is its layer's.

    Raises ValueError for a kind of layer that the config has no sizes for.
    """
    kind = config.layer_kinds[index]
    sources = _mixer_sources(kind, prefix, config, names)
    if not sources:
        raise ValueError(f"layer {index} is of kind {kind!r} but the config has no sizes for it")
    return {f"layers.{index}.mixer.{name}": source for name, source in sources.items()}


def outer_sources(config: ModelConfig, embedding: str, final_norm: str) -> Sources:
    """Embedding, final norm and output head. The factor of the logits goes into the norm, which stays in float32."""
    hidden_size = config.hidden_size
    sources = {
        "embedding": one(embedding, config.vocab_size, hidden_size),
        "norm_weight": one(final_norm, hidden_size).times((hidden_size, config.multipliers.logits)),
    }
    if not config.tie_word_embeddings:
        sources["lm_head"] = one("lm_head.weight", config.vocab_size, hidden_size)
    return sources


def block_weight_map(
    config: ModelConfig,
    names: BlockNames,
    *,
    canonical: Callable[[str], str] = str,
    ignored: tuple[str, ...] = (),
) -> WeightMap:
    """Tensor names of a model in blocks: layer 2i is the sequence mixer of block i, layer 2i + 1 its channel mixer."""
    outer = outer_sources(config, "model.embed_tokens.weight", f"model.{names.final_norm}.weight")
    sources, alternatives = block_sources(config, names, "model.layers.")
    return WeightMap(outer | sources, canonical, ignored=ignored, alternatives=alternatives)


def block_sources(config: ModelConfig, names: BlockNames, layers: str) -> tuple[Sources, Alternatives]:
    """Parameters of all blocks, whose names begin with `layers` and a number, and other layouts of some of them."""
    sources: Sources = {}
    alternatives: Alternatives = {}
    for index, kind in enumerate(config.layer_kinds):
        prefix = f"{layers}{index // 2}."
        norm = names.channel_norm if index % 2 else names.sequence_norm
        sources[f"layers.{index}.norm_weight"] = one(f"{prefix}{norm}.weight", config.hidden_size)
        if config.has_post_norms:
            post_norm = names.channel_post_norm if index % 2 else names.sequence_post_norm
            sources[f"layers.{index}.post_norm_weight"] = one(f"{prefix}{post_norm}.weight", config.hidden_size)
        own = mixer_sources(index, prefix, config, names.layer)
        sources |= own
        if kind == "gated_delta" and config.gated_delta and names.layer.delta_by_key_head:
            parts = _delta_apart(prefix + names.layer.gated_delta, config.gated_delta, config.hidden_size)
            alternatives[f"layers.{index}.mixer.in_proj_weight"] = (ParameterSource(parts),)
        if kind == "moe" and config.moe:
            alternatives |= layer_alternatives(index, prefix + names.layer.mlp, own, config.moe)
        if kind in ("mlp", "moe") and len(names.layer.mlp_up) == 1:
            alternatives |= _gates_apart(own, prefix + names.layer.shared_mlp)
    return sources, alternatives


def _gates_apart(sources: Sources, prefix: str) -> Alternatives:
    """The other layout of an MLP whose gate and up are stored as one tensor: two tensors."""
    found: Alternatives = {}
    for name, source in sources.items():
        if name.endswith("up_proj_weight"):
            rows, hidden_size = source.parts[0].shape
            halves = {"gate_proj": rows // 2, "up_proj": rows // 2}
            apart = joined(prefix, halves, ".weight", hidden_size)
            found[name] = (apart.times(*source.row_factors),)
    return found


def layer_alternatives(index: int, prefix: str, sources: Sources, config: MoEConfig) -> Alternatives:
    """`expert_alternatives` of layer `index`, keyed as its `sources` are."""
    own = f"layers.{index}.mixer."
    plain = {name.removeprefix(own): source for name, source in sources.items()}
    return {own + name: others for name, others in expert_alternatives(plain, prefix, config).items()}
