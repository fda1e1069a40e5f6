"""An engine that follows a script, behind the same loop, scheduler and cache as a model: no weights, no torch.

Its spec is that of a hybrid model, one attention and one recurrent layer, so pages and state rows are short where a
model's would be. The tokenizer and the template are a model's, or the bundled ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.config import resolve_cache_config
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.loop import EngineLoop
from turnkeep.engine.messages import FromEngine, Loading, Ready
from turnkeep.engine.script import Script, ScriptError, load_script
from turnkeep.engine.scripted_prompt import THINK
from turnkeep.engine.scripted_runner import AnswerWriter, ScriptedRunner
from turnkeep.engine.sizing import PoolSizes, size_pools
from turnkeep.engine.tier_building import build_tiers
from turnkeep.models.catalog import find_model
from turnkeep.models.demo import rendering
from turnkeep.models.hf_folder import HFFolder
from turnkeep.scheduler.config import SchedulerConfig
from turnkeep.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from turnkeep.models.model_source import ModelSource

BUNDLED = "demo"
DEFAULT_MAX_RUNNING = 512
DEFAULT_MEMORY_BYTES = 16 * 2**20
SHORT_TOOL, WHOLE_TOOL = "signature(tool) -}}", "(tool | tojson) -}}"


class BundledText(HFFolder):
    """The bundled tokenizer, with a template that shows tools whole: a script must know what fits their schemas."""

    def __init__(self) -> None:
        super().__init__("scripted", rendering.DIRECTORY)

    def chat_template(self, name: str | None = None) -> str | None:
        template = super().chat_template(name)
        return template if template is None else template.replace(SHORT_TOOL, WHOLE_TOOL)


def text_source(config: EngineConfig) -> ModelSource:
    """Where tokenizer and template come from: the model's own files, or for a script also a folder without weights.

    Raises ModelNotFound, ModelFilesError.
    """
    if config.script is None:
        return find_model(config.model)
    folder = Path(config.model).expanduser()
    if config.model == BUNDLED:
        return BundledText()
    if folder.is_dir() and (folder / "tokenizer.json").is_file():
        return HFFolder(folder.resolve().name, folder)
    return find_model(config.model)


def scripted_spec(page_size: int) -> CacheSpec:
    """One attention and one recurrent layer: 4 bytes a token, 16 bytes a state row."""
    state = StateSpec((StatePart("checksum", 1, (2, 2), "float32"),))
    return CacheSpec(page_size=page_size, kv=KVSpec(1, 1, 1, "bfloat16"), state=state)


def build_scripted_engine(config: EngineConfig, outbox: Callable[[FromEngine], None]) -> tuple[EngineLoop, Ready]:
    """An engine loop that follows `config.script`. Raises ScriptError, ModelNotFound, NotEnoughMemory."""
    assert config.script is not None
    outbox(Loading("script", 0, 1))
    script = load_script(Path(config.script))
    source = text_source(config)
    writer = _writer(source, script)
    vocab_size = writer.vocab_size
    spec = scripted_spec(config.page_size)
    sizes = _sizes(spec, config, script.max_model_len)
    runner = ScriptedRunner(
        writer,
        script,
        num_pages=sizes.num_pages,
        num_state_rows=sizes.num_state_rows,
        page_size=config.page_size,
        vocab_size=vocab_size,
        start_number=config.start_number,
    )
    settings, cache_notices = resolve_cache_config(config.cache, has_state=spec.state is not None)
    tiers = build_tiers(spec, settings, runner.pool_content(), b"scripted", sizes.num_bytes)
    cost = PrefillCost()
    cache = CacheManager(
        spec,
        settings,
        num_pages=sizes.num_pages,
        num_state_rows=sizes.num_state_rows,
        clock=time.monotonic,
        cost=cost,
        tiers=tiers.tiers,
    )
    limits = SchedulerConfig(
        max_running=sizes.max_running,
        max_step_tokens=max(config.max_step_tokens, 2 * sizes.max_running),
        max_model_len=sizes.max_model_len,
        vocab_size=vocab_size,
    )
    ready = Ready(
        model_name=source.name,
        vocab_size=vocab_size,
        max_model_len=sizes.max_model_len,
        page_size=config.page_size,
        num_pages=sizes.num_pages,
        num_state_rows=sizes.num_state_rows,
        max_running=sizes.max_running,
        limiting_resource=f"a script instead of a model; {sizes.limiting_resource}; {tiers.summary}",
        notices=[*sizes.notices, *cache_notices, *tiers.notices],
    )
    return EngineLoop(Scheduler(cache, limits, cost=cost), runner, outbox), ready


def _writer(source: ModelSource, script: Script) -> AnswerWriter:
    if not source.eos_token_ids:
        raise ScriptError(f"the tokenizer of {source.name} names no end token (eos_token)")
    template = source.chat_template() or ""
    writer = AnswerWriter(
        script,
        source.tokenizer_json(),
        end_token_id=source.eos_token_ids[0],
        has_reasoning=THINK in template,
    )
    for number, rule in enumerate(script.rules):
        if any(not 0 <= token_id < writer.vocab_size for token_id in rule.token_ids or ()):
            raise ScriptError(f"rules[{number}].token_ids: a token id is at least 0 and less than {writer.vocab_size}")
    return writer


def _sizes(spec: CacheSpec, config: EngineConfig, script_max_len: int) -> PoolSizes:
    """Many requests run by default: a script costs next to nothing. Raises NotEnoughMemory."""
    memory_bytes = DEFAULT_MEMORY_BYTES if config.memory_bytes is None else config.memory_bytes
    if config.max_running is None:
        config = msgspec.structs.replace(config, max_running=DEFAULT_MAX_RUNNING)
    return size_pools(spec, config, script_max_len, memory_bytes)
