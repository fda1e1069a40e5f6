"""Schedulers and requests for tests, in one line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from content_probe import ContentProbe
from drafting_probe import DraftingProbe

from turnkeep.cache.boundary import Boundary, BoundaryKind
from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.config import CacheConfig
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.cache.spec import CacheSpec, HistorySpec, KVSpec, StatePart, StateSpec
from turnkeep.cache.tiers.cold_tiers import ColdTiers
from turnkeep.scheduler.config import SchedulerConfig
from turnkeep.scheduler.drafts import TreeGrant
from turnkeep.scheduler.events import Finished, SchedulerEvent, TokenOut
from turnkeep.scheduler.request import Request, SamplingParams
from turnkeep.scheduler.scheduler import Scheduler

VOCAB_SIZE = 50
DRAFT_CAPACITY = 7


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_spec(*, page_size: int = 4, has_pages: bool = True, has_state: bool = True) -> CacheSpec:
    kv = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32") if has_pages else None
    state = StateSpec((StatePart("ssm", 1, (4, 4), "float32"),)) if has_state else None
    return CacheSpec(page_size=page_size, kv=kv, state=state)


@dataclass
class Bench:
    """A scheduler with its cache, a probe that runs its plans, and what was said so far."""

    scheduler: Scheduler
    cache: CacheManager
    probe: ContentProbe
    clock: FakeClock
    events: list[SchedulerEvent]

    def step(self) -> bool:
        """Plan, run and apply one step; False when there was nothing to do."""
        self.clock.now_s += 1.0
        plan = self.scheduler.plan()
        if plan is not None:
            try:
                output = self.probe.run(plan)
            except RuntimeError as error:
                self.scheduler.fail_step(plan, str(error))
            else:
                self.scheduler.apply(plan, output)
        self.events += self.scheduler.drain_events()
        return plan is not None

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        self.events += self.scheduler.drain_events()
        assert not self.scheduler.has_work, f"work is left after {max_steps} steps"

    def outputs(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for event in self.events:
            if isinstance(event, TokenOut):
                tokens.setdefault(event.request_id, []).append(event.token.token_id)
        return tokens

    def finished(self) -> dict[str, Finished]:
        """Finished events by request; fails when a request has two."""
        found: dict[str, Finished] = {}
        for event in self.events:
            if isinstance(event, Finished):
                assert event.request_id not in found, f"{event.request_id} finished twice"
                found[event.request_id] = event
        return found


def make_bench(
    *,
    num_pages: int = 65,
    num_state_rows: int = 33,
    page_size: int = 4,
    has_pages: bool = True,
    has_state: bool = True,
    prefix_caching: bool = True,
    max_running: int = 8,
    max_step_tokens: int = 32,
    max_model_len: int = 200,
    make_tiers: Callable[[CacheSpec, ContentProbe, FakeClock], ColdTiers] | None = None,
    draft_seed: int | None = None,
    **config: int,
) -> Bench:
    """draft_seed: drafts are made and verified, some of them right, over histories of DRAFT_CAPACITY tokens."""
    spec = make_spec(page_size=page_size, has_pages=has_pages, has_state=has_state)
    clock = FakeClock()
    sizes = {
        "num_pages": num_pages,
        "num_state_rows": num_state_rows,
        "page_size": page_size,
        "vocab_size": VOCAB_SIZE,
    }
    grant = None
    if draft_seed is None:
        probe = ContentProbe(**sizes)
    else:
        if spec.state is not None:
            spec = replace(spec, history=HistorySpec(DRAFT_CAPACITY, spec.state.parts))
        grant = TreeGrant(num_nodes=6 * max_running, max_nodes_per_request=6, max_depth=4, max_children=3)
        probe = DraftingProbe(num_history_slots=max_running, capacity=DRAFT_CAPACITY, seed=draft_seed, **sizes)
    cache = CacheManager(
        spec,
        CacheConfig(prefix_caching=prefix_caching),
        num_pages=num_pages,
        num_state_rows=num_state_rows,
        num_history_slots=max_running if draft_seed is not None else 0,
        clock=clock,
        tiers=None if make_tiers is None else make_tiers(spec, probe, clock),
    )
    limits = SchedulerConfig(
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        tree_grant=grant,
        **{"decode_reserve_tokens": 8, "min_shared_tokens": 4, **config},
    )
    return Bench(Scheduler(cache, limits, clock), cache, probe, clock, [])


def make_request(
    request_id: str,
    prompt: int | Sequence[int] = 10,
    max_new_tokens: int = 4,
    *,
    boundaries: Sequence[tuple[int, BoundaryKind]] = (),
    conversation_id: str | None = None,
    priority: int = 0,
    cache_root: str = "",
    salt: int = 0,
    may_be_stopped: bool = False,
    **sampling: object,
) -> Request:
    """`prompt`: token ids, or a number of them (different ones for each `salt`)."""
    token_ids = [(7 * i * (salt + 1) + salt) % VOCAB_SIZE for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Request(
        request_id=request_id,
        token_ids=EncodedTokens(token_ids),
        num_prompt_tokens=len(token_ids),
        boundaries=tuple(Boundary(position, kind) for position, kind in boundaries),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),  # type: ignore[arg-type]
        conversation_id=conversation_id,
        cache_root=cache_root,
        priority=priority,
        may_be_stopped=may_be_stopped,
    )
