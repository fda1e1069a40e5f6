"""One trace through the real cache manager, with a fake clock and no tensors, as the scheduler would drive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.convtrace import TraceRequest

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.density_policy import DensityPolicy
from turnkeep.cache.eviction import EvictionPolicy, LRUPolicy
from turnkeep.cache.flop_per_byte import FlopPerBytePolicy
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bytes of a token's keys and values and of a state row; computation of a token and of a (query, key) pair."""

    kv_bytes: int
    row_bytes: int
    flop_per_token: float
    flop_per_pair: float

    def spec(self, page_size: int, *, has_state: bool = True) -> CacheSpec:
        kv = KVSpec(1, 1, self.kv_bytes // 4, "bfloat16")
        state = StateSpec((StatePart("state", 1, (self.row_bytes // 2,), "bfloat16"),))
        return CacheSpec(page_size, kv, state if has_state else None)


def _sizes(
    num_recurrent: int, state: int, window: int, num_attention: int, kv_heads: int, dim: int, heads: int, active: float
) -> ModelSizes:
    """float32 states, 16 bit windows, keys and values; `active` parameters."""
    return ModelSizes(
        num_attention * 2 * kv_heads * dim * 2,
        num_recurrent * (4 * state + 2 * window),
        2 * active,
        4.0 * heads * dim * num_attention,
    )


MODELS = {
    "nemotron-h-8b": _sizes(24, 128 * 64 * 128, 10240 * 3, 4, 8, 128, 32, 8.1e9),
    "qwen3-next": _sizes(36, 32 * 128 * 128, 8192 * 3, 12, 2, 256, 16, 3e9),
    "jamba-mini": _sizes(28, 8192 * 16, 8192 * 3, 4, 8, 128, 32, 12e9),
}

# density: the policy by density with all its snapshots. lru: supersession, then least recently used, same boundaries.
# flop_per_byte, branch_lru: snapshots at branches and turn ends only, as Marconi and its plainer rival. end_lru: at the
# ends of prompts, answers and prefill chunks, least recently used, in a pool of their own with a fixed share of the
# memory, as SGLang without its extra buffer; the pages, whose pool is rarely what is short, have no limit. kv_only: an
# attention-only model with the same bytes; oracle: the same without a limit.
POLICIES = ("density", "lru", "flop_per_byte", "branch_lru", "end_lru", "kv_only", "oracle")
STATE_SHARE = 0.9 / 1.9  # of memory, in end_lru
CHUNK_TOKENS = 8192
MAX_REQUEST_TOKENS = 1 << 18
FLOPS_PER_S = 1e14  # turns computation into seconds; no ratio depends on it


@dataclass(slots=True)
class Outcome:
    """Of one replay. recomputed: prompt tokens computed per request; later: whether it was a follow-up turn."""

    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0
    num_hits: int = 0
    num_written: int = 0
    num_used: int = 0
    num_unserved: int = 0
    row_bytes: int = 0
    recomputed: list[int] = field(default_factory=list)
    later: list[bool] = field(default_factory=list)

    def summary(self) -> dict[str, float | int | None]:
        """Flat numbers; shares in [0, 1]."""
        followed = sorted(number for number, later in zip(self.recomputed, self.later, strict=True) if later)
        return {
            "requests": len(self.recomputed),
            "hit_rate": self.num_reused_tokens / max(self.num_prompt_tokens, 1),
            "recomputed": self.num_prompt_tokens - self.num_reused_tokens,
            "later_p50": _quantile(followed, 0.5),
            "later_p95": _quantile(followed, 0.95),
            "gb_written": self.num_written * self.row_bytes / 1e9,
            "snapshots_per_hit": self.num_written / self.num_hits if self.num_hits else None,
            "never_used": 1 - self.num_used / self.num_written if self.num_written else None,
            "unserved": self.num_unserved,
        }


def _quantile(ordered: Sequence[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


class Replay:
    """Serves requests one after the other: each arrives, is computed and ends at its time of arrival."""

    def __init__(
        self, policy: str, model: ModelSizes, memory_bytes: int | None, page_size: int, num_tokens: int
    ) -> None:
        """memory_bytes None: no limit; num_tokens: of the whole trace, for the size of the pools then."""
        self._now_s = 0.0
        self._policy = policy
        has_state = policy not in ("kv_only", "oracle")
        if policy == "end_lru" and memory_bytes is not None:
            model = replace(model, kv_bytes=4)
            memory_bytes = int(memory_bytes * STATE_SHARE) // model.row_bytes * model.row_bytes + 4 * num_tokens
        spec = model.spec(page_size, has_state=has_state)
        self._memory_bytes = None if policy == "oracle" else memory_bytes
        if self._memory_bytes is None:
            num_pages, num_rows = num_tokens // page_size + 1024, 1 << 16
        else:
            # The running request is on top until it ends, as in the reference: then the budget is for all.
            num_pages = self._memory_bytes // spec.bytes_per_page + MAX_REQUEST_TOKENS // page_size
            num_rows = self._memory_bytes // spec.bytes_per_row + 64 if has_state else 0
        cost = PrefillCost(model.flop_per_token / FLOPS_PER_S, model.flop_per_pair / FLOPS_PER_S)
        self.cache = CacheManager(
            spec,
            num_pages=num_pages,
            num_state_rows=num_rows,
            clock=lambda: self._now_s,
            policy=_policy(policy, spec, lambda: self._now_s, cost),
        )
        self.outcome = Outcome(row_bytes=spec.bytes_per_row)

    def run(self, requests: Sequence[TraceRequest], on_progress: Callable[[int], None] | None = None) -> Outcome:
        for index, request in enumerate(requests):
            reused = self._serve(request)
            outcome = self.outcome
            outcome.num_prompt_tokens += request.num_prompt_tokens
            outcome.num_reused_tokens += reused
            outcome.num_hits += reused > 0
            outcome.recomputed.append(request.num_prompt_tokens - reused)
            outcome.later.append(request.turn > 0)
            if on_progress is not None and index % 64 == 0:
                on_progress(index)
        counters = self.cache.stats().counters
        self.outcome.num_written = counters.created_snapshots.total() - counters.dropped_snapshots.total()
        return self.outcome

    def _serve(self, request: TraceRequest) -> int:
        """Prompt tokens that were reused."""
        cache = self.cache
        self._now_s = request.arrival_s
        prompt, known = request.token_ids()
        match = cache.match("", prompt, request.conversation_id)
        num_pages = cache.num_new_pages(match, len(known))
        if not cache.can_provide(num_pages, int(cache.has_state), match):
            match = cache.cold_match("", prompt)
        is_first_use = match.snapshot is not None and match.snapshot.num_hits == 0
        seq = cache.open(match, prompt, conversation_id=request.conversation_id)
        if seq is None or not cache.grow(seq, len(known)):
            if seq is not None:
                cache.close(seq)
            self.outcome.num_unserved += 1
            return 0
        self.outcome.num_used += is_first_use
        reused = seq.num_computed_tokens
        for boundary in self._boundaries(request, reused, seq.boundaries):
            if reused < boundary.position <= len(prompt):
                cache.reserve_export(seq, boundary.position, boundary.kind)
        cache.drain_copies()
        cache.advance(seq, len(prompt) - reused)
        cache.publish_exports(seq, prompt)
        cache.commit(seq, prompt)
        page_end = (len(known) - 1) // cache.page_size * cache.page_size
        if seq.may_end_early and page_end > len(prompt):
            cache.reserve_export(seq, page_end, "page_end")
        cache.advance(seq, len(known) - 1 - len(prompt))  # the last token sampled is never fed
        handle = cache.finish(seq, known, keep_turn_end=True)
        if handle is not None and self._policy in ("density", "lru"):
            cache.end_turn(handle, request.stable, has_tool_call=request.has_tool_call)
        if self._memory_bytes is not None:
            cache.trim(self._memory_bytes)
        return reused

    def _boundaries(self, request: TraceRequest, reused: int, own: tuple[Boundary, ...]) -> list[Boundary]:
        """Of the template and of the cache, in the order of the prompt; the template's first at equal positions."""
        if self._policy in ("flop_per_byte", "branch_lru"):
            return list(own)
        if self._policy == "end_lru":
            ends = (*range(reused + CHUNK_TOKENS, request.num_prompt_tokens, CHUNK_TOKENS), request.num_prompt_tokens)
            return [Boundary(end, "fixed") for end in ends]
        given = [Boundary(request.turn_start, "turn_start")]
        if request.trunk:
            given.append(Boundary(request.trunk, "trunk"))
        return sorted([*given, *own], key=lambda boundary: boundary.position)


def _policy(name: str, spec: CacheSpec, clock: Callable[[], float], cost: PrefillCost) -> EvictionPolicy:
    if name == "density":
        return DensityPolicy(spec, clock, cost)
    if name in ("flop_per_byte", "branch_lru", "end_lru"):
        return FlopPerBytePolicy(spec, clock, cost, alpha=0.5 if name == "flop_per_byte" else 0.0)
    return LRUPolicy()
