"""Random workloads against the scheduler and the cache alone, with a fake clock: does everything always end?

A workload is a machine (pools from barely enough to ample, any kind of model), settings, and what clients do: bursts
and trickles, short and long requests, conversations that return, far more idle ones than fit, aborts, stops, failing
steps, tenants and priorities, drafts that are right with any probability. State rows and replay histories hold hashes
of the tokens before them. Checked: every row is what it should be when it is read; the oldest running request gets at
least one token in every step; nobody is passed more often than the bound; every request ends exactly once, with all
its tokens unless it was cut short, and is refused only when it can never fit; references and counts of the cache add
up at any time; at the end everything can be had again. A fault prints the seed of its workload, which
`--seed N --workloads 1` repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from benchmarks.simulated_pools import Fault, Pools, require

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.cache.spec import CacheSpec, HistorySpec, KVSpec, StatePart, StateSpec
from turnkeep.scheduler.acceptance import AcceptanceStatistics
from turnkeep.scheduler.config import SchedulerConfig
from turnkeep.scheduler.cost_model import StepCost
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.events import Admitted, Finished, TokenOut
from turnkeep.scheduler.request import Request, SamplingParams
from turnkeep.scheduler.scheduler import Scheduler
from turnkeep.scheduler.speculation_config import SpeculationConfig
from turnkeep.scheduler.step_plan import SampledToken, StepOutput, StepPlan
from turnkeep.scheduler.tree_budget import TreeBudget

VOCAB_SIZE = 50
MAX_MODEL_LEN = 240
CHUNK = 250  # workloads of one task


@dataclass
class Traits:
    """What kind of clients a workload has; drawn once."""

    longest: int  # tokens of a prompt's new part
    longest_answer: int
    num_requests: int
    burst: int
    abort_chance: float
    stop_chance: float
    fail_chance: float
    return_chance: float  # a request continues a conversation
    close_chance: float
    num_tenants: int
    acceptance: float  # of a drafted node
    drafting: str  # "none", "all" that is proposed is verified, "budget"

    @classmethod
    def draw(cls, rng: random.Random) -> Traits:
        return cls(
            longest=rng.choice([6, 20, 60, 150]),
            longest_answer=rng.choice([3, 10, 40, 120]),
            num_requests=rng.choice([3, 6, 10, 16, 30]),
            burst=rng.choice([1, 2, 5, 30]),
            abort_chance=rng.choice([0.0, 0.0, 0.05, 0.3]),
            stop_chance=rng.choice([0.0, 0.1]),
            fail_chance=rng.choice([0.0, 0.0, 0.02]),
            return_chance=rng.choice([0.0, 0.5, 0.9]),
            close_chance=rng.choice([0.0, 0.1]),
            num_tenants=rng.choice([1, 1, 2, 5]),
            acceptance=rng.choice([0.0, 0.3, 0.7, 1.0]),
            drafting=rng.choice(["none", "all", "all", "budget"]),
        )


@dataclass
class Submitted:
    request: Request
    conversation: int
    num_tokens: int = 0  # received
    num_finished: int = 0
    num_overtaken: int = 0  # admissions of requests behind it while it waited
    is_cut: bool = False  # aborted or stopped by the client, or in a step that failed
    reason: str = ""


@dataclass
class Simulation:
    """One workload, from its seed."""

    seed: int
    rng: random.Random = field(init=False)
    now_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.traits = Traits.draw(rng)
        self.page_size = rng.choice([1, 4, 16])
        self.has_pages, self.has_state = rng.choice([(True, True), (True, True), (True, False), (False, True)])
        self.max_running = rng.choice([1, 2, 4, 8])
        # From the least in which anything runs to several times what runs at once.
        num_pages = 3 + rng.choice([4, 12, 40, 150]) * 16 // self.page_size
        num_rows = rng.choice([2, 3, 6, 30]) + (self.max_running if rng.random() < 0.5 else 0)
        self.speculation = rng.choice(
            [SpeculationConfig(1, 1, 1), SpeculationConfig(3, 2, 6), SpeculationConfig(7, 3, 9)]
        )
        self.cache = self._make_cache(num_pages, num_rows)
        self.config = SchedulerConfig(
            max_running=self.max_running,
            max_step_tokens=rng.choice([1, 5, 16, 64, 256]),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            decode_reserve_tokens=rng.choice([0, 0, 8, 64]),
            max_bypassed=rng.choice([0, 2, 32]),
            min_shared_tokens=rng.choice([4, 32]),
            tree_grant=self._fixed_grant(),
        )
        budget = None
        if self.traits.drafting == "budget":
            budget = TreeBudget(self.speculation, StepCost(), AcceptanceStatistics(), max_nodes=rng.choice([4, 64]))
        self.scheduler = Scheduler(self.cache, self.config, clock=lambda: self.now_s, budget=budget)
        self.pools = Pools()
        self.submitted: dict[str, Submitted] = {}
        self.histories: list[list[int]] = []
        self.fails_next = False

    def _make_cache(self, num_pages: int, num_rows: int) -> CacheManager:
        kv = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32") if self.has_pages else None
        state = StateSpec((StatePart("ssm", 1, (4, 4), "float32"),)) if self.has_state else None
        history = None
        if state is not None and self.traits.drafting != "none":
            capacity = 1 + self.speculation.max_draft_len  # the least that holds a whole path
            history = HistorySpec(self.rng.choice([capacity, capacity + 1, 16, 32]), state.parts)
        spec = CacheSpec(page_size=self.page_size, kv=kv, state=state, history=history)
        return CacheManager(
            spec,
            num_pages=num_pages,
            num_state_rows=num_rows,
            num_history_slots=self.max_running,
            clock=lambda: self.now_s,
        )

    def _fixed_grant(self) -> TreeGrant | None:
        if self.traits.drafting != "all":
            return None
        limits = self.speculation
        return TreeGrant(
            num_nodes=limits.max_total_draft_tokens * self.max_running,
            max_nodes_per_request=limits.max_total_draft_tokens,
            max_depth=limits.max_draft_len,
            max_children=limits.dynamic_tree_max_topk,
        )

    def run(self) -> None:
        """Raises Fault, or AssertionError of the cache's own check."""
        waiting = self.traits.num_requests
        while waiting or self.scheduler.has_work:
            if waiting and (self.rng.random() < 0.3 or not self.scheduler.has_work):
                for _ in range(min(waiting, self.rng.randint(1, self.traits.burst))):
                    self._submit()
                    waiting -= 1
            self._disturb()
            self._step()
            if self.rng.random() < 0.05:
                self.cache.check()
            require(self.num_steps <= self._most_steps(), f"work is left after {self.num_steps} steps")
        self._check_end()

    def _most_steps(self) -> int:
        """Each step computes a token, and a suspended request computes at most its own again."""
        work = sum(
            (one.request.num_prompt_tokens + one.request.sampling.max_new_tokens) * (1 + one.request.num_suspensions)
            for one in self.submitted.values()
        )
        return work + len(self.submitted) + 10

    def _submit(self) -> None:
        rng, traits = self.rng, self.traits
        if not self.histories or rng.random() >= traits.return_chance:
            self.histories.append([rng.randrange(3)] * rng.randint(1, 12))
        conversation = rng.randrange(max(len(self.histories) - 6, 0), len(self.histories))
        history = self.histories[conversation]
        prompt = history + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, traits.longest))]
        num_stop = rng.choice([0, 0, 1])
        request = Request(
            request_id=f"r{len(self.submitted)}",
            token_ids=EncodedTokens(prompt),
            num_prompt_tokens=len(prompt),
            boundaries=tuple(
                Boundary(position, "turn_start") for position in sorted({len(history), len(prompt) - rng.randint(0, 2)})
            ),
            sampling=SamplingParams(
                max_new_tokens=rng.randint(1, traits.longest_answer),
                stop_token_ids=(VOCAB_SIZE - 1,) * num_stop,
            ),
            conversation_id=f"c{conversation}" if rng.random() < 0.8 else None,
            cache_root=rng.choice(["", "", "tenant"]),
            priority=rng.choice([0, 0, 0, 1]),
            tenant=f"t{rng.randrange(traits.num_tenants)}",
        )
        self.submitted[request.request_id] = Submitted(request, conversation)
        self.scheduler.submit(request)

    def _disturb(self) -> None:
        rng, traits = self.rng, self.traits
        for name, call in (("abort", self.scheduler.abort), ("stop", self.scheduler.stop)):
            if rng.random() < (traits.abort_chance if name == "abort" else traits.stop_chance) and self.submitted:
                one = self.submitted[rng.choice(list(self.submitted))]
                one.is_cut = one.is_cut or not one.num_finished
                call(one.request.request_id)
        if self.histories and rng.random() < traits.close_chance:
            self.scheduler.close_conversation("", f"c{rng.randrange(len(self.histories))}")
        self.fails_next = rng.random() < traits.fail_chance

    def _step(self) -> None:
        queue = sorted(
            (one for one in self.submitted.values() if one.request.status == "waiting"),
            key=lambda one: (one.request.priority, one.request.fair_start, one.request.arrival_number),
        )
        plan = self.scheduler.plan()
        self.num_steps += 1
        self._check_order(queue)
        if plan is not None:
            self._check_plan(plan)
            if self.fails_next:
                for item in plan.items:
                    self.submitted[item.request_id].is_cut = True
                self.scheduler.fail_step(plan, "the simulation lets it fail")
            else:
                self.scheduler.apply(plan, self._compute(plan))
        self._take_events()

    def _check_order(self, queue: list[Submitted]) -> None:
        """queue: what waited before the admission round, in order of service."""
        num_behind = 0
        for one in reversed(queue):
            if one.request.status == "running":
                num_behind += 1
            elif one.request.status == "waiting":
                one.num_overtaken += num_behind
                passed, bound = one.num_overtaken, self.config.max_bypassed
                # One that waits for a prefix which another computes lets others pass.
                is_bound = passed <= bound or one.request.num_prefix_waits > 0
                require(is_bound, f"{one.request.request_id} was passed {passed} times, the bound is {bound}")

    def _check_plan(self, plan: StepPlan) -> None:
        oldest = min(
            (one.request for one in self.submitted.values() if one.request.status == "running"),
            key=lambda request: request.rank,
        )
        require(any(item.request_id == oldest.request_id for item in plan.items), "the oldest got nothing to compute")
        require(len(plan.items) <= self.max_running, f"{len(plan.items)} requests run, {self.max_running} may")
        rows = [item.state_row for item in plan.items if item.state_row is not None]
        rows += [row for item in plan.items for _, row in item.exports]
        require(len(rows) == len(set(rows)), "a state row is written by two")
        if self.cache.has_history:
            slots = [item.replay.slot for item in plan.items if item.replay is not None]
            require(len(slots) == len(set(slots)), "a history slot is written by two")
        for item in plan.items:
            reached = item.start + len(item.token_ids) + (item.draft.depth if item.draft is not None else 0)
            is_covered = not self.has_pages or len(item.page_ids) * self.page_size >= reached
            require(is_covered, f"{item.request_id} may accept more than its pages hold")

    def _compute(self, plan: StepPlan) -> StepOutput:
        tokens: dict[str, tuple[SampledToken, ...]] = {}
        accepted: dict[str, tuple[int, ...]] = {}
        drafts: dict[str, DraftTree] = {}
        self.pools.prepare(plan)
        for item in plan.items:
            path = self._accepted(item.draft)
            own = [item.draft.token_ids[node] for node in path] if item.draft is not None else []
            self.pools.compute(item, self.submitted[item.request_id].request.token_ids, own)
            if item.sampling is None:
                continue
            if item.draft is not None:
                accepted[item.request_id] = path
            tokens[item.request_id] = tuple(SampledToken(token) for token in (*own, self.rng.randrange(VOCAB_SIZE)))
            if plan.tree_grant is not None:
                drafts[item.request_id] = self._draft(plan.tree_grant)
        self.now_s += 0.01 + 1e-4 * plan.num_tokens
        return StepOutput(tokens=tokens, duration_s=0.01, accepted=accepted, drafts=drafts)

    def _accepted(self, draft: DraftTree | None) -> tuple[int, ...]:
        """A random path of right nodes."""
        path: list[int] = []
        at = -1
        for node, parent in enumerate(draft.parents if draft is not None else ()):
            if parent == at and self.rng.random() < self.traits.acceptance:
                path.append(node)
                at = node
        return tuple(path)

    def _draft(self, grant: TreeGrant) -> DraftTree:
        parents: list[int] = []
        depths: list[int] = []
        for node in range(self.rng.randint(0, grant.max_nodes_per_request)):
            parent = self.rng.randint(-1, node - 1)
            depth = depths[parent] + 1 if parent >= 0 else 1
            if depth > grant.max_depth:
                parent, depth = -1, 1
            parents.append(parent)
            depths.append(depth)
        ids = tuple(self.rng.randrange(VOCAB_SIZE) for _ in parents)
        return DraftTree(ids, tuple(parents), tuple(0.7**depth for depth in depths))

    def _take_events(self) -> None:
        for event in self.scheduler.drain_events():
            one = self.submitted[event.request_id]
            require(one.num_finished == 0, f"{type(event).__name__} of {event.request_id} after its end")
            if isinstance(event, TokenOut):
                one.num_tokens += 1
                self.num_tokens += 1
            elif isinstance(event, Finished):
                one.num_finished += 1
                one.reason = event.reason
                self._end_turn(one)
            else:
                require(isinstance(event, Admitted), "an event of no known kind")

    def _end_turn(self, one: Submitted) -> None:
        history = one.request.token_ids
        stable = max(len(history) - self.rng.choice([0, 0, 1, 5]), 0)
        if self.rng.random() < 0.9:
            self.scheduler.end_turn(one.request.request_id, stable)
        if len(history) < MAX_MODEL_LEN // 2:
            self.histories[one.conversation] = history[: max(stable, 1)]

    def _check_end(self) -> None:
        num_pages = self.cache.stats().num_pages
        for one in self.submitted.values():
            request, sampling = one.request, one.request.sampling
            name = request.request_id
            require(one.num_finished == 1, f"{name} finished {one.num_finished} times")
            total = request.num_prompt_tokens + sampling.max_new_tokens
            never_fits = total > MAX_MODEL_LEN or self.cache.pages_for(total - 1) > num_pages
            require((one.reason == "refused") == never_fits, f"{name} of {total} tokens ended with {one.reason}")
            require(one.reason != "error" or one.is_cut, f"{name} ended with an error")
            require(one.reason != "length" or one.num_tokens == sampling.max_new_tokens, f"{name}: {one.num_tokens}")
            require(one.num_tokens == len(request.token_ids) - request.num_prompt_tokens, f"tokens of {name} are lost")
            if one.reason == "stop" and not one.is_cut:
                require(request.token_ids[-1] in sampling.stop_token_ids, f"{name} stopped for nothing")
            for token in request.token_ids[request.num_prompt_tokens : -1]:
                require(token not in sampling.stop_token_ids, f"{name} went on after a stop token")
        self.cache.check()
        pools = self.cache.stats()
        require(self.cache.can_provide(pools.num_pages, pools.num_rows), "something is still held at the end")


