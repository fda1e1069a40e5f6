"""Nemotron-H: Mamba-2, attention without rotary positions, squared-ReLU MLP or mixture of experts, one mixer a layer.

Configuration and tensor names only, for both spellings of the layer types (`hybrid_override_pattern`, or a list in
`layers_block_type` / `layer_types`). The draft head's tensors are named `mtp.*`: its first layer also
joins its two inputs, its last one has the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnkeep.models.config import (
    AttentionConfig,
    ConfigFields,
    LayerKind,
    Mamba2Config,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from turnkeep.models.mixer_fields import read_dt_limit
from turnkeep.models.mixer_sources import LayerNames, layer_alternatives, mixer_sources, outer_sources
from turnkeep.models.weight_map import Alternatives, Sources, WeightMap, joined, one

NAMES = LayerNames(
    mamba2="mixer.",
    attention="mixer.",
    mlp="mixer.",
    shared_mlp="mixer.shared_experts.",
    mlp_up=("up_proj",),
    router="gate.weight",
    correction_bias="gate.e_score_correction_bias",
    experts_up="experts.up_proj",
)
LAYER_NAMES: dict[str, LayerKind] = {
    "M": "mamba2",
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "mlp": "mlp",
    "E": "moe",
    "moe": "moe",
}


def read_layer_kinds(fields: ConfigFields) -> tuple[LayerKind, ...]:
    """The order of the layers, from a pattern string or from a list of layer type names."""
    layers = fields.get("layers_block_type", "layer_types", "hybrid_override_pattern")
    if layers is None:
        raise fields.error("field 'layers_block_type' (or 'hybrid_override_pattern') is missing")
    kinds = _kinds_of(fields, layers)
    num_layers = fields.get("num_hidden_layers")
    if num_layers is not None and num_layers != len(kinds):
        raise fields.error(f"num_hidden_layers = {num_layers} but {len(kinds)} layer types are listed")
    return kinds


def _kinds_of(fields: ConfigFields, layers: object) -> tuple[LayerKind, ...]:
    if not isinstance(layers, Sequence) or not layers:
        raise fields.error(f"the layer types must be a list of names or a pattern string, not {layers!r}")
    kinds: list[LayerKind] = []
    for position, name in enumerate(layers):
        if name not in LAYER_NAMES:
            raise fields.error(f"layer {position} has the unknown type {name!r} (known: {', '.join(LAYER_NAMES)})")
        kinds.append(LAYER_NAMES[name])
    return tuple(kinds)


def read_draft_kinds(fields: ConfigFields) -> tuple[LayerKind, ...]:
    """The layers of the draft head, none where the config tells of none or of one that would need a state.

    Of several heads, each for one token further ahead, the first is used for all of them.
    """
    layers = fields.get("mtp_layers_block_type", "mtp_hybrid_override_pattern")
    if fields.integer("num_nextn_predict_layers", default=0, minimum=0) == 0 or not layers:
        return ()
    kinds = _kinds_of(fields, layers)
    return () if "mamba2" in kinds else kinds


def _read_mamba2(fields: ConfigFields) -> Mamba2Config:
    fields.choice("mamba_hidden_act", ("silu", "swish"), "silu")
    num_heads, num_groups = fields.integer("mamba_num_heads"), fields.integer("n_groups", "mamba_n_groups", default=8)
    if num_heads % num_groups:
        raise fields.error(f"mamba_num_heads = {num_heads} is not a multiple of n_groups = {num_groups}")
    has_bias = fields.flag("use_bias", default=False)
    return Mamba2Config(
        num_heads=num_heads,
        head_dim=fields.integer("mamba_head_dim"),
        state_size=fields.integer("ssm_state_size"),
        num_groups=num_groups,
        conv_width=fields.integer("conv_kernel", "mamba_d_conv", default=4, minimum=2),
        chunk_size=fields.integer("chunk_size", "mamba_chunk_size", default=128),
        dt_limit=read_dt_limit(fields),
        has_conv_bias=fields.flag("use_conv_bias", "mamba_conv_bias", default=True),
        has_bias=has_bias,
        has_out_bias=has_bias,
    )


def _read_attention(fields: ConfigFields) -> AttentionConfig:
    if fields.get("sliding_window") is not None:
        raise fields.error("sliding_window is not supported: attention layers must see the whole context")
    num_heads, num_kv_heads = fields.grouped_heads()
    has_bias = fields.flag("attention_bias", default=False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", "attention_head_dim"),
        rope=None,
        has_bias=has_bias,
        has_out_bias=has_bias,
    )


def _read_mlp(fields: ConfigFields, size_field: str) -> MLPConfig:
    fields.choice("mlp_hidden_act", ("relu2",), "relu2")
    return MLPConfig(
        intermediate_size=fields.integer(size_field),
        activation="relu2",
        is_gated=False,
        has_bias=fields.flag("mlp_bias", default=False),
    )


def _read_moe(fields: ConfigFields) -> MoEConfig:
    num_experts = fields.integer("n_routed_experts", "num_local_experts")
    num_groups, num_chosen_groups = fields.integer("n_group", default=1), fields.integer("topk_group", default=1)
    num_chosen = fields.integer("num_experts_per_tok", default=2)
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        raise fields.error(f"{num_experts} experts cannot be ranked in {num_groups} groups of at least 2")
    if num_chosen_groups > num_groups or num_chosen > num_experts // num_groups * num_chosen_groups:
        raise fields.error(f"num_experts_per_tok = {num_chosen} of {num_chosen_groups} of {num_groups} groups")
    latent_size = fields.get("moe_latent_size")
    return MoEConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        expert_size=fields.integer("moe_intermediate_size"),
        activation="relu2",
        is_gated=False,
        scores="sigmoid",
        normalises=fields.flag("norm_topk_prob", default=True),
        weight_scale=fields.number("routed_scaling_factor", default=1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        has_correction_bias=True,
        latent_size=None if latent_size is None else fields.integer("moe_latent_size"),
        has_latent_bias=fields.flag("mlp_bias", default=False),
        shared=_read_mlp(fields, "moe_shared_expert_intermediate_size"),
    )


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Nemotron-H checkpoint. Raises ConfigError."""
    kinds, draft_kinds = read_layer_kinds(fields), read_draft_kinds(fields)
    all_kinds = kinds + draft_kinds
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
        attention=_read_attention(fields) if "attention" in all_kinds else None,
        mlp=_read_mlp(fields, "intermediate_size") if "mlp" in all_kinds else None,
        moe=_read_moe(fields) if "moe" in all_kinds else None,
        draft_kinds=draft_kinds,
    )


