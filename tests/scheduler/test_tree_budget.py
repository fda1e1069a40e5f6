"""The nodes of a step: the best of the batch, as many as pay, and never fewer tokens per second than without."""

from __future__ import annotations

import itertools
import logging
import random
from pathlib import Path

import numpy as np
import pytest
from drafting_world import World, grow

from turnkeep.scheduler.acceptance import AcceptanceStatistics
from turnkeep.scheduler.cost_model import StepCost, StepCostFile, StepLoad
from turnkeep.scheduler.draft_probes import MAX_PROBE_EVERY
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.speculation_config import SpeculationConfig
from turnkeep.scheduler.tree_budget import LOOK_EVERY, MAX_FIRST, TreeBudget

GRANT = TreeGrant(num_nodes=99, max_nodes_per_request=9, max_depth=4, max_children=3)
CONFIG = SpeculationConfig(6, 3, 15)


def make_budget(cost: StepCost | None = None, **limits: int) -> TreeBudget:
    return TreeBudget(CONFIG, cost or StepCost(), AcceptanceStatistics(), **limits)


def known_cost(plain_s: float, node_s: float, any_s: float = 0.0) -> StepCost:
    """Costs of steps with a few requests, learnt from exact measurements."""
    cost = StepCost()
    for number in range(400):
        num_decodes, num_nodes = 1 + number % 8, (number % 3) * (number % 5)
        load = StepLoad(num_decodes=num_decodes, num_nodes=num_nodes)
        cost.measured(load, plain_s + node_s * num_nodes + (any_s if num_nodes else 0.0))
    return cost


def select(budget: TreeBudget, *drafts: DraftTree | None) -> list[DraftTree | None]:
    """What of each is verified when that many requests decode, those with a draft and those without."""
    drafting = [(number, draft) for number, draft in enumerate(drafts) if draft is not None]
    chosen: list[DraftTree | None] = [None] * len(drafts)
    parts = budget.select([f"r{number}" for number, _ in drafting], [draft for _, draft in drafting], len(drafts), 0)
    for (number, _), part in zip(drafting, parts, strict=True):
        chosen[number] = part
    return chosen


def expected(drafts: list[DraftTree | None]) -> float:
    return sum(sum(draft.probabilities) for draft in drafts if draft is not None)


def test_the_chosen_nodes_are_trees_and_the_best_of_all_that_could_be_chosen() -> None:
    """Against all connected sets of nodes, for every price of a node."""
    rng = random.Random(6)
    small = TreeGrant(99, 4, 3, 2)
    for _ in range(12):
        drafts: list[DraftTree | None] = [grow(rng, small, skill, 1.0).draft for skill in (0.8, 0.5, 0.3)]
        best_of: dict[int, float] = {0: 0.0}
        per_request = [list(_connected(draft)) for draft in drafts if draft is not None]
        for parts in itertools.product(*per_request):
            number = sum(len(part[0]) for part in parts)
            best_of[number] = max(best_of.get(number, 0.0), sum(part[1] for part in parts))
        for node_s in (1e-5, 1e-4, 5e-4, 2e-3):
            budget = make_budget(known_cost(2e-3, node_s))
            chosen = select(budget, *drafts)
            for draft in chosen:
                if draft is not None:
                    assert all(parent < node for node, parent in enumerate(draft.parents))
            number = sum(draft.num_nodes for draft in chosen if draft is not None)
            assert expected(chosen) == pytest.approx(best_of[number])
            rates = {n: (3 + value) / (2e-3 + node_s * n) for n, value in best_of.items()}
            assert rates[number] > 0.98 * max(rates.values())


def _connected(draft: DraftTree) -> list[tuple[tuple[int, ...], float]]:
    found = []
    for number in range(draft.num_nodes + 1):
        for nodes in itertools.combinations(range(draft.num_nodes), number):
            if all(draft.parents[node] < 0 or draft.parents[node] in nodes for node in nodes):
                found.append((nodes, sum(draft.probabilities[node] for node in nodes)))
    return found


def test_a_part_of_a_draft_keeps_tokens_parents_and_probabilities_together() -> None:
    draft = DraftTree((1, 2, 3, 4, 5), (-1, -1, 0, 1, 3), (0.3, 0.6, 0.05, 0.5, 0.4))
    (chosen,) = select(make_budget(known_cost(2e-3, 5e-4)), draft)
    assert chosen == DraftTree((2, 4, 5), (-1, 0, 1), (0.6, 0.5, 0.4))


def test_a_cheap_node_keeps_whole_drafts_and_a_dear_one_none() -> None:
    draft = grow(random.Random(1), GRANT, 0.6, 1.0).draft
    assert select(make_budget(known_cost(2e-3, 1e-7)), draft, None)[0] is draft
    assert select(make_budget(known_cost(2e-3, 5e-3)), draft, None) == [None, None]


