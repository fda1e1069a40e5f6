"""All nodes of a batch are judged in one go: as a plain loop over them would, ties and limits included."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import pytest
from drafting_world import grow
from scheduler_builders import DRAFT_CAPACITY, make_bench, make_request

from turnkeep.scheduler.acceptance import (
    EDGES,
    MAX_DEPTH,
    MAX_FACTOR,
    REQUEST_TRUST,
    REQUEST_WINDOW,
    TABLE_LIMIT,
    TABLE_TRUST,
    AcceptanceStatistics,
)
from turnkeep.scheduler.cost_model import DraftLoad, StepCost, StepLoad
from turnkeep.scheduler.draft_outlook import CHEAP_DRAFTING, DraftOutlook, Outlook
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.proposed_nodes import ProposedNodes
from turnkeep.scheduler.speculation_config import SpeculationConfig
from turnkeep.scheduler.tree_budget import TreeBudget

GRANT = TreeGrant(num_nodes=999, max_nodes_per_request=9, max_depth=5, max_children=3)
CONFIG = SpeculationConfig(6, 3, 15)


@dataclass
class PlainStatistics:
    """What AcceptanceStatistics knows, node by node."""

    cells: dict[tuple[int, int], list[float]] = field(default_factory=dict)  # trials and hits
    requests: dict[str, list[float]] = field(default_factory=dict)  # expected and accepted

    def paths(self, request_id: str, draft: DraftTree) -> list[float]:
        expected, accepted = self.requests.get(request_id, (0.0, 0.0))
        factor = min((accepted + REQUEST_TRUST) / (expected + REQUEST_TRUST), MAX_FACTOR)
        own = [min(self.rate(draft, node) * factor, 1.0) for node in range(draft.num_nodes)]
        sums: dict[int, float] = {}
        for node, parent in enumerate(draft.parents):
            sums[parent] = sums.get(parent, 0.0) + own[node]
        paths: list[float] = []
        for node, parent in enumerate(draft.parents):
            paths.append(own[node] / max(sums[parent], 1.0) * (paths[parent] if parent >= 0 else 1.0))
        return paths

    def rate(self, draft: DraftTree, node: int) -> float:
        trials, hits = self.cells.get(self.cell(draft, node), (0.0, 0.0))
        return (hits + TABLE_TRUST * stated_edge(draft, node)) / (trials + TABLE_TRUST)

    def cell(self, draft: DraftTree, node: int) -> tuple[int, int]:
        return min(draft.depths()[node], MAX_DEPTH), bisect_left(EDGES.tolist(), stated_edge(draft, node))

    def measured(self, names: list[str], drafts: list[DraftTree], accepted: list[tuple[int, ...]]) -> None:
        tested = [
            (name, draft, node, node in path)
            for name, draft, path in zip(names, drafts, accepted, strict=True)
            for node, parent in enumerate(draft.parents)
            if parent < 0 or parent in path
        ]
        expected = dict.fromkeys(names, 0.0)
        for name, draft, node, _ in tested:
            expected[name] += self.rate(draft, node)
        for _, draft, node, is_right in tested:
            cell = self.cells.setdefault(self.cell(draft, node), [0.0, 0.0])
            cell[0] += 1.0
            cell[1] += is_right
        for cell in self.cells.values():
            if cell[0] > TABLE_LIMIT:
                cell[:] = cell[0] / 2, cell[1] / 2
        for name, path in zip(names, accepted, strict=True):
            own = self.requests.setdefault(name, [0.0, 0.0])
            memory = math.exp(-expected[name] / REQUEST_WINDOW)
            own[:] = memory * own[0] + expected[name], memory * own[1] + len(path)


def stated_edge(draft: DraftTree, node: int) -> float:
    above = draft.probabilities[draft.parents[node]] if draft.parents[node] >= 0 else 1.0
    return min(draft.probabilities[node] / max(above, 1e-12), 1.0)


def with_ties(draft: DraftTree) -> DraftTree:
    """Its probabilities rounded to powers of two: many nodes are worth the same."""
    return DraftTree(
        draft.token_ids, draft.parents, tuple(2.0 ** math.floor(math.log2(p)) for p in draft.probabilities)
    )


def grown(rng: random.Random, share_of_ties: float = 0.5) -> tuple[DraftTree, tuple[int, ...]]:
    drafted = grow(rng, GRANT, rng.choice((0.85, 0.6, 0.3)), rng.choice((0.5, 1.0)))
    draft = with_ties(drafted.draft) if rng.random() < share_of_ties else drafted.draft
    return (draft.first(rng.randint(1, draft.num_nodes)), ()) if rng.random() < 0.3 else (draft, drafted.right)


def learnt(rng: random.Random, names: list[str]) -> tuple[AcceptanceStatistics, PlainStatistics]:
    statistics, plain = AcceptanceStatistics(), PlainStatistics()
    for _ in range(rng.choice((0, 1, 30))):
        some = rng.sample(names, rng.randint(1, len(names)))
        drafts, accepted = zip(*(grown(rng) for _ in some), strict=True)
        kept = [
            tuple(node for node in path if node < draft.num_nodes) for draft, path in zip(drafts, accepted, strict=True)
        ]
        statistics.measured(some, drafts, kept)
        plain.measured(some, list(drafts), kept)
    return statistics, plain


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_judged_and_chosen_from_as_node_by_node(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"r{number}" for number in range(rng.choice((1, 2, 7, 40)))]
    statistics, plain = learnt(rng, names)
    share_of_ties = rng.choice((0.0, 0.5, 1.0))
    drafts = [grown(rng, share_of_ties)[0] for _ in names]
    paths = [plain.paths(name, draft) for name, draft in zip(names, drafts, strict=True)]
    found = statistics.path_probabilities(ProposedNodes.of(drafts), names)
    assert found.tolist() == pytest.approx([path for own in paths for path in own], rel=1e-12)
    max_nodes = rng.choice((1, 5, 4096))
    cost = StepCost()
    for _ in range(30):
        nodes = rng.randrange(9)
        load = StepLoad(num_decodes=len(names), num_nodes=nodes)
        cost.measured(load, 2e-3 + rng.choice((1e-6, 1e-4)) * nodes)
    budget = TreeBudget(CONFIG, cost, statistics, max_nodes)
    num_decodes = len(names) + rng.randrange(3)
    chosen = budget.select(names, drafts, num_decodes, 100 * num_decodes)
    # Best first, of equals the one that comes first.
    order = sorted(range(len(found)), key=lambda place: (-found[place], place))[:max_nodes]
    sums = np.concatenate(([0.0], np.cumsum(found[order])))
    rates = (num_decodes + sums) / cost.decode_s(num_decodes, 100.0 * num_decodes, np.arange(len(sums), dtype=float))
    kept = set(order[: budget.counts.num_granted])
    assert rates[len(kept)] == rates.max()
    start = 0
    for draft, part in zip(drafts, chosen, strict=True):
        own = [node for node in range(draft.num_nodes) if start + node in kept]
        assert part == (draft.picked(own) if own else None)
        if part is not None:
            assert all(draft.parents[node] in (-1, *own) for node in own), "every node has its parent"
            assert part.depth == max(part.depths())
            assert part.num_nodes == len(part.parents)
        start += draft.num_nodes


def test_no_rounding_puts_a_node_before_its_parent() -> None:
    """Where a child is certain its path is worth exactly what its parent's is."""
    rng = random.Random(4)
    for _ in range(200):
        depth = rng.randint(2, 7)
        stated = [rng.random()]
        for _ in range(depth - 1):
            stated.append(stated[-1] * rng.choice((1.0, 1.0, rng.random())))
        chain = DraftTree(tuple(range(depth)), tuple(range(-1, depth - 1)), tuple(stated))
        deep = DraftTree(tuple(range(9)), tuple(range(-1, 8)), (0.5,) * 9)
        paths = AcceptanceStatistics().path_probabilities(ProposedNodes.of([chain, deep]), ["a", "b"]).tolist()
        assert all(paths[node] <= paths[node - 1] for node in range(1, depth))


