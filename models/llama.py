"""Llama and what shares its shape (SmolLM2): attention with rotary positions and a gated MLP in every block.

Configuration and tensor names only. A block is two layers of the decoder: attention, then MLP.
"""

from __future__ import annotations

from collections.abc import Mapping

from turnkeep.models.config import AttentionConfig, ConfigFields, LayerKind, MLPConfig, ModelConfig, RopeConfig
from turnkeep.models.weight_map import WeightMap, mixer_sources, one

BLOCK_KINDS: tuple[LayerKind, LayerKind] = ("attention", "mlp")


def read_rope(fields: ConfigFields, head_dim: int) -> RopeConfig:
    """Rotary parameters from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old). Raises ConfigError."""
    parameters = fields.get("rope_parameters", "rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise fields.error(f"the rotary parameters must be an object, not {parameters!r}")
    rope = ConfigFields({"rope_theta": fields.get("rope_theta"), **parameters}, fields.model_type)
    theta = rope.number("rope_theta", default=10000.0)
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


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Llama checkpoint. Raises ConfigError."""
    fields.choice("hidden_act", ("silu", "swish"), "silu")
    hidden_size = fields.integer("hidden_size")
    num_heads, num_kv_heads = fields.grouped_heads()
    if fields.get("head_dim") is None and hidden_size % num_heads:
        raise fields.error(f"hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}")
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error(f"head_dim = {head_dim} must be even to be rotated")
    return ModelConfig(
        model_type=fields.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        layer_kinds=BLOCK_KINDS * fields.integer("num_hidden_layers"),
        norm_eps=fields.number("rms_norm_eps", default=1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        residual_in_fp32=False,
        max_position_embeddings=fields.integer("max_position_embeddings", default=2048),
        mamba2=None,
        attention=AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=read_rope(fields, head_dim),
            has_bias=fields.flag("attention_bias", default=False),
        ),
        mlp=MLPConfig(
            intermediate_size=fields.integer("intermediate_size"),
            activation="silu",
            is_gated=True,
            has_bias=fields.flag("mlp_bias", default=False),
        ),
    )


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Llama checkpoint."""
    hidden_size = config.hidden_size
    sources = {
        "embedding": one("model.embed_tokens.weight", config.vocab_size, hidden_size),
        "norm_weight": one("model.norm.weight", hidden_size),
    }
    for index, kind in enumerate(config.layer_kinds):
        prefix = f"model.layers.{index // 2}."
        norm, mixer = ("input_layernorm", "self_attn") if kind == "attention" else ("post_attention_layernorm", "mlp")
        sources[f"layers.{index}.norm_weight"] = one(f"{prefix}{norm}.weight", hidden_size)
        sources |= mixer_sources(index, f"{prefix}{mixer}.", config)
    if not config.tie_word_embeddings:
        sources["lm_head"] = one("lm_head.weight", config.vocab_size, hidden_size)
    return WeightMap(sources, str, ignored=(".rotary_emb.inv_freq",))