def test_a_first_node_that_does_not_pay_is_no_reason_to_stop_there() -> None:
    """Verifying at all has a price: throughput drops with one node, and is more than twice as high with seven."""
    probabilities = tuple(0.95**depth for depth in range(1, 8))
    chain = DraftTree(tuple(range(7)), tuple(range(-1, 6)), probabilities)
    cost = known_cost(2e-3, 1e-5, any_s=3e-3)
    assert select(make_budget(cost), chain.first(1)) == [None]
    assert select(make_budget(cost), chain) == [chain]


def test_the_number_of_nodes_is_bounded_over_the_batch() -> None:
    drafts = [grow(random.Random(number), GRANT, 0.6, 1.0).draft for number in range(5)]
    chosen = select(make_budget(known_cost(2e-3, 1e-7), max_nodes=7), *drafts)
    assert sum(draft.num_nodes for draft in chosen if draft is not None) == 7


def test_nodes_go_to_the_requests_whose_drafts_are_better() -> None:
    rng = random.Random(3)
    sure, unsure = grow(rng, GRANT, 0.9, 1.0).draft, grow(rng, GRANT, 0.2, 1.0).draft
    chosen = select(make_budget(known_cost(2e-3, 5e-4)), sure, unsure)
    assert chosen[0] is not None
    assert chosen[0].num_nodes > (chosen[1].num_nodes if chosen[1] is not None else 0)


def linear(num_requests: int, num_nodes: int) -> float:
    return 2e-3 + 1e-4 * num_requests + 6e-5 * num_nodes + (3e-4 if num_nodes else 0.0)


def computing_bound(num_requests: int, num_nodes: int) -> float:
    """Every token of a step costs the same: there is nothing to gain from drafts but a little overhead."""
    return 3e-4 + 1.5e-3 * (num_requests + num_nodes)


