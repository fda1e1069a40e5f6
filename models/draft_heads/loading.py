"""The weights of a draft head, and whether a checkpoint has all of them."""

from __future__ import annotations

from math import prod

import torch

from turnkeep.models.checkpoint_files import Checkpoint, TensorsInMemory, WeightsError, open_checkpoint
from turnkeep.models.config import ModelConfig
from turnkeep.models.draft_heads.draft_head import DraftHead
from turnkeep.models.draft_heads.presence import missing_tensors
from turnkeep.models.model_source import ModelSource
from turnkeep.models.registry import draft_weight_map
from turnkeep.models.weights import fill_parameters, model_dtype, random_map_tensors, stored_map

# A head of at most so many bytes in float32 lies in the processor's caches.
CACHED_HEAD_BYTES = 16 << 20


def quickest_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The weights' type in which the head of a model in `dtype` drafts quickest on a CPU.

    A draft is a row of passes of one token or a few, and such products are quicker in float32 than in bfloat16 as long
    as it is not memory that they wait for: the bundled model's head takes 0.19 ms a token instead of 0.33.
    """
    names = draft_weight_map(config)
    parts = [part for source in names.sources.values() for part in source.parts] if names is not None else []
    return torch.float32 if 4 * sum(prod(part.shape) for part in parts) <= CACHED_HEAD_BYTES else dtype


def load_draft_head(source: ModelSource, *, dtype: torch.dtype | str, device: str | torch.device = "cpu") -> DraftHead:
    """The draft head of a model that has one (`presence.why_no_draft_head`), with weights in `dtype`.

    Raises ConfigError, ModelFilesError and ValueError as `load_model` does, and WeightsError for a head that is
    missing, or whose tensors are missing or of other shapes.
    """
    config = ModelConfig.from_dict(source.config_dict())
    return fill_draft_head(config, open_checkpoint(source), dtype=dtype, device=device)


def fill_draft_head(
    config: ModelConfig, checkpoint: Checkpoint, *, dtype: torch.dtype | str, device: str | torch.device = "cpu"
) -> DraftHead:
    """The draft head of a model of this configuration with the checkpoint's tensors. Raises WeightsError."""
    names = draft_weight_map(config)
    if names is None:
        raise WeightsError(f"the config of model type {config.model_type!r} tells of no draft head")
    shapes = checkpoint.shapes()
    missing = missing_tensors(names, shapes)
    if missing:
        raise WeightsError(f"tensors of the draft head are missing: {', '.join(missing)}", missing=missing)
    names, stored = stored_map(names, shapes)
    misshapen = tuple(
        f"{part.name}: {list(shapes[stored[part.name]])} instead of {list(part.shape)}"
        for source in names.sources.values()
        for part in source.parts
        if shapes[stored[part.name]] != part.shape
    )
    if misshapen:
        raise WeightsError(f"tensors of the draft head do not fit: {'; '.join(misshapen)}", misshapen=misshapen)
    with torch.device(device):
        head = DraftHead(config.of_draft_head(), model_dtype(dtype)).to(device)
    fill_parameters(head, names, checkpoint, stored)
    return head.eval()


def random_draft_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Seeded float32 tensors of the draft head under their checkpoint names; none where there is no head."""
    names = draft_weight_map(config)
    return {} if names is None else random_map_tensors(names, seed)


def random_draft_head(config: ModelConfig, seed: int, *, dtype: torch.dtype | str = "float32") -> DraftHead:
    """A draft head with seeded random weights, equal on every machine."""
    return fill_draft_head(config, TensorsInMemory(random_draft_tensors(config, seed)), dtype=dtype)
