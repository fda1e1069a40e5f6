"""What planning costs: processor milliseconds a step of scheduler and tree budget, no model at all.

So many requests run, each with a draft, and so many wait. Steps are planned and applied as the engine would, with
outputs made up; measured are plan (drafts chosen, pages, items, the next grant), apply, and the budget's part alone.
The same for one request alone, which pays it at every step. Then one admission round for prompts of growing length.
Bars: plan <= 2 ms with 256 running and 1,024 waiting; a round's time grows with the pages of a prompt and not faster.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.machine import describe_machine

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.cache.spec import CacheSpec, HistorySpec, KVSpec, StatePart, StateSpec
from turnkeep.scheduler.acceptance import AcceptanceStatistics
from turnkeep.scheduler.config import SchedulerConfig
from turnkeep.scheduler.cost_model import StepCost
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.request import Request, SamplingParams
from turnkeep.scheduler.scheduler import Scheduler
from turnkeep.scheduler.speculation_config import SpeculationConfig
from turnkeep.scheduler.step_plan import SampledToken, StepOutput, StepPlan
from turnkeep.scheduler.tree_budget import TreeBudget

PAGE_SIZE = 16
VOCAB_SIZE = 32_000
PLAN_BAR_MS = 2.0
NODE_S = 2e-5  # of the made-up machine: cheap enough that every request gets nodes
PAGES_A_REQUEST = 350  # all that it may ever need
RIGHT = 0.7  # of a node given the one above
NUM_FIRST = 100  # steps that admit, and that tell what nodes cost


def make_scheduler(num_pages: int, num_running: int, *, drafts: bool = True) -> tuple[Scheduler, TreeBudget | None]:
    parts = (StatePart("ssm", 1, (4, 4), "float32"),)
    kv = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    spec = CacheSpec(PAGE_SIZE, kv, StateSpec(parts), HistorySpec(32, parts) if drafts else None)
    cache = CacheManager(
        spec,
        num_pages=num_pages,
        num_state_rows=4 * num_running + 8,
        num_history_slots=num_running,
        clock=time.monotonic,
    )
    limits = SchedulerConfig(max_running=num_running, max_step_tokens=1 << 20, max_model_len=1 << 20)
    budget = TreeBudget(SpeculationConfig(), StepCost(), AcceptanceStatistics()) if drafts else None
    return Scheduler(cache, limits, budget=budget), budget


def make_request(name: str, prompt: list[int], max_new_tokens: int) -> Request:
    return Request(
        request_id=name,
        token_ids=EncodedTokens(prompt),
        num_prompt_tokens=len(prompt),
        boundaries=(Boundary(len(prompt) - 1, "turn_start"),),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        conversation_id=name,
    )


def draft(rng: random.Random, grant: TreeGrant) -> DraftTree:
    """A chain, and children of the root beside it where there is room for more."""
    parents, stated = [], []
    for node in range(grant.max_nodes_per_request):
        in_chain = node < grant.max_depth
        parents.append(node - 1 if in_chain else -1)
        stated.append(RIGHT ** (node + 1) if in_chain else 0.05)
    return DraftTree(tuple(rng.randrange(VOCAB_SIZE) for _ in parents), tuple(parents), tuple(stated))


def made_up_output(plan: StepPlan, rng: random.Random, node_s: float) -> StepOutput:
    """Chains are right with the probability that they state; the machine takes a little for every node."""
    tokens, accepted, drafts, num_nodes = {}, {}, {}, 0
    for item in plan.items:
        path: tuple[int, ...] = ()
        if item.draft is not None:
            while len(path) < item.draft.depth and rng.random() < RIGHT:
                path = (*path, len(path))
            accepted[item.request_id] = path
            num_nodes += item.draft.num_nodes
        if item.sampling is not None:
            tokens[item.request_id] = (SampledToken(3),) * (1 + len(path))
            if plan.tree_grant is not None:
                drafts[item.request_id] = draft(rng, plan.tree_grant)
    seconds = 0.02 + 1e-4 * len(plan.items) + node_s * num_nodes
    return StepOutput(tokens, seconds + 1e-3, {}, accepted, drafts, 1e-3)


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def timing(*arguments: Any, **named: Any) -> Any:
        started_s = time.thread_time()
        result = call(*arguments, **named)
        times.append(1e3 * (time.thread_time() - started_s))
        return result

    return timing


def measure_steps(num_running: int, num_waiting: int, num_steps: int, seed: int, node_s: float) -> dict[str, float]:
    rng = random.Random(seed)
    scheduler, budget = make_scheduler(PAGES_A_REQUEST * num_running, num_running)
    assert budget is not None
    for number in range(num_running + num_waiting):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(400 + number % 50)]
        scheduler.submit(make_request(f"r{number}", prompt, 4000))
    times: dict[str, list[float]] = {"plan": [], "apply": [], "budget": []}
    for name in ("select", "grant", "measured"):
        setattr(budget, name, timed(getattr(budget, name), times["budget"]))
    plan_step, apply_step = timed(scheduler.plan, times["plan"]), timed(scheduler.apply, times["apply"])
    budget_ms: list[float] = []
    nodes: list[int] = []
    for _ in range(num_steps + NUM_FIRST):
        times["budget"].clear()
        plan = plan_step()
        assert plan is not None
        apply_step(plan, made_up_output(plan, rng, node_s))
        budget_ms.append(sum(times["budget"]))
        nodes.append(sum(item.draft.num_nodes for item in plan.items if item.draft is not None))
        scheduler.drain_events()
    found = {"running": float(len(plan.items)), "waiting": float(scheduler.stats().num_waiting)}
    found["nodes"] = statistics.median(nodes[NUM_FIRST:])
    for name, own in (("plan", times["plan"]), ("apply", times["apply"]), ("budget", budget_ms)):
        steps = sorted(own[NUM_FIRST:])
        found[f"{name}_ms"] = round(statistics.median(steps), 3)
        found[f"{name}_p90_ms"] = round(steps[len(steps) * 9 // 10], 3)
    return found


def measure_admission(length: int, seed: int, repeats: int = 5) -> dict[str, float]:
    """One round that admits a prompt of so many tokens, cold; microseconds a page."""
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
    times: list[float] = []
    for _ in range(repeats):
        scheduler, _ = make_scheduler(length // PAGE_SIZE + 20, 4, drafts=False)
        scheduler.submit(make_request("a", list(prompt), 8))
        started_s = time.thread_time()
        scheduler._admit()
        times.append(1e3 * (time.thread_time() - started_s))
    best = min(times)
    return {"tokens": length, "admit_ms": round(best, 3), "us_a_page": round(1e3 * best / (length / PAGE_SIZE), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--node-us", type=float, default=1e6 * NODE_S, help="what a node costs the made-up machine")
    arguments = parser.parse_args()
    node_s = 1e-6 * arguments.node_us
    steps = measure_steps(arguments.running, arguments.waiting, arguments.steps, arguments.seed, node_s)
    alone = measure_steps(1, 0, arguments.steps, arguments.seed, node_s)
    admission = [measure_admission(length, arguments.seed) for length in (1_000, 10_000, 100_000)]
    print(f"{'':8}{'median ms':>11}{'p90 ms':>9}{'alone: median':>16}{'p90 ms':>9}")
    for name in ("plan", "apply", "budget"):
        many, one = ((own[f"{name}_ms"], own[f"{name}_p90_ms"]) for own in (steps, alone))
        print(f"{name:8}{many[0]:11.3f}{many[1]:9.3f}{one[0]:16.3f}{one[1]:9.3f}")
    print(f"bar: plan <= {PLAN_BAR_MS} ms; {steps['nodes']:.0f} draft nodes a step")
    for row in admission:
        print(f"admit {row['tokens']:>7,} tokens {row['admit_ms']:9.3f} ms, {row['us_a_page']:.2f} us a page")
    found = {"seed": arguments.seed, **steps, "alone": alone, "admission": admission}
    print(json.dumps(found | {"machine": describe_machine()}))


if __name__ == "__main__":
    main()
