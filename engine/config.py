"""The engine's settings, resolved once by the command line and sent to the engine process as its first message."""

from __future__ import annotations

from typing import Literal

import msgspec

from turnkeep.cache.config import CacheConfig

SpeculationMode = Literal["off", "auto", "mtp", "ngram"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every field has a working default; None means "decide from the machine and the model, and log it"."""

    model: str  # folder, GGUF file, or a catalog name ("demo", "smollm2")
    dtype: str | None = None  # "bfloat16", "float32"; None: bfloat16 where the CPU has instructions for it
    kv_dtype: str | None = None  # of keys and values, "bfloat16" or "float32"; None: that of the weights
    state_dtype: str = "float32"  # of recurrent states; "bfloat16" and "float16": smaller ones, rounded on a grid
    max_running: int | None = None  # requests that may run at once
    max_model_len: int | None = None  # tokens of prompt + output; None: the model's own limit
    memory_bytes: int | None = None  # for pages and state rows together; None: a share of what is free
    num_pages: int | None = None  # overrides the split of memory_bytes (tests, experiments)
    num_state_rows: int | None = None
    page_size: int = 16
    max_step_tokens: int = 512  # tokens computed in one step: prefill chunks share it with decodes
    speculation: SpeculationMode = "auto"  # who drafts; "auto": the model's own draft head, where it has one
    max_draft_len: int | None = None  # levels of a draft tree; None here and below: scheduler/speculation_config.py
    dynamic_tree_max_topk: int | None = None  # children of a node
    max_total_draft_tokens: int | None = None  # nodes of one request's tree, without its root
    num_threads: int | None = None  # None: all cores
    cache: CacheConfig = CacheConfig()
    state_dir: str | None = None  # where an engine keeps what steps cost, for the next one; None: learnt anew
    script: str | None = None  # a file with rules that take the place of the model; `model` is then only its text
    start_number: int = 0  # engines that the server had started before this one
