"""Whether a model has a draft head that can be used: told by its config and the names of its tensors. Torch-free, so
that pools can be sized before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable

from turnkeep.models.config import ModelConfig
from turnkeep.models.model_source import ModelSource
from turnkeep.models.registry import draft_weight_map
from turnkeep.models.weight_map import WeightMap

MAX_LISTED = 5


def why_no_draft_head(source: ModelSource, config: ModelConfig) -> str | None:
    """Why the model has no draft head, for a person to read; None when it has one.

    Raises ModelFilesError for weights whose names cannot be read.
    """
    names = draft_weight_map(config)
    if names is None:
        return f"models of type {config.model_type!r} with this config have no draft head"
    missing = missing_tensors(names, source.tensor_names())
    if not missing:
        return None
    needed = {part.name for source in names.sources.values() for part in source.parts}
    if len(missing) == len(needed):
        return f"the checkpoint has no draft head: it has none of its tensors (looked for {missing[0]} and others)"
    listed = ", ".join(missing[:MAX_LISTED]) + (", ..." if len(missing) > MAX_LISTED else "")
    return f"the checkpoint's draft head lacks {len(missing)} of its tensors: {listed}"


def missing_tensors(names: WeightMap, stored: Iterable[str]) -> tuple[str, ...]:
    """The tensors of a map that are not stored under any of their spellings, nor made up for by another layout."""
    have = {names.canonical(name) for name in stored}
    missing: list[str] = []
    for parameter, source in names.sources.items():
        layouts = (source, *names.alternatives.get(parameter, ()))
        if not any(all(part.name in have for part in layout.parts) for layout in layouts):
            missing += [part.name for part in source.parts if part.name not in have]
    return tuple(missing)
