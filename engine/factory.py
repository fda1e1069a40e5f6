"""Builds an engine loop from its settings: finds the model, sizes the pools, loads the weights. Imports torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.config import resolve_cache_config
from turnkeep.cache.pool_content import TensorPoolContent
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.spec import CacheSpec
from turnkeep.cache.storage import CacheStorage
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.environment import default_memory_bytes, has_bf16_instructions, num_usable_cores
from turnkeep.engine.grammar import GrammarMatchers
from turnkeep.engine.loop import EngineLoop
from turnkeep.engine.messages import FromEngine, Loading, Ready
from turnkeep.engine.runner import Model, ModelRunner
from turnkeep.engine.sizing import PoolSizes, check_memory, engine_spec, size_pools
from turnkeep.engine.speculation.drafter import Drafter
from turnkeep.engine.speculation.head_drafter import HeadDrafter
from turnkeep.engine.speculation.prompt_lookup import PromptLookup
from turnkeep.engine.speculation.settings import NO_SPECULATION, Speculation, resolve_drafts
from turnkeep.engine.tier_building import build_tiers
from turnkeep.kernels.forward_batch import CacheTensors
from turnkeep.models.catalog import find_model
from turnkeep.models.config import ModelConfig
from turnkeep.models.decoder import Decoder
from turnkeep.models.draft_heads.loading import load_draft_head, quickest_dtype
from turnkeep.models.fingerprint import model_fingerprint
from turnkeep.models.model_source import ModelSource
from turnkeep.models.weights import load_model
from turnkeep.scheduler.acceptance import AcceptanceStatistics
from turnkeep.scheduler.config import SchedulerConfig
from turnkeep.scheduler.cost_model import StepCost, StepCostFile
from turnkeep.scheduler.scheduler import Scheduler
from turnkeep.scheduler.speculation_config import SpeculationConfig
from turnkeep.scheduler.tree_budget import TreeBudget

log = logging.getLogger(__name__)

CACHED_MODEL_BYTES = 32 << 20
DTYPES = ("bfloat16", "float32")


def build_engine(config: EngineConfig, outbox: Callable[[FromEngine], None]) -> tuple[EngineLoop, Ready]:
    """Load the configured model and make an engine of it; Loading events go to `outbox` meanwhile.

    Raises what stands in the way (ModelNotFound, WeightsError, NotEnoughMemory, ValueError), before the weights are
    read where that is possible.
    """
    outbox(Loading("model", 0, 1))
    source = find_model(config.model)
    model_config = ModelConfig.from_dict(source.config_dict())
    dtype = resolve_dtype(config.dtype)
    speculation = resolve_drafts(config, source, model_config)
    sizes = resolve_sizes(config, model_config, dtype, speculation)
    torch.set_num_threads(config.num_threads or num_usable_cores())

    def report(stage: str, done: int, total: int) -> None:
        outbox(Loading(stage, done, total))

    model = load_model(source, dtype=getattr(torch, dtype), progress=report)
    matchers = GrammarMatchers(source.tokenizer_json, model_config.vocab_size, sorted(source.eos_token_ids))
    matchers.prepare()
    make_drafter, budget = None, None
    if speculation.drafter is not None:
        make_drafter = head_drafter(source, model, config) if speculation.has_draft_head else _prompt_lookup
        budget = tree_budget(config, speculation.limits, f"{source.name} {dtype} {torch.get_num_threads()} threads")
    return assemble(
        model,
        model_config,
        config,
        sizes,
        dtype,
        outbox,
        model_name=source.name,
        matchers=matchers,
        fingerprint=model_fingerprint(source),
        speculation=speculation,
        make_drafter=make_drafter,
        budget=budget,
    )


def tree_budget(config: EngineConfig, limits: SpeculationConfig, engine_kind: str) -> TreeBudget:
    """With the costs that an earlier engine of the same kind measured, where they are kept."""
    kept = None if config.state_dir is None else StepCostFile(Path(config.state_dir) / "step_cost.json", engine_kind)
    cost = kept.load() if kept is not None else StepCost()
    # The other half of a step is for prompts.
    return TreeBudget(limits, cost, AcceptanceStatistics(), max(config.max_step_tokens // 2, 1), kept)


def _prompt_lookup(_: CacheTensors) -> Drafter:
    return PromptLookup()


def head_drafter(source: ModelSource, model: Decoder, config: EngineConfig) -> Callable[[CacheTensors], Drafter]:
    """The model's draft head, to draft over pools in which its layers come after the model's. Raises WeightsError."""
    head = load_draft_head(source, dtype=quickest_dtype(model.config, model.dtype))
    first = model.config.num_attention_layers
    threads = decode_threads(model, config.num_threads)
    return lambda tensors: HeadDrafter(model, head, tensors.kv[first:], config.page_size, threads)


def decode_threads(model: Model, num_threads: int | None) -> int | None:
    """One thread for the decode steps of a model that lies in the processor's caches, unless a number was asked for.

    Its matrix products are shorter than the handing out of their parts: the bundled model decodes half as fast again
    with one thread as with two. Prefill takes all threads in any case.
    """
    if num_threads is not None or not isinstance(model, torch.nn.Module):
        return None
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    return 1 if num_bytes <= CACHED_MODEL_BYTES else None


def resolve_dtype(dtype: str | None) -> str:
    """The weights' type. Raises ValueError for one that is not offered."""
    if dtype is None:
        return "bfloat16" if has_bf16_instructions() else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    return dtype


