"""The GGUF architectures of gated delta nets: Qwen3-Next, and Qwen3.5 dense and with experts. Torch-free.

Their files hold q, k and v in one tensor and the gate in another. Those of Qwen3.5 hold value heads in another order
than Hugging Face: the first of every key head, then the second of every key head, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from turnkeep.models.gguf_architectures import (
    LLAMA_BLOCK,
    LLAMA_OUTER,
    GGUFArchitecture,
    attention_values,
    common_values,
    rope_values,
)
from turnkeep.models.gguf_fields import GGUFFields, num_own_blocks


def _read(model_type: str) -> Callable[[GGUFFields], dict[str, Any]]:
    def read(fields: GGUFFields) -> dict[str, Any]:
        attention = attention_values(fields)
        num_heads = fields.integer("ssm.time_step_rank")
        rotary_dim = fields.integer("rope.dimension_count")
        rope = rope_values(fields, rotary_dim) | {"partial_rotary_factor": rotary_dim / attention["head_dim"]}
        blocks = range(num_own_blocks(fields))
        is_linear = [fields.has(f"blk.{block}.ssm_out.weight") for block in blocks]
        values = common_values(fields, model_type) | attention
        values |= {
            "num_hidden_layers": len(blocks),
            "layer_types": ["linear_attention" if linear else "full_attention" for linear in is_linear],
            "rope_parameters": rope,
            "linear_num_key_heads": fields.integer("ssm.group_count"),
            "linear_num_value_heads": num_heads,
            "linear_key_head_dim": fields.integer("ssm.state_size"),
            "linear_value_head_dim": fields.integer("ssm.inner_size") // max(num_heads, 1),
            "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
        }
        if not fields.get("expert_count"):
            return values | {"num_experts": 0, "intermediate_size": fields.integer("feed_forward_length")}
        return values | {
            "num_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.rows("blk.0.ffn_up_exps.weight"),
            "shared_expert_intermediate_size": fields.rows("blk.0.ffn_up_shexp.weight"),
        }

    return read


_QWEN3_NEXT = GGUFArchitecture(
    outer=LLAMA_OUTER,
    layers="model.layers.",
    block=LLAMA_BLOCK
    | {"post_attention_norm": "post_attention_layernorm"}
    | {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_ba": "linear_attn.in_proj_ba"}
    | {"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a"}
    | {f"ssm_{key}": f"linear_attn.{name}" for key, name in (("conv1d", "conv1d"), ("norm", "norm"))}
    | {"ssm_out": "linear_attn.out_proj"}
    | {"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
    | {f"ffn_{key}_shexp": f"mlp.shared_expert.{key}_proj" for key in ("gate", "up", "down")},
    whole={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
    | {f"ffn_{key}_exps.weight": f"mlp.experts.{key}_proj" for key in ("gate", "up", "down")},
    read=_read("qwen3_next"),
    has_norms_around_zero=True,
)
GATED_DELTA_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "qwen3next": _QWEN3_NEXT,
    "qwen35": replace(_QWEN3_NEXT, read=_read("qwen3_5_text"), has_tiled_value_heads=True),
    "qwen35moe": replace(_QWEN3_NEXT, read=_read("qwen3_5_moe_text"), has_tiled_value_heads=True),
}


def value_head_order(fields: GGUFFields, stored: str) -> tuple[int, npt.NDArray[np.int64]] | None:
    """How to put the value heads of the tensor called `stored` back: along which dimension, and which element of the
    file comes where. None for tensors that hold none."""
    num_keys, num_heads = fields.integer("ssm.group_count"), fields.integer("ssm.time_step_rank")
    width = fields.integer("ssm.inner_size") // num_heads
    heads = np.arange(num_heads).reshape(-1, num_keys).T.ravel()  # where each head of Hugging Face's lies
    rest = stored.split(".", 2)[-1]
    if rest in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
        return 0, heads
    channels = (heads[:, None] * width + np.arange(width)).ravel()
    if rest == "attn_gate.weight":
        return 0, channels
    if rest in ("attn_qkv.weight", "ssm_conv1d.weight"):
        num_before = 2 * num_keys * fields.integer("ssm.state_size")  # q and k stay where they are
        return 0, np.concatenate((np.arange(num_before), num_before + channels))
    return (1, channels) if rest == "ssm_out.weight" else None
