"""Qwen2 and Qwen2.5: Llama's blocks with biases on q, k and v. Configuration and tensor names only."""

from __future__ import annotations

from dataclasses import replace

from turnkeep.models.config import ConfigFields, ModelConfig
from turnkeep.models.llama import read_attention_blocks, weight_map
from turnkeep.models.mixer_fields import read_attention_kinds, read_rotated_attention

__all__ = ["read_config", "weight_map"]


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Qwen2 checkpoint. Raises ConfigError."""
    attention = read_rotated_attention(fields, fields.integer("hidden_size"))
    return read_attention_blocks(
        fields, replace(attention, has_bias=True, has_out_bias=False), read_attention_kinds(fields)
    )
