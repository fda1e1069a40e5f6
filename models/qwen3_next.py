"""Qwen3-Next: gated delta nets with a gated attention block after every few, each with experts or an MLP.

Configuration and tensor names only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnkeep.models.config import (
    AttentionConfig,
    ConfigFields,
    GatedDeltaConfig,
    LayerKind,
    MLPConfig,
    ModelConfig,
    MoEConfig,
)
from turnkeep.models.mixer_fields import read_rope, read_sequence_kinds, read_silu_mlp, with_partial_rope
from turnkeep.models.mixer_sources import BlockNames, LayerNames, block_sources, block_weight_map
from turnkeep.models.weight_map import Sources, WeightMap, joined, one

SEQUENCE_NAMES: dict[str, LayerKind] = {"linear_attention": "gated_delta", "full_attention": "attention"}
DEFAULT_INTERVAL = 4
DEFAULT_ROTATED_PART = 0.25
NAMES = LayerNames(shared_mlp="mlp.shared_expert.", router="gate.weight", delta_by_key_head=True)


def read_gated_delta(fields: ConfigFields) -> GatedDeltaConfig:
    """Sizes of the gated delta nets. Raises ConfigError."""
    num_keys = fields.integer("linear_num_key_heads", default=16)
    num_values = fields.integer("linear_num_value_heads", default=32)
    if num_values % num_keys:
        raise fields.error(
            f"linear_num_value_heads = {num_values} is not a multiple of linear_num_key_heads = {num_keys}"
        )
    return GatedDeltaConfig(
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=fields.integer("linear_key_head_dim", default=128),
        value_dim=fields.integer("linear_value_head_dim", default=128),
        conv_width=fields.integer("linear_conv_kernel_dim", default=4, minimum=2),
    )


def read_gated_attention(fields: ConfigFields) -> AttentionConfig:
    """Attention with normalised, partly rotated heads and a gate. Raises ConfigError."""
    num_heads, num_kv_heads = fields.grouped_heads()
    head_dim = fields.integer("head_dim", default=256)
    parameters = fields.get("rope_parameters", "rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise fields.error(f"the rotary parameters must be an object, not {parameters!r}")
    part = ConfigFields({**fields.values, **parameters}, fields.model_type).number(
        "partial_rotary_factor", default=DEFAULT_ROTATED_PART
    )
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise fields.error(f"partial_rotary_factor = {part} rotates {rotary_dim} of the {head_dim} channels of a head")
    whole = {**parameters, "partial_rotary_factor": None}
    rope = read_rope(ConfigFields({**fields.values, "rope_parameters": whole}, fields.model_type), head_dim)
    has_bias = fields.flag("attention_bias", default=False)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        has_bias=has_bias,
        has_out_bias=has_bias,
        has_qk_norm=True,
        has_gate=True,
    )
    return with_partial_rope(attention, rotary_dim)


def read_experts(fields: ConfigFields, num_chosen: int, *, normalises: bool) -> MoEConfig:
    """Experts chosen by a softmax, beside a gated expert of every token. Raises ConfigError."""
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    num_experts = fields.integer("num_experts")
    num_chosen = fields.integer("num_experts_per_tok", default=num_chosen)
    if num_chosen > num_experts:
        raise fields.error(f"num_experts_per_tok = {num_chosen} of {num_experts} experts")
    shared = fields.integer("shared_expert_intermediate_size", default=512)
    return MoEConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        expert_size=fields.integer("moe_intermediate_size", default=512),
        activation="silu",
        is_gated=True,
        scores="softmax",
        normalises=normalises,
        shared=MLPConfig(shared, "silu", is_gated=True, has_bias=False),
        has_shared_gate=True,
    )


def read_delta_blocks(
    fields: ConfigFields,
    channel_kinds: list[LayerKind],
    moe: MoEConfig | None,
    *,
    num_draft_blocks: int,
    ties_by_default: bool = False,
) -> ModelConfig:
    """A model of gated delta nets and gated attention; `channel_kinds` are the second mixers of all blocks.

    Of several draft blocks, each for one token further ahead, the first is used for all of them.
    """
    interval = fields.integer("full_attention_interval", default=DEFAULT_INTERVAL)
    if fields.get("layer_types") is None:
        names = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(len(channel_kinds))]
        fields = ConfigFields({**fields.values, "layer_types": names}, fields.model_type)
    kinds = read_sequence_kinds(fields, SEQUENCE_NAMES)
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        layer_kinds=tuple(kind for pair in zip(kinds, channel_kinds, strict=True) for kind in pair),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=ties_by_default),
        residual_in_fp32=False,
        max_position_embeddings=fields.integer("max_position_embeddings", default=32768),
        mamba2=None,
        attention=read_gated_attention(fields) if "attention" in kinds else None,
        mlp=replace(read_silu_mlp(fields), has_bias=False) if "mlp" in channel_kinds else None,
        moe=moe,
        gated_delta=read_gated_delta(fields) if "gated_delta" in kinds else None,
        draft_kinds=("attention", channel_kinds[0]) if num_draft_blocks and "attention" in kinds else (),
    )


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Qwen3-Next checkpoint. Raises ConfigError."""
    num_layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", default=1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.error(f"field 'mlp_only_layers' must be a list of layers, not {dense!r}")
    has_experts = fields.integer("num_experts", default=512, minimum=0) > 0
    channels: list[LayerKind] = [
        "moe" if has_experts and i not in dense and (i + 1) % step == 0 else "mlp" for i in range(num_layers)
    ]
    moe = None
    if "moe" in channels:
        with_default = ConfigFields({"num_experts": 512, **fields.values}, fields.model_type)
        moe = read_experts(with_default, 10, normalises=fields.flag("norm_topk_prob", default=True))
    # Published configs do not tell of the draft head that their checkpoints have.
    num_draft_blocks = fields.integer("num_nextn_predict_layers", "mtp_num_hidden_layers", default=1, minimum=0)
    return read_delta_blocks(fields, channels, moe, num_draft_blocks=num_draft_blocks)