def _canonical(name: str) -> str:
    # Published checkpoints say "backbone.", files saved by recent versions of transformers say "model.".
    return "backbone." + name.removeprefix("model.") if name.startswith("model.") else name


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Nemotron-H checkpoint."""
    outer = outer_sources(config, "backbone.embeddings.weight", "backbone.norm_f.weight")
    return _with_layers(outer, config, "backbone.layers.")


def draft_weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of the draft head; `config` has the head's layers as its own."""
    size, last = config.hidden_size, len(config.layer_kinds) - 1
    outer = {
        "input_norm_weight": joined("mtp.layers.0.", {"enorm": size, "hnorm": size}, ".weight"),
        "join_weight": one("mtp.layers.0.eh_proj.weight", size, 2 * size),
        "norm_weight": one(f"mtp.layers.{last}.final_layernorm.weight", size),
    }
    return _with_layers(outer, config, "mtp.layers.")


def _with_layers(outer: Sources, config: ModelConfig, layers: str) -> WeightMap:
    sources = dict(outer)
    alternatives: Alternatives = {}
    for index, kind in enumerate(config.layer_kinds):
        prefix = f"{layers}{index}."
        sources[f"layers.{index}.norm_weight"] = one(f"{prefix}norm.weight", config.hidden_size)
        own = mixer_sources(index, prefix, config, NAMES)
        sources |= own
        if kind == "moe" and config.moe:
            alternatives |= layer_alternatives(index, f"{prefix}mixer.", own, config.moe)
    return WeightMap(sources, _canonical, kept_aside=("mtp.",), alternatives=alternatives)
