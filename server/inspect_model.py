"""What `turnkeep inspect` shows: the layers of a model by kind, what its cache costs, and how much fits in a memory.

Reads the model's config alone, so it answers at once and without weights. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from rich.console import Console
from rich.table import Table

from turnkeep.cache.spec import DTYPE_BYTES, CacheSpec
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.sizing import SNAPSHOTS_PER_CONVERSATION, engine_spec
from turnkeep.models.config import KINDS_WITH_KV, KINDS_WITH_STATE, ModelConfig
from turnkeep.models.draft_heads.presence import why_no_draft_head
from turnkeep.models.model_source import ModelSource
from turnkeep.models.registry import draft_weight_map, weight_map
from turnkeep.server.config import format_size


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """All layers of one kind. Bytes and parameters are those of the whole group."""

    kind: str
    count: int
    num_parameters: int
    kv_bytes_per_token: int
    snapshot_bytes: int


@dataclass(frozen=True, slots=True)
class Fit:
    """How many conversations of a length fit at once, each with the two snapshots that its next turn may need."""

    num_tokens: int
    bytes_each: int
    num_conversations: int


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The answer of `inspect_model`; `num_active_parameters` counts what one token goes through."""

    name: str
    model_type: str
    dtype: str
    kv_dtype: str
    state_dtype: str
    max_model_len: int
    num_parameters: int
    num_active_parameters: int
    weight_bytes: int
    layers: tuple[LayerGroup, ...]
    kv_bytes_per_token: int
    snapshot_bytes: int
    page_size: int
    memory_bytes: int
    fits: tuple[Fit, ...]
    draft_head: LayerGroup | None  # what the head adds to all of these where it is used; `count` is that of its layers


def inspect_model(
    source: ModelSource, config: EngineConfig, *, dtype: str, memory_bytes: int, lengths: Sequence[int]
) -> ModelReport:
    """Sizes of a model's layers and cache under these settings, for conversations of each of `lengths` tokens.

    Raises ConfigError and ModelFilesError for a model that cannot be served, ValueError for a pool type.
    """
    model = ModelConfig.from_dict(source.config_dict())
    spec = engine_spec(model, config, dtype)
    parameters = _parameters(model)
    total = sum(parameters.values())
    return ModelReport(
        name=source.name,
        model_type=model.model_type,
        dtype=dtype,
        kv_dtype=config.kv_dtype or dtype,
        state_dtype=config.state_dtype,
        max_model_len=model.max_position_embeddings,
        num_parameters=total,
        num_active_parameters=total - _idle_parameters(model, parameters),
        weight_bytes=total * DTYPE_BYTES[dtype],
        layers=_layer_groups(model, spec, parameters),
        kv_bytes_per_token=spec.kv.bytes_per_token if spec.kv else 0,
        snapshot_bytes=spec.bytes_per_row,
        page_size=spec.page_size,
        memory_bytes=memory_bytes,
        fits=tuple(_fit(spec, length, memory_bytes) for length in lengths if length <= model.max_position_embeddings),
        draft_head=_draft_head(source, model, spec, engine_spec(model, config, dtype, has_draft_head=True)),
    )


def _parameters(model: ModelConfig) -> dict[str, int]:
    """Number of elements of each parameter of the decoder, by its name."""
    sources = weight_map(model).sources
    return {name: sum(prod(part.shape) for part in source.parts) for name, source in sources.items()}


def _draft_head(source: ModelSource, model: ModelConfig, spec: CacheSpec, with_head: CacheSpec) -> LayerGroup | None:
    names = draft_weight_map(model)
    if names is None or why_no_draft_head(source, model) is not None:
        return None
    num_parameters = sum(prod(part.shape) for source in names.sources.values() for part in source.parts)
    kv_bytes = (with_head.bytes_per_page - spec.bytes_per_page) // spec.page_size
    snapshot_bytes = with_head.bytes_per_row - spec.bytes_per_row
    return LayerGroup("draft_head", len(model.draft_kinds), num_parameters, kv_bytes, snapshot_bytes)


