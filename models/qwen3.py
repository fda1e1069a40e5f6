"""Qwen3: Llama's blocks with queries and keys normalised head by head. Configuration and tensor names only."""

from __future__ import annotations

from dataclasses import replace

from turnkeep.models.config import ConfigFields, ModelConfig
from turnkeep.models.llama import read_attention_blocks, weight_map
from turnkeep.models.mixer_fields import read_attention_kinds, read_rotated_attention

__all__ = ["read_config", "weight_map"]


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Qwen3 checkpoint. Raises ConfigError."""
    if fields.get("head_dim") is None:
        # Unlike its relatives, this family does not derive it.
        fields = ConfigFields({**fields.values, "head_dim": 128}, fields.model_type)
    attention = read_rotated_attention(fields, fields.integer("hidden_size"))
    return read_attention_blocks(fields, replace(attention, has_qk_norm=True), read_attention_kinds(fields))