def resolve_sizes(
    config: EngineConfig, model_config: ModelConfig, dtype: str, speculation: Speculation = NO_SPECULATION
) -> PoolSizes:
    """Pool sizes for this machine. Raises NotEnoughMemory."""
    memory_bytes = default_memory_bytes() if config.memory_bytes is None else config.memory_bytes
    check_memory(memory_bytes)
    spec = _spec(model_config, config, dtype, speculation)
    return size_pools(spec, config, model_config.max_position_embeddings, memory_bytes)


def _spec(model_config: ModelConfig, config: EngineConfig, dtype: str, speculation: Speculation) -> CacheSpec:
    return engine_spec(
        model_config,
        config,
        dtype,
        has_draft_head=speculation.has_draft_head,
        history_capacity=speculation.history_capacity,
    )


def assemble(
    model: Model,
    model_config: ModelConfig,
    config: EngineConfig,
    sizes: PoolSizes,
    dtype: str,
    outbox: Callable[[FromEngine], None],
    *,
    model_name: str,
    matchers: GrammarMatchers | None = None,
    fingerprint: bytes | None = None,
    speculation: Speculation = NO_SPECULATION,
    make_drafter: Callable[[CacheTensors], Drafter] | None = None,
    budget: TreeBudget | None = None,
) -> tuple[EngineLoop, Ready]:
    """An engine loop around a model that is loaded already. fingerprint: names its weights for the disk tier.

    make_drafter: given where speculation is on; called with the pools, in which a draft head has layers of its own.
    budget: says how much is drafted; without one all that the speculation's limits allow.
    """
    spec = _spec(model_config, config, dtype, speculation)
    settings, cache_notices = resolve_cache_config(config.cache, has_state=spec.state is not None)
    config = msgspec.structs.replace(config, cache=settings)
    storage = CacheStorage(
        spec,
        num_pages=sizes.num_pages,
        num_state_rows=sizes.num_state_rows,
        num_history_slots=sizes.num_history_slots,
    )
    drafter = make_drafter(storage.tensors) if make_drafter is not None else None
    threads = decode_threads(model, config.num_threads)
    runner = ModelRunner(model, storage, config.page_size, matchers, threads, drafter)
    # What was put off comes before anything else that reads or writes the same rows and pages.
    content = TensorPoolContent(storage.tensors, settle=lambda: runner.settle(cache.drain_folds()))
    tiers = build_tiers(spec, config.cache, content, fingerprint, sizes.num_bytes)
    cost = PrefillCost()
    cache = CacheManager(
        spec,
        config.cache,
        num_pages=sizes.num_pages,
        num_state_rows=sizes.num_state_rows,
        num_history_slots=sizes.num_history_slots,
        clock=time.monotonic,
        cost=cost,
        tiers=tiers.tiers,
    )
    limits = SchedulerConfig(
        max_running=sizes.max_running,
        max_step_tokens=config.max_step_tokens,
        max_model_len=sizes.max_model_len,
        vocab_size=model_config.vocab_size,
        tree_grant=speculation.grant(sizes.max_running),
        drafts_from_tokens=drafter is not None and not drafter.needs_hidden,
    )
    scheduler = Scheduler(cache, limits, cost=cost, budget=budget)
    loop = EngineLoop(scheduler, runner, outbox)
    resource = f"{sizes.limiting_resource}; {tiers.summary}"
    log.info("%s in %s; %s", model_name, dtype, resource)
    notices = [*sizes.notices, *cache_notices, *speculation.notices, *tiers.notices]
    return loop, _ready(model_name, model_config, config, sizes, resource, notices)


def _ready(
    model_name: str,
    model_config: ModelConfig,
    config: EngineConfig,
    sizes: PoolSizes,
    resource: str,
    notices: list[str],
) -> Ready:
    """Tells what the engine is; what should not be missed is said here, once."""
    if not config.cache.prefix_caching:
        notices.append("prefix caching is off: every turn is computed anew")
    for notice in notices:
        log.warning("%s", notice)
    return Ready(
        model_name=model_name,
        vocab_size=model_config.vocab_size,
        max_model_len=sizes.max_model_len,
        page_size=config.page_size,
        num_pages=sizes.num_pages,
        num_state_rows=sizes.num_state_rows,
        max_running=sizes.max_running,
        limiting_resource=resource,
        notices=notices,
    )
