"""Granite 4 (`granitemoehybrid`): Mamba-2 or attention, then a mixture of experts with a shared expert, or an MLP.

Configuration and tensor names only. Constant multipliers are folded into the weights.
"""

from __future__ import annotations

from turnkeep.models.config import (
    AttentionConfig,
    ConfigFields,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Multipliers,
)
from turnkeep.models.mixer_fields import (
    SEQUENCE_NAMES,
    in_blocks,
    read_block_mamba2,
    read_head_dim,
    read_multiplier,
    read_rope,
    read_sequence_kinds,
)
from turnkeep.models.mixer_sources import BlockNames, LayerNames, block_weight_map
from turnkeep.models.weight_map import WeightMap

# The dense models keep their only MLP under the name of the shared expert.
DENSE = LayerNames(mlp="shared_mlp.", mlp_up=("input_linear",), mlp_down="output_linear")
WITH_EXPERTS = LayerNames(mlp="block_sparse_moe.", mlp_up=("input_linear",), mlp_down="output_linear")
# Published checkpoints -> what recent versions of transformers call the same tensors.
RENAMED = {
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}


def _read_attention(fields: ConfigFields, hidden_size: int) -> AttentionConfig:
    num_heads, num_kv_heads = fields.grouped_heads()
    is_rotated = fields.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    head_dim = read_head_dim(fields, hidden_size, num_heads, is_rotated=is_rotated)
    has_bias = fields.flag("attention_bias", default=False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=read_rope(fields, head_dim) if is_rotated else None,
        has_bias=has_bias,
        has_out_bias=has_bias,
        score_scale=fields.number("attention_multiplier", default=1.0),
    )


def _read_moe(fields: ConfigFields, num_experts: int, shared: MLPConfig) -> MoEConfig:
    num_chosen = fields.integer("num_experts_per_tok", default=2)
    if num_chosen > num_experts:
        raise fields.error(f"num_experts_per_tok = {num_chosen} of {num_experts} experts")
    # A softmax over the chosen logits is the softmax over all of them, made to sum to one.
    return MoEConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        expert_size=fields.integer("intermediate_size"),
        activation="silu",
        is_gated=True,
        scores="softmax",
        normalises=True,
        shared=shared,
    )


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Granite 4 checkpoint. Raises ConfigError."""
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    hidden_size = fields.integer("hidden_size")
    kinds = read_sequence_kinds(fields, SEQUENCE_NAMES)
    shared = MLPConfig(fields.integer("shared_intermediate_size"), "silu", is_gated=True, has_bias=False)
    num_experts = fields.integer("num_local_experts", default=8, minimum=0)
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layer_kinds=in_blocks(kinds, "moe" if num_experts else "mlp"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        residual_in_fp32=False,
        max_position_embeddings=fields.integer("max_position_embeddings", default=2048),
        mamba2=read_block_mamba2(fields, hidden_size) if "mamba2" in kinds else None,
        attention=_read_attention(fields, hidden_size) if "attention" in kinds else None,
        mlp=None if num_experts else shared,
        moe=_read_moe(fields, num_experts, shared) if num_experts else None,
        multipliers=Multipliers(
            embedding=read_multiplier(fields, "embedding_multiplier"),
            residual=read_multiplier(fields, "residual_multiplier"),
            logits=1.0 / fields.number("logits_scaling", default=1.0),
        ),
    )


def _canonical(name: str) -> str:
    for published, renamed in RENAMED.items():
        if name.endswith(published):
            return name.removesuffix(published) + renamed
    return name


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Granite 4 checkpoint."""
    layer = DENSE if config.moe is None else WITH_EXPERTS
    names = BlockNames("input_layernorm", "post_attention_layernorm", "norm", layer)
    return block_weight_map(config, names, canonical=_canonical)
