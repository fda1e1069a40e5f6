"""Whole step plans: what is computed together, in which order, with which exports and samplings."""

from __future__ import annotations

from content_probe import expected_output
from scheduler_builders import VOCAB_SIZE, Bench, make_bench, make_request

from turnkeep.scheduler.step_plan import StepPlan


def planned(bench: Bench) -> StepPlan:
    """Plan, run and apply one step, and return its plan."""
    plan = bench.scheduler.plan()
    assert plan is not None
    bench.scheduler.apply(plan, bench.probe.run(plan))
    return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(item.request_id, item.start, len(item.token_ids)) for item in plan.items]


def test_a_prompt_within_the_budget_is_one_chunk_and_samples_its_first_token() -> None:
    bench = make_bench()
    request = make_request("a", 10)
    bench.scheduler.submit(request)
    plan = planned(bench)
    assert shape(plan) == [("a", 0, 10)]
    item = plan.items[0]
    assert item.token_ids == request.token_ids[:10]
    assert item.sampling is request.sampling
    assert len(item.page_ids) == 3
    assert item.state_row is not None
    assert plan.num_tokens == 10


def test_chunks_follow_the_budget_and_only_the_last_one_samples() -> None:
    bench = make_bench(max_step_tokens=7)
    bench.scheduler.submit(make_request("a", 17))
    plans = [planned(bench) for _ in range(4)]
    assert [shape(plan) for plan in plans] == [[("a", 0, 7)], [("a", 7, 7)], [("a", 14, 3)], [("a", 17, 1)]]
    assert [plan.items[0].sampling is not None for plan in plans] == [False, False, True, True]
    assert [len(plan.items[0].page_ids) for plan in plans] == [2, 4, 5, 5]


def test_decodes_come_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    bench = make_bench(max_step_tokens=12)
    for index in range(2):
        bench.scheduler.submit(make_request(f"old{index}", 5, salt=index, max_new_tokens=9))
    planned(bench)
    bench.scheduler.submit(make_request("new", 20, salt=5))
    assert shape(planned(bench)) == [("old0", 5, 1), ("old1", 5, 1), ("new", 0, 10)]
    assert shape(planned(bench)) == [("old0", 6, 1), ("old1", 6, 1), ("new", 10, 10)]


def test_prefill_progresses_where_decodes_alone_fill_the_budget() -> None:
    bench = make_bench(max_step_tokens=2)
    for index in range(3):
        bench.scheduler.submit(make_request(f"old{index}", 1, salt=index, max_new_tokens=30))
        planned(bench)
    bench.scheduler.submit(make_request("new", 4, salt=9))
    assert shape(planned(bench))[-1] == ("new", 0, 1)
    assert ("new", 1, 1) in shape(planned(bench))


def test_boundaries_inside_and_at_the_end_of_a_chunk_are_exported_without_cutting_it() -> None:
    bench = make_bench()
    bench.scheduler.submit(make_request("a", 20, boundaries=[(6, "trunk"), (13, "turn_start"), (20, "declared")]))
    plan = planned(bench)
    assert shape(plan) == [("a", 0, 20)]
    assert [position for position, _ in plan.items[0].exports] == [6, 13, 20]
    rows = {row for _, row in plan.items[0].exports} | {plan.items[0].state_row}
    assert len(rows) == 4


def test_a_boundary_belongs_to_the_chunk_that_reaches_it() -> None:
    bench = make_bench(max_step_tokens=8)
    bench.scheduler.submit(make_request("a", 20, boundaries=[(8, "trunk"), (9, "turn_start")]))
    plans = [planned(bench) for _ in range(3)]
    assert [[position for position, _ in plan.items[0].exports] for plan in plans] == [[8], [9], []]


def test_boundaries_outside_the_prompt_are_ignored() -> None:
    bench = make_bench()
    bench.scheduler.submit(make_request("a", 8, boundaries=[(0, "trunk"), (9, "turn_start"), (8, "declared")]))
    assert [position for position, _ in planned(bench).items[0].exports] == [8]