def tiled(num_requests: int, num_nodes: int) -> float:
    """Tokens are computed in tiles of 16."""
    return 2e-3 + 1.2e-3 * -(-(num_requests + num_nodes) // 16)


@pytest.mark.parametrize("stated_power", [0.5, 1.0])
@pytest.mark.parametrize("num_requests", [1, 8, 48])
@pytest.mark.parametrize("step_s", [linear, computing_bound, tiled])
def test_drafts_are_never_slower_than_plain_decoding_and_faster_where_they_can_be(
    step_s: object, num_requests: int, stated_power: float
) -> None:
    assert callable(step_s)
    world = World(
        make_budget(), num_requests, step_s, draft_level_s=3e-4, skills=(0.85, 0.6, 0.3), stated_power=stated_power
    )
    world.run(150)
    rate = world.run(250 if num_requests < 48 else 100)
    plain = num_requests / step_s(num_requests, 0)
    assert rate > 0.97 * plain
    if step_s is linear:
        assert rate > (1.15 if num_requests < 48 else 1.07) * plain


@pytest.mark.parametrize("num_requests", [8, 16, 48])
@pytest.mark.parametrize("step_s", [linear, computing_bound, tiled])
def test_little_is_lost_before_it_is_known_that_drafts_are_never_right(step_s: object, num_requests: int) -> None:
    assert callable(step_s)
    for seed in range(3):
        world = World(make_budget(), num_requests, step_s, draft_level_s=3e-4, skills=(0.02,), seed=seed)
        assert world.run(40) > 0.95 * num_requests / step_s(num_requests, 0)


def test_plain_steps_come_before_the_first_drafts_of_so_many_requests_but_few() -> None:
    world = World(make_budget(), 4, linear, skills=(0.85,))
    world.run(8)
    assert world.num_nodes[:3] == [0, 0, 0]
    assert all(world.num_nodes[4:])
    budget = make_budget()  # whose steps all have prompts among them, so that none is measured as plain
    assert [budget.grant(4, 2000) is None for _ in range(MAX_FIRST + 1)] == [True] * MAX_FIRST + [False]


def test_what_a_probe_finds_counts_and_not_what_was_proposed_before_it() -> None:
    world = World(make_budget(), 4, linear, draft_level_s=1e-3, skills=(0.85,))
    world.run(100)
    world.skills = (0.02,)
    world.run(150)
    world.skills = (0.85,)
    assert not world.num_nodes[-1]
    num_steps = next(number for number in range(MAX_PROBE_EVERY) if world.run(1) and world.num_nodes[-1])
    assert num_steps < MAX_PROBE_EVERY
    world.run(12)
    assert sum(number > 0 for number in world.num_nodes[-8:]) == 8


def test_drafts_grow_at_once_where_they_are_right() -> None:
    world = World(make_budget(), 8, linear, draft_level_s=3e-4, skills=(0.85,))
    assert world.run(12) > 1.2 * 8 / linear(8, 0)


def test_all_drafts_stop_under_load_and_come_back_when_it_is_gone() -> None:
    """A machine whose tokens are free up to 32 in a step and cost a lot beyond."""
    budget = make_budget()

    def step_s(num_requests: int, num_nodes: int) -> float:
        return 4e-3 + 1e-3 * max(num_requests + num_nodes - 32, 0)

    quiet = World(budget, 2, step_s, draft_level_s=1e-4, skills=(0.8,))
    assert quiet.run(300) > 1.5 * 2 / step_s(2, 0)
    busy = World(budget, 64, step_s, draft_level_s=1e-4, skills=(0.8,), seed=1)
    busy.run(100)
    assert busy.run(150) > 0.97 * 64 / step_s(64, 0)
    assert sum(busy.num_nodes[-150:]) / 150 < 8
    quiet.run(50)
    assert quiet.run(200) > 1.5 * 2 / step_s(2, 0)


def test_drafts_that_become_useless_are_given_up_and_tried_again_later() -> None:
    world = World(make_budget(), 4, linear, draft_level_s=1e-3, skills=(0.8,))
    world.run(200)
    world.skills = (0.02,)
    world.run(200)
    before = len(world.num_nodes)
    world.run(400)
    assert sum(number > 0 for number in world.num_nodes[before:]) < 40
    world.skills = (0.85,)
    world.run(2000)
    assert sum(number > 0 for number in world.num_nodes[-100:]) > 80


def test_without_running_requests_nothing_is_granted() -> None:
    assert make_budget().grant(0, 0) is None
    assert make_budget().select([], [], 0, 0) == []


def test_grants_keep_to_the_limits() -> None:
    budget = make_budget(known_cost(2e-3, 1e-7), max_nodes=20)
    grant = budget.grant(3, 0)
    assert grant is not None
    assert grant.max_depth <= CONFIG.max_draft_len
    assert grant.max_children == CONFIG.dynamic_tree_max_topk
    assert grant.max_nodes_per_request <= CONFIG.max_total_draft_tokens
    assert grant.num_nodes <= 20


def test_the_price_of_plain_steps_and_of_drafts_stays_known() -> None:
    world = World(make_budget(), 2, linear, skills=(0.8,))
    world.run(400)
    plain_steps = sum(number == 0 for number in world.num_nodes[-300:])
    assert 1 <= plain_steps <= 12


def test_what_the_change_to_plain_steps_costs_is_not_taken_for_their_price() -> None:
    world = World(make_budget(), 1, linear, draft_level_s=3e-4, fold_s=2e-3, skills=(0.8,), noise=0.01)
    world.run(600)
    assert sum(number > 0 for number in world.num_nodes[-200:]) > 180  # plain steps are checks, and begin with a fold
    (plain_s,) = world.budget._cost.decode_s(1, 500.0, np.zeros(1))
    assert plain_s == pytest.approx(linear(1, 0), rel=0.05)


def test_while_drafts_rest_few_of_the_plain_steps_are_learnt_from() -> None:
    world = World(make_budget(), 4, linear, draft_level_s=1e-3, skills=(0.02,))
    world.run(300)
    before = world.budget._cost.num_measured
    world.run(200)
    assert 200 // LOOK_EVERY <= world.budget._cost.num_measured - before <= 50


def test_every_choice_is_explained_in_a_line_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    world = World(make_budget(), 3, linear, draft_level_s=1e-4)
    with caplog.at_level(logging.DEBUG, logger="turnkeep.scheduler.tree_budget"):
        world.run(60)
    lines = [record.getMessage() for record in caplog.records if "tree budget" in record.getMessage()]
    assert len(lines) == 60
    assert "no drafts" in lines[0]
    assert "more tokens expected" in lines[-1]
    values = world.budget.counter_values()
    assert values["draft_num_granted_nodes"] == sum(world.num_nodes) > 0
    assert values["draft_num_steps"] + values["draft_num_plain_steps"] == 60
    assert values["draft_num_verified_nodes.1"] >= values["draft_num_accepted_nodes.1"] > 0
    assert values["draft_predicted_step_seconds"] == pytest.approx(values["draft_measured_step_seconds"], rel=0.35)
    assert values["draft_drafting_seconds"] > 0
    accepted = sum(value for name, value in values.items() if name.startswith("draft_num_accepted_nodes"))
    assert accepted == world.num_tokens - 60 * 3
    assert values["draft_expected_tokens"] == pytest.approx(accepted, rel=0.35)


def test_a_budget_keeps_what_steps_cost_for_the_next_engine(tmp_path: Path) -> None:
    kept = StepCostFile(tmp_path / "step_cost.json", "m")
    TreeBudget(CONFIG, StepCost(), AcceptanceStatistics(), cost_file=kept).leave()
    assert not kept.path.exists(), "nothing was measured"
    world = World(TreeBudget(CONFIG, kept.load(), AcceptanceStatistics(), cost_file=kept), 2, linear)
    world.run(100)
    world.budget.leave()
    load = StepLoad(num_decodes=2, num_nodes=6, num_decode_pairs=8 * 500)
    assert kept.load().step_s(load) == pytest.approx(linear(2, 6), rel=0.2)


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    world = World(make_budget(), 3, linear)
    for _ in range(40):
        world.run(5)
        for number in range(3):
            world.budget.forget(f"r{number}")
    world.budget.counter_values()
    assert not world.budget.acceptance._requests