def run_chunk(first: int, count: int) -> Counter[str]:
    """Workloads of `count` seeds. Raises Fault naming the seed."""
    found: Counter[str] = Counter()
    for seed in range(first, first + count):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Exception as error:
            raise Fault(f"seed {seed} after {simulation.num_steps} steps: {type(error).__name__}: {error}") from error
        stats = simulation.scheduler.stats()
        found["workloads"] += 1
        found["requests"] += len(simulation.submitted)
        found["steps"] += simulation.num_steps
        found["tokens"] += simulation.num_tokens
        found["suspensions"] += stats.num_suspensions
        found["verified nodes"] += sum(one.request.num_draft_nodes for one in simulation.submitted.values())
        found["accepted nodes"] += sum(sum(one.request.accepted_by_depth) for one in simulation.submitted.values())
        found["bypasses"] += stats.num_bypasses
        found["conversations"] += len(simulation.histories)
        for one in simulation.submitted.values():
            found[one.reason] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first workload")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    started_s = time.perf_counter()
    first, end = arguments.seed, arguments.seed + arguments.workloads
    starts = range(first, end, CHUNK)
    counts = [min(CHUNK, end - start) for start in starts]
    found: Counter[str] = Counter()
    if arguments.processes == 1 or len(starts) == 1:
        for start, count in zip(starts, counts, strict=True):
            found += run_chunk(start, count)
    else:
        with ProcessPoolExecutor(arguments.processes) as pool:
            for part in pool.map(run_chunk, starts, counts):
                found += part
    print(json.dumps({"seed": first, "seconds": round(time.perf_counter() - started_s, 1), **found}))


if __name__ == "__main__":
    main()