def test_two_boundaries_at_one_position_are_one_export() -> None:
    bench = make_bench()
    bench.scheduler.submit(make_request("a", 8, boundaries=[(5, "turn_start"), (5, "trunk")]))
    assert [position for position, _ in planned(bench).items[0].exports] == [5]


def test_models_without_recurrent_layers_export_nothing_and_have_no_rows() -> None:
    bench = make_bench(has_state=False, num_state_rows=1)
    bench.scheduler.submit(make_request("a", 20, boundaries=[(6, "trunk")]))
    item = planned(bench).items[0]
    assert item.exports == ()
    assert item.state_row is None


def test_a_one_token_rest_of_a_prompt_is_packed_with_the_decodes() -> None:
    bench = make_bench(max_step_tokens=9)
    bench.scheduler.submit(make_request("first", 10, salt=1))
    bench.scheduler.submit(make_request("second", 20, salt=2))
    assert shape(planned(bench)) == [("first", 0, 9)]
    plan = planned(bench)
    assert shape(plan) == [("first", 9, 1), ("second", 0, 8)]
    assert plan.items[0].sampling is not None


def test_a_one_token_chunk_that_exports_is_not_packed_with_the_decodes() -> None:
    bench = make_bench(max_step_tokens=9)
    bench.scheduler.submit(make_request("decoding", 2, salt=3, max_new_tokens=20))
    planned(bench)
    bench.scheduler.submit(make_request("a", 9, salt=1, boundaries=[(9, "turn_start")]))
    planned(bench)
    plan = planned(bench)
    assert shape(plan) == [("decoding", 3, 1), ("a", 8, 1)]
    assert len(plan.items[1].exports) == 1


def test_history_is_only_in_plans_of_requests_with_penalties() -> None:
    bench = make_bench()
    bench.scheduler.submit(make_request("plain", 6, salt=1))
    bench.scheduler.submit(make_request("repeating", 6, salt=2, repetition_penalty=1.5))
    planned(bench)
    plain, repeating = planned(bench).items
    assert plain.history is None
    assert repeating.history is not None
    assert len(repeating.history.prompt_ids) == 6
    assert len(repeating.history.output_ids) == 1


def test_a_history_without_repetition_penalty_leaves_the_prompt_out() -> None:
    # Presence and frequency look at the output alone; a long prompt must not be copied at every step for them.
    bench = make_bench()
    bench.scheduler.submit(make_request("present", 6, salt=2, presence_penalty=0.5))
    planned(bench)
    (present,) = planned(bench).items
    assert present.history is not None
    assert present.history.prompt_ids == []
    assert len(present.history.output_ids) == 1


def test_the_next_turn_of_a_conversation_computes_its_new_tokens_only() -> None:
    bench = make_bench()
    bench.scheduler.submit(make_request("one", 18, boundaries=[(18, "turn_start")], conversation_id="c"))
    bench.run()
    bench.scheduler.end_turn("one", stable_tokens=100)
    answer = bench.outputs()["one"]
    history = list(make_request("x", 18).token_ids) + answer
    bench.scheduler.submit(make_request("two", [*history, 1, 2, 3], conversation_id="c"))
    plan = planned(bench)
    # The last sampled token was never fed to the model: it and the three new ones are left.
    assert shape(plan) == [("two", 18 + len(answer) - 1, 4)]
    assert len(plan.row_copies) == 1
    bench.run()
    assert bench.outputs()["two"] == expected_output([*history, 1, 2, 3], 4, VOCAB_SIZE)


def test_a_turn_whose_end_is_not_repeated_resumes_at_its_start() -> None:
    bench = make_bench()
    bench.scheduler.submit(make_request("one", 18, boundaries=[(18, "turn_start")], conversation_id="c"))
    bench.run()
    bench.scheduler.end_turn("one", stable_tokens=18)
    history = make_request("x", 18).token_ids
    bench.scheduler.submit(make_request("two", [*history, 1, 2, 3], conversation_id="c"))
    assert shape(planned(bench)) == [("two", 18, 3)]
