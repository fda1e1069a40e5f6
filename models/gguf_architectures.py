"""What llama.cpp's converter writes for each architecture, in Hugging Face terms: tables of tensor names and readers of
metadata. Torch-free; `gguf_source.py` applies them to a file.

The converter also changes some tensors: rows of q and k of the families whose rotated pairs lie side by side, A_log
(stored as A), shapes of the small Mamba-2 tensors, and the multipliers of Falcon-H1, which are in its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnkeep.models.gguf_fields import GGUFFields, head_counts, num_own_blocks


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """One architecture. Names without a suffix keep that of the file (.weight or .bias); `whole` are full names."""

    outer: Mapping[str, str]
    layers: str
    block: Mapping[str, str]
    whole: Mapping[str, str]
    read: Callable[[GGUFFields], dict[str, Any]]
    has_side_by_side_pairs: bool = False
    has_norms_around_zero: bool = False  # the checkpoint's norms, which the file holds plus one
    has_tiled_value_heads: bool = False  # value heads in another order, see gguf_gated_delta.py


ATTENTION = {f"attn_{key}": f"self_attn.{key}_proj" for key in "qkv"} | {"attn_output": "self_attn.o_proj"}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA_BLOCK = (
    ATTENTION
    | QK_NORM
    | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    | {f"ffn_{key}": f"mlp.{key}_proj" for key in ("gate", "up", "down")}
)
LLAMA_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _mamba2_block(prefix: str) -> dict[str, str]:
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return {stored: f"{prefix}.{name}" for stored, name in names.items()}


def _mamba2_whole(prefix: str) -> dict[str, str]:
    return {"ssm_a": f"{prefix}.A_log", "ssm_d": f"{prefix}.D", "ssm_dt.bias": f"{prefix}.dt_bias"}


def common_values(fields: GGUFFields, model_type: str) -> dict[str, Any]:
    """What the config of every type has."""
    return {
        "model_type": model_type,
        "hidden_size": fields.integer("embedding_length"),
        "vocab_size": fields.rows("token_embd.weight"),
        "max_position_embeddings": fields.value("context_length"),
        "tie_word_embeddings": not fields.has("output.weight"),
        "rms_norm_eps": fields.decimal("attention.layer_norm_rms_epsilon"),
    }


def attention_values(fields: GGUFFields) -> dict[str, Any]:
    """Heads of the attention layers."""
    num_heads, num_kv_heads = head_counts(fields)
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": fields.get("attention.key_length", fields.integer("embedding_length") // num_heads),
        "attention_bias": fields.any_block_has("attn_q.bias"),
    }


def rope_values(fields: GGUFFields, head_dim: int, default_theta: float = 10000.0) -> dict[str, Any]:
    """Rotation of `head_dim` channels. Raises ModelFilesError where the file rotates other ones, or scales."""
    if fields.get("rope.dimension_count", head_dim) != head_dim:
        raise fields.refuse("rotating a part of the head is not supported")
    scaling = fields.get("rope.scaling.type", "none")
    if scaling != "none":
        raise fields.refuse(f"rope scaling {scaling!r} is not supported")
    return {"rope_type": "default", "rope_theta": float(fields.get("rope.freq_base", default_theta))}


def _read_attention_blocks(model_type: str) -> Callable[[GGUFFields], dict[str, Any]]:
    def read(fields: GGUFFields) -> dict[str, Any]:
        if fields.get("expert_count"):
            raise fields.refuse("a mixture of experts is not supported")
        attention = attention_values(fields)
        return (
            common_values(fields, model_type)
            | attention
            | {
                "num_hidden_layers": fields.integer("block_count"),
                "intermediate_size": fields.integer("feed_forward_length"),
                "rope_parameters": rope_values(fields, attention["head_dim"]),
                "mlp_bias": fields.has("blk.0.ffn_up.bias"),
            }
        )

    return read


def _mamba2_sizes(fields: GGUFFields) -> dict[str, int]:
    num_heads = fields.integer("ssm.time_step_rank")
    return {
        "num_heads": num_heads,
        "head_dim": fields.integer("ssm.inner_size") // max(num_heads, 1),
        "state": fields.integer("ssm.state_size"),
        "groups": fields.integer("ssm.group_count"),
        "conv": fields.integer("ssm.conv_kernel"),
    }


def _block_mamba2(fields: GGUFFields) -> dict[str, Any]:
    sizes = _mamba2_sizes(fields)
    return {
        "mamba_d_ssm": fields.integer("ssm.inner_size"),
        "mamba_n_heads": sizes["num_heads"],
        "mamba_d_head": sizes["head_dim"],
        "mamba_d_state": sizes["state"],
        "mamba_n_groups": sizes["groups"],
        "mamba_d_conv": sizes["conv"],
        "mamba_conv_bias": fields.any_block_has("ssm_conv1d.bias"),
        "mamba_proj_bias": fields.any_block_has("ssm_in.bias"),
    }


def _read_mamba2(fields: GGUFFields) -> dict[str, Any]:
    sizes = _mamba2_sizes(fields)
    values = common_values(fields, "mamba2")
    return values | {
        "num_hidden_layers": fields.integer("block_count"),
        "layer_norm_epsilon": values["rms_norm_eps"],
        "expand": fields.integer("ssm.inner_size") // values["hidden_size"],
        "num_heads": sizes["num_heads"],
        "head_dim": sizes["head_dim"],
        "state_size": sizes["state"],
        "n_groups": sizes["groups"],
        "conv_kernel": sizes["conv"],
        "use_conv_bias": fields.has("blk.0.ssm_conv1d.bias"),
        "use_bias": fields.has("blk.0.ssm_in.bias"),
    }


def _read_nemotron_h(fields: GGUFFields) -> dict[str, Any]:
    num_layers = num_own_blocks(fields)
    counts_kv = fields.by_block("attention.head_count_kv", num_layers)
    has_experts = fields.architecture == "nemotron_h_moe"
    pattern = "".join(
        "M" if fields.has(f"blk.{block}.ssm_in.weight") else "*" if counts_kv[block] else "E" if has_experts else "-"
        for block in range(num_layers)
    )
    values = common_values(fields, "nemotron_h")
    sizes, attention = _mamba2_sizes(fields), attention_values(fields)
    values |= attention | {
        "hybrid_override_pattern": pattern,
        "layer_norm_epsilon": values["rms_norm_eps"],
        "mamba_num_heads": sizes["num_heads"],
        "mamba_head_dim": sizes["head_dim"],
        "ssm_state_size": sizes["state"],
        "n_groups": sizes["groups"],
        "conv_kernel": sizes["conv"],
        "use_conv_bias": fields.any_block_has("ssm_conv1d.bias"),
        "use_bias": fields.any_block_has("ssm_in.bias"),
        "mlp_bias": fields.any_block_has("ffn_up.bias") or fields.any_block_has("ffn_up_shexp.bias"),
    }
    if "-" in pattern:
        values["intermediate_size"] = fields.rows(f"blk.{pattern.index('-')}.ffn_up.weight")
    if "E" in pattern:
        num_groups = fields.get("expert_group_count", 1)
        values |= {
            "n_routed_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
            "norm_topk_prob": fields.get("expert_weights_norm", True),
            "routed_scaling_factor": float(f"{fields.get('expert_weights_scale', 1.0):.6g}"),
            "moe_latent_size": fields.get("moe_latent_size"),
            "n_group": num_groups,
            "topk_group": fields.get("expert_group_used_count", 1),
        }
    return values


def _read_granite_hybrid(fields: GGUFFields) -> dict[str, Any]:
    num_layers = fields.integer("block_count")
    counts_kv = fields.by_block("attention.head_count_kv", num_layers)
    values = common_values(fields, "granitemoehybrid") | attention_values(fields) | _block_mamba2(fields)
    head_dim = values["head_dim"]
    values |= {
        "layer_types": ["attention" if count else "mamba" for count in counts_kv],
        "attention_multiplier": fields.decimal("attention.scale") if fields.get("attention.scale") else head_dim**-0.5,
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned", False) else "nope",
    }
    if values["position_embedding_type"] == "rope":
        values["rope_parameters"] = rope_values(fields, head_dim)
    scales = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"}
    for name, key in (scales | {"logits_scaling": "logit_scale"}).items():
        values[name] = fields.decimal(key) if fields.get(key) else 1.0
    num_experts = fields.get("expert_count", 0)
    if not num_experts:
        return values | {"num_local_experts": 0, "shared_intermediate_size": fields.rows("blk.0.ffn_up.weight")}
    return values | {
        "num_local_experts": num_experts,
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "intermediate_size": fields.rows("blk.0.ffn_up_exps.weight"),
        "shared_intermediate_size": fields.rows("blk.0.ffn_up_shexp.weight"),
    }


def _read_falcon_h1(fields: GGUFFields) -> dict[str, Any]:
    if not fields.has("output.weight"):
        raise fields.refuse("a tied output head is not supported: the file lacks the multiplier of the logits")
    attention = attention_values(fields)
    return (
        common_values(fields, "falcon_h1")
        | attention
        | _block_mamba2(fields)
        | {
            "num_hidden_layers": fields.integer("block_count"),
            "intermediate_size": fields.integer("feed_forward_length"),
            "rope_parameters": rope_values(fields, attention["head_dim"]),
            "mamba_rms_norm": fields.has("blk.0.ssm_norm.weight"),
            "mamba_norm_before_gate": False,
            "projectors_bias": fields.has("blk.0.ssm_out.bias"),
            "mlp_bias": fields.has("blk.0.ffn_up.bias"),
        }
    )


def _read_gemma3(fields: GGUFFields) -> dict[str, Any]:
    attention = attention_values(fields)
    pattern = fields.get("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int):
        raise fields.refuse(f"attention.sliding_window_pattern must be one integer, not {pattern!r}")
    local_theta = float(fields.get("rope.freq_base_swa", 10000.0))
    return (
        common_values(fields, "gemma3_text")
        | attention
        | {
            "num_hidden_layers": fields.integer("block_count"),
            "intermediate_size": fields.integer("feed_forward_length"),
            "sliding_window": fields.integer("attention.sliding_window"),
            "sliding_window_pattern": pattern,
            "query_pre_attn_scalar": attention["head_dim"],
            "rope_parameters": {
                "full_attention": rope_values(fields, attention["head_dim"], 1000000.0),
                "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
            },
        }
    )


def _read_lfm2(fields: GGUFFields) -> dict[str, Any]:
    num_layers = fields.integer("block_count")
    counts_kv = fields.by_block("attention.head_count_kv", num_layers)
    attention = attention_values(fields)
    values = common_values(fields, "lfm2")
    return (
        values
        | attention
        | {
            "layer_types": ["full_attention" if count else "conv" for count in counts_kv],
            "norm_eps": values["rms_norm_eps"],
            "conv_L_cache": fields.integer("shortconv.l_cache"),
            "conv_bias": fields.any_block_has("shortconv.in_proj.bias"),
            "intermediate_size": fields.integer("feed_forward_length"),
            "block_auto_adjust_ff_dim": False,
            "rope_parameters": rope_values(fields, attention["head_dim"]),
        }
    )


_NEMOTRON_H = GGUFArchitecture(
    outer={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    layers="backbone.layers.",
    block={name: hf.replace("self_attn.", "mixer.") for name, hf in ATTENTION.items()}
    | _mamba2_block("mixer")
    | {"attn_norm": "norm", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"}
    | {"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"}
    | {"ffn_up_shexp": "mixer.shared_experts.up_proj", "ffn_down_shexp": "mixer.shared_experts.down_proj"}
    | {"ffn_gate_inp": "mixer.gate"},
    whole=_mamba2_whole("mixer")
    | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"}
    | {"ffn_up_exps.weight": "mixer.experts.up_proj", "ffn_down_exps.weight": "mixer.experts.down_proj"},
    read=_read_nemotron_h,
)


def _attention_blocks(model_type: str, *, has_side_by_side_pairs: bool = False) -> GGUFArchitecture:
    read = _read_attention_blocks(model_type)
    return GGUFArchitecture(LLAMA_OUTER, "model.layers.", LLAMA_BLOCK, {}, read, has_side_by_side_pairs)


ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": _attention_blocks("llama", has_side_by_side_pairs=True),
    "qwen2": _attention_blocks("qwen2"),
    "qwen3": _attention_blocks("qwen3"),
    "gemma3": GGUFArchitecture(
        outer=LLAMA_OUTER,
        layers="model.layers.",
        block=LLAMA_BLOCK
        | {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
        | {"post_ffw_norm": "post_feedforward_layernorm"},
        whole={},
        read=_read_gemma3,
        has_norms_around_zero=True,
    ),
    "mamba2": GGUFArchitecture(
        outer={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
        layers="backbone.layers.",
        block=_mamba2_block("mixer") | {"attn_norm": "norm"},
        whole=_mamba2_whole("mixer"),
        read=_read_mamba2,
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "granitehybrid": GGUFArchitecture(
        outer=LLAMA_OUTER,
        layers="model.layers.",
        block=ATTENTION
        | _mamba2_block("mamba")
        | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        | {"ffn_gate": "shared_mlp.gate_proj", "ffn_up": "shared_mlp.up_proj", "ffn_down": "shared_mlp.output_linear"}
        | {"ffn_gate_shexp": "shared_mlp.gate_proj", "ffn_up_shexp": "shared_mlp.up_proj"}
        | {"ffn_down_shexp": "shared_mlp.output_linear", "ffn_gate_inp": "block_sparse_moe.router"},
        whole=_mamba2_whole("mamba")
        | {f"ffn_{key}_exps.weight": f"block_sparse_moe.experts.{key}_proj" for key in ("gate", "up", "down")},
        read=_read_granite_hybrid,
        has_side_by_side_pairs=True,
    ),
    "falcon-h1": GGUFArchitecture(
        outer=LLAMA_OUTER | {"output_norm": "model.final_layernorm"},
        layers="model.layers.",
        block=ATTENTION
        | _mamba2_block("mamba")
        | {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
        | {f"ffn_{key}": f"feed_forward.{key}_proj" for key in ("gate", "up", "down")},
        # The converter writes this one norm without a suffix.
        whole=_mamba2_whole("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
        read=_read_falcon_h1,
    ),
    "lfm2": GGUFArchitecture(
        outer={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        layers="model.layers.",
        block=ATTENTION
        | {"attn_output": "self_attn.out_proj"}
        | {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
        | {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
        | {"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"}
        | {f"shortconv.{key}": f"conv.{key}" for key in ("in_proj", "conv", "out_proj")},
        whole={},
        read=_read_lfm2,
    ),
}
