"""How much fits: from the model's shapes and the memory to pages, state rows and running requests.

Torch-free. Done before the weights are loaded, so that a machine which is too small is told so at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from turnkeep.cache.spec import CacheSpec, HistorySpec, KVSpec, StatePart, StateSpec
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.environment import available_memory_bytes
from turnkeep.models.config import ModelConfig

MIB = 1024 * 1024
POOL_DTYPES = ("bfloat16", "float32")
STATE_DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_MAX_RUNNING = 16
MIN_USEFUL_TOKENS = 256  # one request must have room for this many, else the engine does not start
TYPICAL_TOKENS = 2048  # of one conversation; decides how memory is split between pages and rows
SNAPSHOTS_PER_CONVERSATION = 2  # the last turn_start and the last turn_end
LEAST_ROWS_TO_HIT = 2  # a live one and that of the snapshot it goes on from
SPARE_ROWS = 2  # shared trunk, and the one that is being written when another is let go
MAX_POOL_PAGES = 1 << 20
MAX_POOL_ROWS = 1 << 16


class NotEnoughMemory(ValueError):
    """The memory holds not even one request of a useful length; the message has the numbers."""


def check_memory(memory_bytes: int) -> None:
    """Pools take memory only where they are written, so too much of it would show as a kill under load, hours later.

    Raises NotEnoughMemory with both numbers.
    """
    available = available_memory_bytes()
    if available is not None and memory_bytes > available:
        raise NotEnoughMemory(
            f"not enough memory: the cache is to take {memory_bytes / MIB:,.0f} MiB, the machine has "
            f"{available / MIB:,.0f} MiB available"
        )


@dataclass(slots=True, frozen=True)
class PoolSizes:
    """num_pages and num_state_rows include the reserved first one; the rest is what the scheduler may use."""

    num_pages: int
    num_state_rows: int
    num_history_slots: int
    max_running: int
    max_model_len: int
    num_bytes: int
    limiting_resource: str
    notices: tuple[str, ...]


def cache_spec(
    config: ModelConfig,
    page_size: int,
    dtype: str,
    *,
    kv_dtype: str | None = None,
    state_dtype: str = "float32",
    has_draft_head: bool = False,
    history_capacity: int = 0,
) -> CacheSpec:
    """What the pools of this model hold: keys and values in `kv_dtype`, else in the weights' `dtype`.

    has_draft_head: its layers' keys and values come after those of the model, and a row has one more part for it.
    history_capacity: tokens of a running request's replay history, where drafts are verified.

    Raises ValueError for a type that pools cannot have.
    """
    for name, value, allowed in (
        ("kv_dtype", kv_dtype or dtype, POOL_DTYPES),
        ("state_dtype", state_dtype, STATE_DTYPES),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    shapes, num_kv_layers = config.state_parts(state_dtype, dtype), config.num_attention_layers
    if has_draft_head:
        shapes += (config.draft_part("float32" if state_dtype == "float32" else dtype),)
        num_kv_layers += config.num_draft_kv_layers
    parts = tuple(StatePart(part.name, part.num_layers, tuple(part.shape), part.dtype) for part in shapes)
    kv = None
    if num_kv_layers:
        kv = KVSpec(num_kv_layers, config.num_kv_heads, config.head_dim, kv_dtype or dtype)
    history = None
    if history_capacity and parts:
        kept = config.history_parts(history_capacity, dtype, has_draft_head=has_draft_head)
        history = HistorySpec(history_capacity, tuple(StatePart(*part) for part in kept))
    return CacheSpec(page_size=page_size, kv=kv, state=StateSpec(parts) if parts else None, history=history)


def engine_spec(
    model: ModelConfig, config: EngineConfig, dtype: str, *, has_draft_head: bool = False, history_capacity: int = 0
) -> CacheSpec:
    """`cache_spec` with the settings of an engine whose weights are in `dtype`."""
    return cache_spec(
        model,
        config.page_size,
        dtype,
        kv_dtype=config.kv_dtype,
        state_dtype=config.state_dtype,
        has_draft_head=has_draft_head,
        history_capacity=history_capacity,
    )


def size_pools(spec: CacheSpec, config: EngineConfig, model_max_len: int, memory_bytes: int) -> PoolSizes:
    """Split `memory_bytes` between pages and state rows.

    `config` may name any of the numbers itself; what it asks for is met, lowered with a notice, or refused.
    Raises NotEnoughMemory when one request of a useful length does not fit, or not the max_model_len asked for.
    """
    return _Sizing(spec, config, model_max_len, memory_bytes).sizes()


class _Sizing:
    def __init__(self, spec: CacheSpec, config: EngineConfig, model_max_len: int, memory_bytes: int) -> None:
        self._spec = spec
        self._config = config
        self._memory_bytes = memory_bytes
        self._notices: list[str] = []
        self._max_len = min(config.max_model_len or model_max_len, model_max_len)
        if config.max_model_len is not None and config.max_model_len > model_max_len:
            self._notices.append(f"max_model_len {config.max_model_len} lowered to the model's own {model_max_len}")

    def sizes(self) -> PoolSizes:
        spec, config = self._spec, self._config
        self._check_one_request_fits()
        wanted = config.max_running or DEFAULT_MAX_RUNNING
        num_conversations = self._num_conversations(wanted)
        max_running = min(wanted, max(num_conversations, 1))
        num_rows = self._num_rows(max_running, num_conversations)
        if spec.state is not None and max_running > num_rows - 1:
            max_running = num_rows - 1
        num_slots = max_running if spec.history is not None else 0
        num_pages = self._num_pages(num_rows, num_slots)
        self._limit_model_len(num_pages)
        num_bytes = num_pages * spec.bytes_per_page + num_rows * spec.bytes_per_row
        num_bytes += num_slots * spec.bytes_per_history_slot
        limiting = self._limiting_resource(wanted, max_running, num_pages, num_rows)
        if config.max_running is not None and max_running < config.max_running:
            self._notices.append(f"max_running {config.max_running} lowered to {max_running}: {limiting}")
        if spec.state is not None and config.cache.prefix_caching and num_rows - 1 < LEAST_ROWS_TO_HIT:
            self._notices.append(
                f"the prefix cache cannot hit: of {num_rows - 1} state rows none is left for a snapshot beside the "
                f"live one; give at least {LEAST_ROWS_TO_HIT + 1} (num_state_rows)"
            )
        return PoolSizes(
            num_pages=num_pages,
            num_state_rows=num_rows,
            num_history_slots=num_slots,
            max_running=max_running,
            max_model_len=self._max_len,
            num_bytes=num_bytes,
            limiting_resource=limiting,
            notices=tuple(self._notices),
        )

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._spec.page_size) if self._spec.kv is not None else 0

    def _num_conversations(self, wanted: int) -> int:
        """Conversations of typical length that fit whole, with their snapshots, beside `wanted` live rows."""
        spec = self._spec
        each = self._pages_for(min(TYPICAL_TOKENS, self._max_len)) * spec.bytes_per_page
        each += SNAPSHOTS_PER_CONVERSATION * spec.bytes_per_row
        if self._config.num_pages is not None or self._config.num_state_rows is not None:
            return max(wanted, 1)  # the pools were named; only the rows bound what runs
        memory = self._memory_bytes - spec.bytes_per_page - (1 + SPARE_ROWS) * spec.bytes_per_row
        # Every running request is a conversation too, so its live row comes on top until `wanted` of them fit.
        live = spec.bytes_per_row + spec.bytes_per_history_slot
        running = memory // max(each + live, 1)
        if running < wanted:
            return int(running)
        return int((memory - wanted * live) // max(each, 1))

    def _num_rows(self, max_running: int, num_conversations: int) -> int:
        if self._spec.state is None:
            return 1
        if self._config.num_state_rows is not None:
            return self._config.num_state_rows
        rows = 1 + max_running + SNAPSHOTS_PER_CONVERSATION * max(num_conversations, 1) + SPARE_ROWS
        return min(rows, MAX_POOL_ROWS)

    def _num_pages(self, num_rows: int, num_slots: int) -> int:
        spec = self._spec
        if self._config.num_pages is not None:
            return self._config.num_pages
        if spec.kv is None:
            return 1
        remaining = self._memory_bytes - num_rows * spec.bytes_per_row - num_slots * spec.bytes_per_history_slot
        least = self._pages_for(self._least_tokens()) + 2
        return min(max(int(remaining // spec.bytes_per_page), least), MAX_POOL_PAGES)

    def _least_tokens(self) -> int:
        """The length that must fit: what was asked for, else what is useful."""
        return self._max_len if self._config.max_model_len is not None else min(MIN_USEFUL_TOKENS, self._max_len)

    def _check_one_request_fits(self) -> None:
        spec, config = self._spec, self._config
        tokens = self._least_tokens()
        pages = self._pages_for(tokens) + (2 if spec.kv is not None else 0)  # a reserved one, and one copied on write
        rows = 1 + 1 + SNAPSHOTS_PER_CONVERSATION + SPARE_ROWS if spec.state is not None else 0
        if config.num_pages is not None and spec.kv is not None and config.num_pages < pages:
            raise NotEnoughMemory(
                f"one request of {tokens} tokens needs {pages} pages, num_pages is {config.num_pages}"
            )
        if config.num_state_rows is not None and spec.state is not None and config.num_state_rows < 2:
            raise NotEnoughMemory(f"one request needs 2 state rows, num_state_rows is {config.num_state_rows}")
        if config.num_pages is not None or config.num_state_rows is not None:
            return
        page_bytes, row_bytes = pages * spec.bytes_per_page, rows * spec.bytes_per_row + spec.bytes_per_history_slot
        if page_bytes + row_bytes > self._memory_bytes:
            needed = _mib(page_bytes + row_bytes)
            raise NotEnoughMemory(
                f"not enough memory for the cache: one request of {tokens} tokens needs {needed} "
                f"({pages} pages of {spec.page_size} tokens, {_mib(page_bytes)}; {rows} state rows, "
                f"{_mib(row_bytes)}), there are {_mib(self._memory_bytes)}; give --memory at least {needed}"
            )

    def _limit_model_len(self, num_pages: int) -> None:
        if self._spec.kv is None:
            return
        holds = (num_pages - 2) * self._spec.page_size  # page 0 is reserved, one may be copied on write
        if holds < self._max_len:
            self._notices.append(
                f"max_model_len lowered from {self._max_len} to {holds}: the pool has {num_pages - 1} pages of "
                f"{self._spec.page_size} tokens"
            )
            self._max_len = holds

    def _limiting_resource(self, wanted: int, max_running: int, num_pages: int, num_rows: int) -> str:
        spec = self._spec
        pools = []
        if spec.kv is not None:
            pools.append(f"{num_pages - 1} pages of {spec.page_size} tokens ({_mib(num_pages * spec.bytes_per_page)})")
        if spec.state is not None:
            pools.append(f"{num_rows - 1} state rows ({_mib(num_rows * spec.bytes_per_row)})")
        have = " and ".join(pools)
        if max_running >= wanted:
            return f"max_running {max_running}; {have}"
        if self._config.num_state_rows is not None and max_running == num_rows - 1:
            return f"state rows: {num_rows - 1} allow {max_running} running requests; {have}"
        return f"memory: {_mib(self._memory_bytes)} hold {max_running} conversations of typical length; {have}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
