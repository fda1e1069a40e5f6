"""Model types by the name in a checkpoint's config: where a configuration and its weight names come from.

Torch-free. A model type is one module with `read_config` and `weight_map`; the mixers are shared by all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from turnkeep.models import (
    bamba,
    falcon_h1,
    gemma3,
    granite_hybrid,
    lfm2,
    llama,
    mamba2,
    nemotron_h,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_next,
)
from turnkeep.models.config import ConfigError, ConfigFields, ModelConfig
from turnkeep.models.weight_map import WeightMap


@dataclass(frozen=True, slots=True)
class ModelType:
    """How one family of checkpoints is read: its config fields, its tensor names, and those of its draft head."""

    read_config: Callable[[ConfigFields], ModelConfig]
    weight_map: Callable[[ModelConfig], WeightMap]
    draft_weight_map: Callable[[ModelConfig], WeightMap] | None = None  # of a config whose layers are the head's


MODEL_TYPES: dict[str, ModelType] = {
    "bamba": ModelType(bamba.read_config, bamba.weight_map),
    "falcon_h1": ModelType(falcon_h1.read_config, falcon_h1.weight_map),
    "gemma3_text": ModelType(gemma3.read_config, gemma3.weight_map),
    "granitemoehybrid": ModelType(granite_hybrid.read_config, granite_hybrid.weight_map),
    "lfm2": ModelType(lfm2.read_config, lfm2.weight_map),
    "llama": ModelType(llama.read_config, llama.weight_map),
    "mamba2": ModelType(mamba2.read_config, mamba2.weight_map),
    "nemotron_h": ModelType(nemotron_h.read_config, nemotron_h.weight_map, nemotron_h.draft_weight_map),
    "qwen2": ModelType(qwen2.read_config, qwen2.weight_map),
    "qwen3": ModelType(qwen3.read_config, qwen3.weight_map),
    "qwen3_5": ModelType(qwen3_5.read_config, qwen3_5.weight_map, qwen3_5.draft_weight_map),
    "qwen3_5_moe": ModelType(qwen3_5.read_config, qwen3_5.weight_map, qwen3_5.draft_weight_map),
    "qwen3_5_moe_text": ModelType(qwen3_5.read_config, qwen3_5.weight_map, qwen3_5.draft_weight_map),
    "qwen3_5_text": ModelType(qwen3_5.read_config, qwen3_5.weight_map, qwen3_5.draft_weight_map),
    "qwen3_next": ModelType(qwen3_next.read_config, qwen3_next.weight_map, qwen3_next.draft_weight_map),
}


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration in a Hugging Face config dict. Raises ConfigError, also for an unknown model type."""
    name = values.get("model_type")
    if not isinstance(name, str):
        raise ConfigError("the config has no model_type")
    model_type = MODEL_TYPES.get(name)
    if model_type is None:
        raise ConfigError(f"model type {name!r} is not supported (supported: {', '.join(sorted(MODEL_TYPES))})")
    return model_type.read_config(ConfigFields(values, name))


def weight_map(config: ModelConfig) -> WeightMap:
    """The checkpoint tensors of every parameter of a decoder with this configuration."""
    return MODEL_TYPES[config.model_type].weight_map(config)


def draft_weight_map(config: ModelConfig) -> WeightMap | None:
    """The checkpoint tensors of every parameter of the draft head, None where the config tells of no head."""
    model_type = MODEL_TYPES[config.model_type]
    if not config.draft_kinds or model_type.draft_weight_map is None:
        return None
    return model_type.draft_weight_map(config.of_draft_head())
