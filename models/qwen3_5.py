"""Qwen3.5, the text model: the blocks of Qwen3-Next, dense or with experts, projections in tensors of their own.

Configuration and tensor names only. Of a checkpoint with a vision tower the text part is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from turnkeep.models.config import ConfigFields, LayerKind, ModelConfig
from turnkeep.models.qwen3_next import (
    NAMES,
    delta_draft_weight_map,
    delta_weight_map,
    read_delta_blocks,
    read_experts,
)
from turnkeep.models.weight_map import WeightMap


def read_config(fields: ConfigFields) -> ModelConfig:
    """The configuration of a Qwen3.5 checkpoint. Raises ConfigError."""
    ties_by_default = False
    text = fields.get("text_config")
    if text is not None:
        if not isinstance(text, Mapping):
            raise fields.error(f"field 'text_config' must be an object, not {text!r}")
        ties_by_default = fields.flag("tie_word_embeddings", default=False)
        fields = ConfigFields(text, fields.model_type)
    has_experts = "moe" in fields.model_type
    channel: LayerKind = "moe" if has_experts else "mlp"
    moe = None
    if has_experts:
        with_default = ConfigFields({"num_experts": 256, **fields.values}, fields.model_type)
        moe = read_experts(with_default, 8, normalises=True)
    channels = [channel] * fields.integer("num_hidden_layers")
    num_draft_blocks = fields.integer("mtp_num_hidden_layers", default=0, minimum=0)
    return read_delta_blocks(fields, channels, moe, num_draft_blocks=num_draft_blocks, ties_by_default=ties_by_default)


def weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Qwen3.5 checkpoint."""
    return delta_weight_map(config, replace(NAMES, delta_by_key_head=False))


def draft_weight_map(config: ModelConfig) -> WeightMap:
    """Tensor names of a Qwen3.5 draft head; `config` has the head's layers as its own."""
    return delta_draft_weight_map(config, NAMES)
