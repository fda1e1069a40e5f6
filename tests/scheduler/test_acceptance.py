"""Probabilities become those of experience; drafts that are never right rest, and all of them raise an alarm."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
from drafting_world import grow

from turnkeep.scheduler.acceptance import ALARM_STEPS, REST_STEPS, WINDOW_STEPS, AcceptanceStatistics
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.proposed_nodes import ProposedNodes

GRANT = TreeGrant(num_nodes=99, max_nodes_per_request=12, max_depth=4, max_children=3)
CHAIN = DraftTree((1, 2, 3), (-1, 0, 1), (0.5, 0.4, 0.2))


def paths(statistics: AcceptanceStatistics, drafts: dict[str, DraftTree]) -> list[float]:
    nodes = ProposedNodes.of(list(drafts.values()))
    return statistics.path_probabilities(nodes, list(drafts)).tolist()


def test_nodes_of_several_drafts_lie_in_one_row_with_their_depths_and_own_probabilities() -> None:
    bushy = DraftTree((9, 8, 7, 6), (-1, -1, 1, 2), (0.5, 0.25, 0.2, 0.1))
    nodes = ProposedNodes.of([CHAIN, bushy])
    assert nodes.starts == [0, 3, 7]
    assert nodes.parents.tolist() == [-1, 0, 1, -1, -1, 4, 5]
    assert nodes.depths.tolist() == [1, 2, 3, 1, 1, 2, 3]
    assert nodes.ancestors.T.tolist() == [
        [-1, -1, 0], [-1, 0, 1], [0, 1, 2], [-1, -1, 3], [-1, -1, 4], [-1, 4, 5], [4, 5, 6]
    ]  # fmt: skip
    assert nodes.edges.tolist() == pytest.approx([0.5, 0.8, 0.5, 0.5, 0.25, 0.8, 0.5])
    assert ProposedNodes.of([]).starts == [0]


def test_before_anything_was_measured_the_drafter_is_believed() -> None:
    assert paths(AcceptanceStatistics(), {"a": CHAIN}) == pytest.approx([0.5, 0.4, 0.2])
    assert paths(AcceptanceStatistics(), {}) == []


@pytest.mark.parametrize("stated_power", [0.4, 1.0, 2.5])
def test_probabilities_become_those_of_experience(stated_power: float) -> None:
    """An overconfident drafter and a timid one are both seen through; sums of siblings stay within one."""
    statistics, rng = AcceptanceStatistics(), random.Random(1)
    for _ in range(3000):
        drafted = grow(rng, GRANT, 0.6, stated_power)
        statistics.measured(["r"], [drafted.draft], [drafted.right])
    expected = accepted = 0.0
    for _ in range(2000):
        drafted = grow(rng, GRANT, 0.6, stated_power)
        own = paths(statistics, {"other": drafted.draft})
        expected += sum(own)
        accepted += len(drafted.right)
        for node, parent in enumerate(drafted.draft.parents):
            assert own[node] <= (own[parent] if parent >= 0 else 1.0) + 1e-12
        assert sum(p for p, parent in zip(own, drafted.draft.parents, strict=True) if parent < 0) <= 1 + 1e-9
    assert expected == pytest.approx(accepted, rel=0.1)


def test_a_request_whose_drafts_are_better_than_others_is_believed_more() -> None:
    statistics, rng = AcceptanceStatistics(), random.Random(2)
    for _ in range(400):
        good, bad = grow(rng, GRANT, 0.8, 1.0), grow(rng, GRANT, 0.3, 1.0)
        # Both state the same: only experience tells them apart.
        told = DraftTree(bad.draft.token_ids, bad.draft.parents, good.draft.probabilities)
        same = [CHAIN, CHAIN]
        accepted = [tuple(range(min(len(good.right), 3))), tuple(range(min(len(bad.right), 3)))]
        statistics.measured(["good", "bad"], same, accepted)
        assert told.num_nodes
    good_paths, bad_paths = paths(statistics, {"good": CHAIN}), paths(statistics, {"bad": CHAIN})
    assert good_paths[0] > 1.3 * bad_paths[0]
    assert bad_paths[0] < paths(statistics, {"new": CHAIN})[0] < good_paths[0]
    statistics.forget("good")
    assert paths(statistics, {"good": CHAIN}) == paths(statistics, {"new": CHAIN})


def test_counts_are_kept_by_depth() -> None:
    statistics = AcceptanceStatistics()
    tree = DraftTree((1, 2, 3), (-1, -1, 0), (0.5, 0.3, 0.2))
    statistics.measured(["a", "b"], [tree, CHAIN], [(0, 2), (0,)])
    assert statistics.counts.num_nodes == {1: 3, 2: 2, 3: 1}
    assert statistics.counts.num_accepted == {1: 2, 2: 1}


def test_only_nodes_below_an_accepted_one_were_put_to_the_test() -> None:
    statistics = AcceptanceStatistics()
    for _ in range(200):
        statistics.measured(["a"], [CHAIN], [()])
    own = paths(statistics, {"new": CHAIN})
    assert own[0] < 0.05
    assert own[1] / own[0] == pytest.approx(0.8, abs=0.01), "nothing is known of what was never reached"


def test_a_request_whose_drafts_are_never_right_rests_twice_as_long_every_time() -> None:
    statistics = AcceptanceStatistics()
    rests = []
    for _ in range(3):
        num_steps = 0
        while not statistics.measured(["a", "b"], [CHAIN, CHAIN], [(), (0,)]):
            num_steps += 1
            assert not statistics.rests("a")
        assert num_steps == WINDOW_STEPS - 1
        rests.append(0)
        while statistics.rests("a"):
            rests[-1] += 1
        assert not statistics.rests("b")
    assert rests == [REST_STEPS, 2 * REST_STEPS, 4 * REST_STEPS]
    assert statistics.counts.num_resets == 3
    statistics.measured(["a"], [CHAIN], [(0,)])  # right again: the next rest is a short one
    while not statistics.measured(["a"], [CHAIN], [()]):
        pass
    assert sum(iter(lambda: statistics.rests("a"), False)) == REST_STEPS


def test_drafts_that_promise_little_may_be_wrong_for_long() -> None:
    statistics = AcceptanceStatistics()
    modest = DraftTree((1,), (-1,), (0.01,))
    assert not any(statistics.measured(["a"], [modest], [()]) for _ in range(WINDOW_STEPS * 4))


def test_an_alarm_is_raised_when_nothing_of_any_request_is_right(caplog: pytest.LogCaptureFixture) -> None:
    statistics = AcceptanceStatistics()
    with caplog.at_level(logging.ERROR):
        for step in range(2 * ALARM_STEPS):
            statistics.measured([f"request {step}"], [CHAIN], [()])
    assert statistics.counts.num_alarms == 2
    assert "no draft of any request was right in 128 steps" in caplog.text
    for _ in range(2 * ALARM_STEPS):
        statistics.measured(["a", "b"], [CHAIN, CHAIN], [(), (0,)])
    assert statistics.counts.num_alarms == 2


def test_what_was_learnt_long_ago_fades() -> None:
    statistics = AcceptanceStatistics()
    single = DraftTree((1,), (-1,), (0.5,))
    for accepted, number in (((0,), 9000), ((), 9000)):
        for _ in range(number // 50):
            statistics.measured([""] * 50, [single] * 50, [accepted] * 50)
    assert paths(statistics, {"new": single})[0] < 0.35
    assert np.isfinite(statistics._hits).all()