def delta_weight_map(config: ModelConfig, names: LayerNames) -> WeightMap:
    """Tensor names of a model of gated delta nets. Its norms, but for those of the delta heads, are stored around 0."""
    plain = block_weight_map(config, _blocks(names), canonical=_canonical)
    sources = _around_zero(plain.sources)
    return replace(plain, sources=sources, kept_aside=("mtp.",), other_modalities=("model.visual.",))


def delta_draft_weight_map(config: ModelConfig, names: LayerNames) -> WeightMap:
    """Tensor names of the draft head: one block of gated attention behind norms and a projection of both inputs."""
    size = config.hidden_size
    outer = {
        "input_norm_weight": joined("mtp.pre_fc_norm_", {"embedding": size, "hidden": size}, ".weight"),
        "join_weight": one("mtp.fc.weight", size, 2 * size),
        "norm_weight": one("mtp.norm.weight", size),
    }
    blocks, alternatives = block_sources(config, _blocks(names), "mtp.layers.")
    return WeightMap(_around_zero(outer | blocks), _canonical, kept_aside=("mtp.",), alternatives=alternatives)


def _blocks(names: LayerNames) -> BlockNames:
    return BlockNames("input_layernorm", "post_attention_layernorm", "norm", names)


def _around_zero(sources: Sources) -> Sources:
    return {
        name: replace(source, change="plus_one") if _is_stored_around_zero(name) else source
        for name, source in sources.items()
    }


def _is_stored_around_zero(name: str) -> bool:
    return name.endswith(("q_norm_weight", "k_norm_weight")) or (name.endswith("norm_weight") and "mixer" not in name)


def _canonical(name: str) -> str:
    # With a vision tower beside it, the text model lies one level deeper.
    return name.replace("model.language_model.", "model.", 1)


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Qwen3-Next checkpoint."""
    return delta_weight_map(config, NAMES)


def draft_weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Qwen3-Next draft head; `config` has the head's layers as its own."""
    return delta_draft_weight_map(config, NAMES)
