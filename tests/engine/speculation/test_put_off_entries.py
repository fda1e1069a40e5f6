"""Entries that are made later are the ones that would have been made at once: at the end of a turn, after a
suspension, for requests that join, and in what is proposed when drafts come back."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from engine_builders import LoopBench, make_demo_loop, submit
from head_bench import GREEDY, NOTHING, PAGE_SIZE, Bench, assert_same_entries

from turnkeep.cache.copies import RowCopy
from turnkeep.engine.messages import Abort, EndTurn
from turnkeep.engine.speculation.head_drafter import MAX_PUT_OFF
from turnkeep.scheduler.drafts import TreeGrant
from turnkeep.scheduler.speculation_config import SpeculationConfig
from turnkeep.scheduler.step_plan import StepItem, StepOutput, StepPlan

SMALL = TreeGrant(9, 4, 3, 2)


def item(bench: Bench, sequence: int, position: int) -> StepItem:
    """The decode of one token."""
    pages = bench.pages[sequence, : position // PAGE_SIZE + 1]
    return StepItem(str(sequence), [bench.tokens[sequence][position]], position, pages, 1, (), GREEDY)


def decode(bench: Bench, positions: dict[int, int]) -> None:
    """A step that decodes one token of some sequences and proposes nothing."""
    items = [item(bench, sequence, position) for sequence, position in positions.items()]
    bench.drafter.settle(items)
    normed = torch.stack([bench.hidden[sequence, position] for sequence, position in positions.items()])
    if not bench.drafter.put_off(items, normed):
        steps = [(sequence, position, position + 1) for sequence, position in positions.items()]
        bench.drafter.propose([bench.request(*step) for step in steps], NOTHING)


def num_missing(bench: Bench, sequence: int, end: int) -> int:
    """Positions in [1, end) without entries."""
    entries = bench.kv[0][0, bench.pages[sequence]].flatten(0, 1)[1:end]
    return int(entries.isnan().flatten(1).any(1).sum())


@pytest.mark.parametrize("model", ["nemotron_h", "qwen3_5"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_put_off_becomes_what_would_have_been_made_at_once(model: str, seed: int) -> None:
    rng = random.Random(seed)
    bench = Bench(model, num_sequences=3)
    ends = [5, 9, 2]
    bench.drafter.propose([bench.request(sequence, 0, end) for sequence, end in enumerate(ends)], NOTHING)
    num_put_off = 0
    chosen = [0, 1, 2]
    while max(ends) < 60:
        if rng.random() < 0.3:  # others go on, or in another order
            chosen = rng.sample(range(3), k=rng.randint(1, 3))
        if rng.random() < 0.1:
            steps = [(sequence, ends[sequence], ends[sequence] + 1) for sequence in chosen]
            bench.drafter.settle([item(bench, sequence, ends[sequence]) for sequence in chosen])
            bench.drafter.propose([bench.request(*step) for step in steps], SMALL)
        else:
            decode(bench, {sequence: ends[sequence] for sequence in chosen})
        for sequence in chosen:
            ends[sequence] += 1
        for sequence, end in enumerate(ends):
            num_put_off += num_missing(bench, sequence, end)
            assert sequence in chosen or num_missing(bench, sequence, end) == 0  # it may have ended
    assert num_put_off > 20
    for sequence, end in enumerate(ends):
        assert_same_entries(bench.entries(sequence, end), bench.plain_entries(sequence, end))


def test_no_more_is_put_off_than_is_made_in_one_pass() -> None:
    bench = Bench("qwen3_5", num_sequences=1)
    bench.drafter.propose([bench.request(0, 0, 2)], NOTHING)
    pages = np.concatenate([bench.pages[0]] * 9)  # written again and again
    missing = []
    for position in range(2, 2 + 2 * MAX_PUT_OFF):
        one = StepItem("0", [7], position, pages, 1, (), GREEDY)
        bench.drafter.settle([one])
        assert bench.drafter.put_off([one], bench.hidden[0, 5][None])
        run = bench.drafter._run
        missing.append(0 if run is None else len(run))
    assert missing == [*range(1, MAX_PUT_OFF), 0] * 2


def test_a_request_that_joins_finds_the_entries_of_all_others() -> None:
    bench = Bench("qwen3_5", num_sequences=3)
    bench.drafter.propose([bench.request(sequence, 0, 5) for sequence in range(2)], NOTHING)
    for position in range(5, 15):
        decode(bench, {0: position, 1: position})
    assert num_missing(bench, 0, 15) == num_missing(bench, 1, 15) == 10
    going_on = [item(bench, 0, 15), item(bench, 1, 15)]
    bench.drafter.settle(going_on)
    assert num_missing(bench, 0, 15) == num_missing(bench, 1, 15) == 10
    bench.drafter.settle([*going_on, item(bench, 2, 3)])
    assert num_missing(bench, 0, 15) == num_missing(bench, 1, 15) == 0


def test_entries_that_go_on_in_another_page_are_made_before() -> None:
    bench = Bench("qwen3_5", num_sequences=1)
    bench.drafter.propose([bench.request(0, 0, 5)], NOTHING)
    decode(bench, {0: 5})
    decode(bench, {0: 6})
    resumed = item(bench, 0, 7)
    assert bench.drafter.settle([resumed])
    assert num_missing(bench, 0, 7) == 2
    bench.drafter.settle([replace(resumed, page_ids=resumed.page_ids[::-1])])  # suspended, and resumed with a copy
    assert num_missing(bench, 0, 7) == 0


def test_a_step_in_another_row_does_not_go_on_with_the_last() -> None:
    bench = Bench("qwen3_5", num_sequences=1)
    bench.drafter.propose([bench.request(0, 0, 5)], NOTHING)
    decode(bench, {0: 5})
    assert not bench.drafter.settle([replace(item(bench, 0, 6), state_row=2)])
    assert num_missing(bench, 0, 6) == 0


def copied_hidden_state(*, settled: bool) -> torch.Tensor:
    """Of a live row that a step copies, some plain steps after its prompt."""
    bench = make_demo_loop("head", num_pages=34)
    runner = bench.loop._runner
    bench.loop._scheduler._drafting.grant = lambda running: None
    bench.loop.receive(submit("a", list(range(300, 320)), 12, ignore_eos=True))
    for _ in range(6):
        bench.loop.step()
    run, (rows,) = runner.run, runner._storage.tensors.states["draft_hidden"]

    def copying(plan: StepPlan) -> StepOutput:
        if settled:
            runner.settle(())
        live = plan.items[0].state_row
        assert live is not None
        return run(replace(plan, row_copies=(RowCopy(live, len(rows) - 1),)))

    runner.run = copying
    bench.loop.step()
    return rows[-1].clone()


def test_rows_are_written_before_they_are_copied() -> None:
    torch.testing.assert_close(
        copied_hidden_state(settled=False), copied_hidden_state(settled=True), atol=0.0, rtol=0.0
    )


@dataclass
class Ran:
    bench: LoopBench
    said: list[tuple[list[int], int, int]]
    num_put_off: int


def run(*, at_once: bool) -> Ran:
    """Turns of several requests in little memory, with stretches in which nothing is drafted."""
    limits = SpeculationConfig(max_draft_len=3, dynamic_tree_max_topk=2, max_total_draft_tokens=5)
    bench = make_demo_loop("head", limits, num_pages=34)
    scheduler, drafter = bench.loop._scheduler, bench.loop._runner._drafter
    fixed, put_off, chance, num_put_off = scheduler._drafting.grant, drafter.put_off, random.Random(3), 0

    def grant(running: object) -> TreeGrant | None:
        return None if chance.random() < 0.9 else fixed(running)

    def count(items: list[StepItem], normed: torch.Tensor) -> bool:
        nonlocal num_put_off
        is_put_off = not at_once and put_off(items, normed)
        num_put_off += len(items) if is_put_off else 0
        return is_put_off

    scheduler._drafting.grant, drafter.put_off = grant, count
    history = {
        name: [random.Random(name).randrange(3, 1280) for _ in range(12 + 5 * place)]
        for place, name in enumerate("abc")
    }
    said = []
    for turn in range(2):
        for name, prompt in history.items():
            bounds = [(len(prompt), "turn_start")]
            bench.loop.receive(
                submit(f"{name}{turn}", prompt, 85, boundaries=bounds, conversation_id=name, ignore_eos=True)
            )
        for _ in range(9):
            bench.loop.step()
        if turn == 1:
            bench.loop.receive(Abort("b1"))
        bench.run()
        for name, prompt in history.items():
            bench.loop.receive(EndTurn(f"{name}{turn}", 1 << 30))
            end, answer = bench.finished(f"{name}{turn}"), bench.tokens(f"{name}{turn}")
            said.append((answer, end.num_cached_tokens, end.num_accepted_nodes, end.num_draft_nodes))
            history[name] = [*prompt, *answer, 3, 4] if turn == 0 else prompt[:9] + answer
    bench.loop._runner.settle(())
    return Ran(bench, said, num_put_off)


def test_conversations_go_on_with_the_entries_they_would_have_had() -> None:
    later, at_once = run(at_once=False), run(at_once=True)
    assert later.num_put_off > 100
    assert at_once.num_put_off == 0
    assert later.said == at_once.said
    assert sum(num_accepted for _, _, num_accepted, _ in later.said) > 0
    assert later.bench.stats().counters["num_suspensions"] > 0
    ours, theirs = later.bench.loop._runner._storage.tensors, at_once.bench.loop._runner._storage.tensors
    for pages, expected in zip(ours.kv, theirs.kv, strict=True):
        torch.testing.assert_close(pages, expected, atol=2e-4, rtol=1e-3)
    (hidden,), (expected_hidden,) = ours.states["draft_hidden"], theirs.states["draft_hidden"]
    torch.testing.assert_close(hidden, expected_hidden, atol=2e-4, rtol=1e-3)