def plain_outlook(
    cost: StepCost, max_depth: int, num_decodes: int, share: float, nodes: list[tuple[int, float]]
) -> Outlook:
    """nodes: depth and path probability of each."""
    pairs = 100.0 * num_decodes

    def step_s(number: float) -> float:
        return float(cost.decode_s(num_decodes, pairs, np.array([number]))[0])

    best, best_rate = Outlook(0, 0.0), num_decodes / step_s(0.0)
    for depth in range(1, max_depth + 1):
        own = sorted((path for level, path in nodes if level <= depth), reverse=True)
        drafting_s = cost.draft_s(DraftLoad(depth, num_decodes, round(share * len(own))))
        rates = [
            (num_decodes + share * sum(own[:number])) / (step_s(share * number) + drafting_s)
            for number in range(1, len(own) + 1)
        ]
        is_free = best.depth == 0 and drafting_s < CHEAP_DRAFTING * step_s(0.0)
        if max(rates) > best_rate or is_free:
            number = rates.index(max(rates)) + 1
            best, best_rate = Outlook(depth, share * number / num_decodes), max(rates)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_depth_that_pays_is_that_of_a_loop_over_depths_and_numbers(seed: int) -> None:
    rng = random.Random(seed)
    cost = StepCost()
    for _ in range(40):
        number = rng.randrange(9)
        cost.measured(StepLoad(num_decodes=4, num_nodes=number), 2e-3 + rng.choice((1e-5, 3e-4)) * number)
        cost.measured_draft(DraftLoad(1 + number % 5, 4, number), (1 + number % 5) * rng.choice((1e-6, 2e-4, 2e-3)))
    num_seen, num_decodes = rng.choice((1, 8)), rng.choice((1, 4, 30))
    drafts = [grown(rng)[0] for _ in range(num_seen)]
    nodes = ProposedNodes.of(drafts)
    paths = AcceptanceStatistics().path_probabilities(nodes, [f"r{number}" for number in range(num_seen)])
    outlook = DraftOutlook(cost, int(nodes.depths.max()))
    outlook.saw(num_seen, nodes.depths, paths)
    found = outlook.best(num_decodes, 100.0 * num_decodes)
    seen = list(zip(nodes.depths.tolist(), paths.tolist(), strict=True))
    expected = plain_outlook(cost, int(nodes.depths.max()), num_decodes, num_decodes / num_seen, seen)
    assert found.depth == expected.depth
    assert found.nodes_per_request == pytest.approx(expected.nodes_per_request)