def _idle_parameters(model: ModelConfig, parameters: dict[str, int]) -> int:
    """What a token does not go through: the experts that are not chosen for it."""
    if model.moe is None:
        return 0
    experts = sum(count for name, count in parameters.items() if ".mixer.experts_" in name)
    return experts - experts * model.moe.num_chosen // model.moe.num_experts


def _layer_groups(model: ModelConfig, spec: CacheSpec, parameters: dict[str, int]) -> tuple[LayerGroup, ...]:
    by_layer: Counter[str] = Counter()
    for name, count in parameters.items():
        # "layers.3.mixer.in_proj_weight" belongs to the kind of layer 3, "embedding" to no layer.
        parts = name.split(".")
        by_layer[model.layer_kinds[int(parts[1])] if parts[0] == "layers" else "embeddings"] += count
    groups = [LayerGroup("embeddings", 1, by_layer["embeddings"], 0, 0)]
    for kind in dict.fromkeys(model.layer_kinds):
        count = model.layer_kinds.count(kind)
        kv_bytes = snapshot_bytes = 0
        if spec.kv is not None and kind in KINDS_WITH_KV:
            kv_bytes = spec.kv.bytes_per_token * count // spec.kv.num_layers
        if kind in KINDS_WITH_STATE:
            snapshot_bytes = spec.bytes_per_row * count // model.num_recurrent_layers
        groups.append(LayerGroup(kind, count, by_layer[kind], kv_bytes, snapshot_bytes))
    return tuple(groups)


def _fit(spec: CacheSpec, num_tokens: int, memory_bytes: int) -> Fit:
    pages = -(-num_tokens // spec.page_size)
    each = pages * spec.bytes_per_page + SNAPSHOTS_PER_CONVERSATION * spec.bytes_per_row
    # Page 0 and row 0 are reserved, and whoever runs needs a live row beside its snapshots: one here.
    usable = memory_bytes - spec.bytes_per_page - 2 * spec.bytes_per_row
    return Fit(num_tokens, each, max(usable // max(each, 1), 0))


def report_json(report: ModelReport) -> dict[str, Any]:
    """The report as a JSON object; field names carry the units."""
    return asdict(report)


def print_report(report: ModelReport, console: Console) -> None:
    """The report as tables."""
    active = report.num_active_parameters
    parameters = f"{_count(report.num_parameters)} parameters"
    if active != report.num_parameters:
        parameters += f", {_count(active)} of them for each token"
    console.print(f"[bold]{report.name}[/bold] ({report.model_type}): {parameters}", highlight=False)
    console.print(f"weights: about {format_size(report.weight_bytes)} in {report.dtype}", highlight=False)
    console.print(f"longest conversation: {report.max_model_len} tokens", highlight=False)
    layers = Table("layers", *("count", "parameters", "KV per token", "snapshot"), title="Layers by kind")
    for group in report.layers:
        sizes = (group.kv_bytes_per_token, group.snapshot_bytes)
        cells = [format_size(size) if size else "-" for size in sizes]
        layers.add_row(group.kind, str(group.count), _count(group.num_parameters), *cells)
    together = (format_size(report.kv_bytes_per_token), format_size(report.snapshot_bytes))
    layers.add_row("together", "", _count(report.num_parameters), *together)
    console.print(layers)
    head = report.draft_head
    if head is not None:
        console.print(
            f"A draft head of {head.count} layers adds, where it is used, {_count(head.num_parameters)} parameters, "
            f"{format_size(head.kv_bytes_per_token)} of KV per token, {format_size(head.snapshot_bytes)} a snapshot.",
            highlight=False,
        )
    fits = Table("tokens", "bytes each", "conversations", title=f"What fits in {format_size(report.memory_bytes)}")
    for fit in report.fits:
        fits.add_row(str(fit.num_tokens), format_size(fit.bytes_each), str(fit.num_conversations))
    console.print(fits)
    console.print(
        f"Keys and values in {report.kv_dtype}, states in {report.state_dtype}, pages of {report.page_size} tokens; a "
        f"conversation keeps {SNAPSHOTS_PER_CONVERSATION} snapshots.",
        highlight=False,
    )


def _count(number: int) -> str:
    for limit, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)
