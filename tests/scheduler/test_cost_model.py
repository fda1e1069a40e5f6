"""What steps cost is learnt from noisy measurements, kept over a restart, and never negative."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from turnkeep.scheduler.cost_model import DraftLoad, StepCost, StepCostFile, StepLoad
from turnkeep.scheduler.drafts import DraftTree
from turnkeep.scheduler.least_squares import OnlineLeastSquares
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import StepItem, StepPlan

TRUTH = (1.5e-3, 2.5e-4, 2e-9, 6e-4, 2.2e-4, 4e-4, 3e-8)


def true_s(load: StepLoad) -> float:
    return sum(cost * feature for cost, feature in zip(TRUTH, load.features(), strict=True))


def random_load(rng: random.Random) -> StepLoad:
    num_decodes = rng.choice([0, 1, 2, 4, 8, 16, 32])
    num_nodes = num_decodes * rng.choice([0, 0, 1, 3, 7, 15])
    prefill = 0 if num_decodes and rng.random() < 0.7 else rng.randrange(1, 512)
    length = rng.randrange(50, 4000)
    return StepLoad(prefill, prefill * length * 0.5, num_decodes, num_nodes, (num_decodes + num_nodes) * length)


@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_costs_are_found_among_noise_and_rare_interruptions(noise: float) -> None:
    rng, cost = random.Random(4), StepCost()
    for _ in range(800):
        load = random_load(rng)
        seconds = true_s(load) * rng.lognormvariate(0, noise)
        if noise and rng.random() < 0.02:
            seconds += 0.5  # somebody else had the processor
        cost.measured(load, seconds)
    errors = [cost.step_s(load) / true_s(load) - 1 for load in (random_load(rng) for _ in range(200))]
    assert abs(float(np.mean(errors))) < 0.1
    assert float(np.quantile(np.abs(errors), 0.9)) < (0.05 if noise == 0 else 0.15)


def test_the_time_of_any_number_of_nodes_is_that_of_the_step_with_them() -> None:
    rng, cost = random.Random(1), StepCost()
    for _ in range(400):
        load = random_load(rng)
        cost.measured(load, true_s(load))
    seconds = cost.decode_s(4, 4 * 900, np.arange(21.0))
    for num_nodes in (0, 1, 20):
        load = StepLoad(num_decodes=4, num_nodes=num_nodes, num_decode_pairs=(4 + num_nodes) * 900)
        assert seconds[num_nodes] == pytest.approx(cost.step_s(load))
        assert seconds[num_nodes] == pytest.approx(true_s(load), rel=0.1)
    assert (np.diff(seconds) > 0).all()


def test_what_a_few_plain_steps_took_is_known_whatever_the_fit_becomes() -> None:
    """Hundreds of steps with drafts change the line through all of them, not the price of the plain ones."""
    cost = StepCost()
    for _ in range(6):
        cost.measured(StepLoad(num_decodes=8, num_decode_pairs=8 * 500), 0.012)
    for number in range(400):
        num_nodes = 1 + number % 20
        cost.measured(StepLoad(0, 0, 8, num_nodes, (8 + num_nodes) * 500), 0.02 + 0.002 * num_nodes)
    plain_s, one_s = cost.decode_s(8, 8 * 500, np.arange(2.0))
    assert plain_s == pytest.approx(0.012, rel=0.2)
    assert one_s == pytest.approx(0.022, rel=0.1)


def test_a_step_with_drafts_is_never_believed_cheaper_than_one_without() -> None:
    cost = StepCost()
    for _ in range(20):
        cost.measured(StepLoad(num_decodes=4), 0.01)
        cost.measured(StepLoad(num_decodes=4, num_nodes=3), 0.005)
    assert (np.diff(cost.decode_s(4, 0.0, np.arange(5.0))) >= 0).all()


def test_what_is_not_linear_is_taken_up_by_the_regime_it_belongs_to() -> None:
    """Steps with drafts take a slower path for many requests: a line through all of them would be wrong for each."""
    cost, rng = StepCost(), random.Random(2)

    def truth(load: StepLoad) -> float:
        return true_s(load) * (2.0 if load.num_nodes and load.num_decodes >= 16 else 1.0)

    for _ in range(600):
        load = random_load(rng)
        cost.measured(load, truth(load))
    for num_decodes in (2, 20):
        for num_nodes in (0, num_decodes * 4):
            load = StepLoad(0, 0, num_decodes, num_nodes, (num_decodes + num_nodes) * 1000)
            assert cost.step_s(load) == pytest.approx(truth(load), rel=0.25)


def test_drafting_has_a_price_of_its_own() -> None:
    rng, cost = random.Random(3), StepCost()
    for _ in range(300):
        load = DraftLoad(rng.randrange(1, 6), rng.randrange(1, 9), rng.randrange(1, 60))
        cost.measured_draft(load, 1e-4 + 7e-4 * load.num_levels + 2e-5 * load.num_nodes)
    assert cost.draft_s(DraftLoad(4, 2, 20)) == pytest.approx(1e-4 + 28e-4 + 4e-4, rel=0.1)


def test_costs_are_never_negative_and_unseen_ones_keep_what_was_believed() -> None:
    model = OnlineLeastSquares([1.0, 1.0, 1.0])
    for number in range(64):
        model.measured([1.0, number % 7, 0.0], 3.0 - 0.2 * (number % 7))  # falls with the second one
    assert (model.costs >= 0).all()
    assert model.costs[1] == 0.0
    assert model.costs[2] == pytest.approx(1.0)
    model.measured([1.0, 1.0, 1.0], 0.0)
    assert model.num_measured == 64, "what took no time tells nothing"


def test_no_step_is_believed_to_be_free() -> None:
    cost = StepCost()
    cost._compute = OnlineLeastSquares([0.0] * len(cost._compute.costs))
    assert (cost.decode_s(1, 100.0, np.arange(6.0)) > 0.0).all()


def test_a_changed_machine_is_noticed_within_a_few_hundred_steps() -> None:
    model = OnlineLeastSquares([1.0, 1.0])
    for seconds, number in ((2.0, 500), (6.0, 700)):
        for step in range(number):
            model.measured([1.0, step % 3], seconds)
        assert model.predict([1.0, 1.0]) == pytest.approx(seconds, rel=0.15)


def test_the_load_of_a_plan_tells_decodes_nodes_and_prefill_apart() -> None:
    sampling = SamplingParams(max_new_tokens=4)

    def item(name: str, start: int, count: int, draft: DraftTree | None = None) -> StepItem:
        return StepItem(name, [1] * count, start, np.zeros(1, np.int32), 1, (), sampling, draft=draft)

    draft = DraftTree((5, 6, 7), (-1, 0, 0), (0.9, 0.5, 0.3))
    plan = StepPlan((), (), (item("a", 9, 1), item("b", 19, 1, draft), item("c", 0, 6), item("d", 4, 2)))
    assert StepLoad.of(plan) == StepLoad(8, 18.0 + 10.0, 2, 3, 10.0 + 4 * 20.0)


def test_an_engine_starts_with_what_an_earlier_one_knew(tmp_path: Path) -> None:
    rng, cost, path = random.Random(5), StepCost(), tmp_path / "state" / "step_cost.json"
    for _ in range(400):
        load = random_load(rng)
        cost.measured(load, true_s(load))
    StepCostFile(path, "another model").save(StepCost())
    StepCostFile(path, "demo bfloat16").save(cost)
    again = StepCostFile(path, "demo bfloat16").load()
    load = StepLoad(100, 5e4, 8, 24, 3e4)
    assert again.step_s(load) == pytest.approx(true_s(load), rel=0.1)
    assert StepCostFile(path, "unknown").load().step_s(load) == StepCost().step_s(load)
    assert sorted(json.loads(path.read_text())["costs"]) == ["another model", "demo bfloat16"]
    assert [file.name for file in path.parent.iterdir()] == ["step_cost.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"version": 99, "costs": {"m": {}}}',
        '{"version": 1, "costs": {"m": {"compute": [1, 2]}}}',
        '{"version": 1, "costs": {"m": {"compute": [1, 1, 1, 1, 1, 1, -1], "draft": [null]}}}',
        '{"version": 1, "costs": [1]}',
    ],
)
def test_a_file_that_cannot_be_used_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "step_cost.json"
    path.write_text(content)
    load = StepLoad(num_decodes=3)
    kept = StepCostFile(path, "m")
    assert kept.load().step_s(load) == StepCost().step_s(load)
    kept.save(StepCost())
    assert "m" in json.loads(path.read_text())["costs"]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    StepCostFile(tmp_path / "file" / "step_cost.json", "m").save(StepCost())
    assert "not kept for the next engine" in caplog.text