def test_of_many_nodes_some_stand_for_all() -> None:
    """The outlook of a large batch is that of a small one alike, and small enough to be looked at."""
    rng, cost = random.Random(2), StepCost()
    drafts = [grow(rng, GRANT, 0.7, 1.0).draft for _ in range(256)]
    nodes = ProposedNodes.of(drafts)
    paths = AcceptanceStatistics().path_probabilities(nodes, [f"r{number}" for number in range(256)])
    order = np.argsort(-paths)
    outlook = DraftOutlook(cost, 5)
    seen = list(zip(nodes.depths.tolist(), paths.tolist(), strict=True))
    expected = plain_outlook(cost, 5, 8, 8 / 256, seen)
    for _ in range(6):
        outlook.saw(256, nodes.depths[order], paths[order])
        found = outlook.best(8, 800.0)
        assert found.depth == expected.depth
        assert found.nodes_per_request == pytest.approx(expected.nodes_per_request, rel=0.1)
        share, depths, own = outlook._average(256)
        assert len(own) <= 400
        for depth in range(1, 6):
            worth = share * own[depths == depth].sum()
            assert worth == pytest.approx(sum(path for level, path in seen if level == depth), rel=0.05)


@pytest.mark.parametrize("has_state", [True, False])
def test_every_draft_of_a_plan_has_pages_and_a_place_in_the_history_and_no_useless_levels(has_state: bool) -> None:
    """In pools that are too small for all drafts, so that some are let go."""
    bench = make_bench(num_pages=24, num_state_rows=12, has_state=has_state, max_running=5, draft_seed=3)
    for number in range(12):
        bench.scheduler.submit(make_request(f"r{number}", 5 + number, 4 + 2 * number, salt=number))
    left = {f"r{number}": 4 + 2 * number for number in range(12)}
    num_drafts = 0
    while bench.scheduler.has_work:
        plan = bench.scheduler.plan()
        assert plan is not None
        for item in plan.items:
            depth = 0 if item.draft is None else item.draft.depth
            assert len(item.page_ids) == -(-(item.start + len(item.token_ids) + depth) // 4)
            assert item.page_ids.all()
            assert depth == 0 or depth <= left[item.request_id] - 1
            if item.replay is not None and has_state:
                assert item.replay.num_tokens + 1 + depth <= DRAFT_CAPACITY
            num_drafts += depth > 0
        output = bench.probe.run(plan)
        for name, tokens in output.tokens.items():
            left[name] -= len(tokens)
        bench.scheduler.apply(plan, output)
        bench.cache.check()
    assert num_drafts > 20
