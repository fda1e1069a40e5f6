"""Snapshots inside prompts: where others will leave them is learnt, and the second use of a long prompt hits."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.test_density import SPEC, Bench

from turnkeep.cache.branch_forecast import EXPORT_TOKENS, BranchForecast, FirstPrompt, LikelyBranch
from turnkeep.cache.lines import Line
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.prefix_match import MIN_BRANCH_TOKENS
from turnkeep.cache.return_forecast import ReturnForecast

PAGE = SPEC.page_size


def _forecast(page_size: int = PAGE) -> BranchForecast:
    return BranchForecast(page_size, PrefillCost(1e-4, 1e-9), ReturnForecast())


def _document(number: int, num_tokens: int = 400) -> list[int]:
    return [number * 10_000 + place for place in range(num_tokens)]


def test_nothing_is_planned_where_nobody_ever_left_a_prompt() -> None:
    forecast = _forecast()
    for number in range(50):
        assert forecast.opened(Line(number=number), 0, 4000, float(number)) == []


def test_a_prompt_that_is_left_as_others_were_is_cut_just_before() -> None:
    forecast = _forecast()
    for number in range(40):
        forecast.opened(Line(number=number), 0, 4000, 10.0 * number)
        forecast.left(number, 3500, 0, 10.0 * number + 1)
    [*_, last] = planned = forecast.opened(Line(number=99), 100, 4100, 500.0)
    assert [branch.position for branch in planned] == sorted({branch.position for branch in planned})
    assert all(branch.position % PAGE == 0 and 100 < branch.position < 4100 for branch in planned)
    assert 3000 <= last.position <= 3600


def test_what_was_left_far_from_the_places_that_are_known_counts_alone() -> None:
    forecast = _forecast()
    forecast.opened(Line(number=1), 0, 4000, 0.0)
    forecast.left(1, 2000, 2000 - MIN_BRANCH_TOKENS + 1, 1.0)  # a trunk ends there
    forecast.left(1, MIN_BRANCH_TOKENS - 1, 0, 1.0)  # not worth a snapshot
    forecast.left(1, 4000, 0, 1.0)  # the end of the prompt, which has its own
    forecast.left(2, 2000, 0, 1.0)  # a line without a first prompt
    assert forecast.opened(Line(number=3), 0, 4000, 2.0) == []
    forecast.left(1, 2000, 2000 - MIN_BRANCH_TOKENS, 3.0)
    for number in range(4, 40):
        forecast.opened(Line(number=number), 0, 4000, 4.0)
        forecast.left(number, 2000, 0, 5.0)
    assert forecast.opened(Line(number=50), 0, 4000, 6.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(1, 700), st.integers(0, 1300)), min_size=1, max_size=20),
    st.integers(0, 200),
    st.integers(2 * 16, 700),
)
def test_no_other_set_of_places_promises_more(prompts: list[tuple[int, int, int]], base: int, num_tokens: int) -> None:
    page_size = 16
    forecast = _forecast(page_size)
    for number, (start, length, left_at) in enumerate(prompts):
        forecast.opened(Line(number=number), start, start + length, float(number))
        forecast.left(number, left_at, 0, number + 0.5)
    zones = forecast._zones(num_tokens)
    assert [zone.start for zone in zones[1:]] == [zone.end for zone in zones[:-1]]
    assert (zones[0].start, zones[-1].end) == (0, num_tokens)
    chances = [forecast._chance(zone.key) for zone in zones]
    places = [(base + zone.start) // page_size * page_size for zone in zones]
    cost = PrefillCost(1e-4, 1e-9)

    def promise(chosen: tuple[int, ...]) -> float:
        """Each zone's leavers resume at the deepest chosen place at or before it."""
        saved_s = 0.0
        for zone in range(len(zones)):
            before = [place for place in chosen if place <= zone]
            saved_s += chances[zone] * cost.seconds(base, places[before[-1]]) if before else 0.0
        return saved_s - len(chosen) * cost.seconds(0, EXPORT_TOKENS)

    allowed = [place for place in range(len(zones)) if places[place] - base >= MIN_BRANCH_TOKENS]
    best = max(promise(chosen) for count in range(len(allowed) + 1) for chosen in combinations(allowed, count))
    planned = forecast.opened(Line(number=1000), base, base + num_tokens, 100.0)
    positions = [branch.position for branch in planned]
    assert positions == sorted(set(positions))
    chosen = tuple(min(index for index in allowed if places[index] == position) for position in positions)
    assert promise(chosen) == pytest.approx(best, abs=1e-12)


def test_who_leaves_a_prompt_raises_the_worth_of_its_places_and_time_lowers_it() -> None:
    returns = ReturnForecast()
    forecast = BranchForecast(PAGE, PrefillCost(), returns)
    planned: list[LikelyBranch] = []
    for number in range(60):
        planned = forecast.opened(Line(number=number), 0, 4000, 100.0 * number)
        if number % 2:
            forecast.left(number, 3000, 0, 100.0 * number + 5)
        for _ in returns.advance(100.0 * number + 99):
            pass
    fresh = forecast.index(planned[-1])
    for _ in returns.advance(100_000.0):
        pass
    assert 0 < forecast.index(planned[-1]) < fresh


def test_prompts_that_nobody_leaves_say_nothing_of_conversations() -> None:
    returns = ReturnForecast()
    before = returns.first_index("text")
    forecast = BranchForecast(PAGE, PrefillCost(), returns)
    for number in range(200):
        forecast.opened(Line(number=number), 0, 4000, float(number))
    for _ in range(50):
        for _ in returns.advance(1e6):
            pass
    assert returns.first_index("text") == before


def test_a_line_that_begins_again_waits_with_its_new_prompt_alone() -> None:
    returns = ReturnForecast()
    forecast = BranchForecast(PAGE, PrefillCost(), returns)
    line = Line(number=1)
    forecast.opened(line, 0, 4000, 0.0)
    forecast.opened(line, 0, 2000, 1.0)
    assert [waiter.end for waiter in returns.advance(2.5) if isinstance(waiter, FirstPrompt)] == [2000]


def test_the_second_use_of_a_long_prompt_resumes_inside_it() -> None:
    bench = Bench(num_rows=400)
    reused = []
    for number in range(30):
        bench.now_s += 10
        assert bench.turn([*_document(number), 1], [2, 3], f"first {number}") == 0
        bench.now_s += 10
        reused.append(bench.turn([*_document(number)[:300], 9, 9], [2, 3], f"second {number}"))
    assert reused[0] == 0  # nothing was known of second uses
    assert all(200 <= tokens <= 300 for tokens in reused[10:])


def test_conversations_that_nobody_shares_get_no_snapshots_inside_their_prompts() -> None:
    bench = Bench(num_rows=400)
    for number in range(30):
        bench.now_s += 10
        prompt = _document(number)
        bench.turn(prompt, [2, 3], f"{number}")
        bench.turn([*prompt, 2, 3, 4, 5], [6, 7], f"{number}")
    prompt = _document(99)
    seq = bench.cache.open(bench.cache.match("", prompt, "99"), prompt, conversation_id="99")
    assert seq is not None
    assert {boundary.kind for boundary in seq.boundaries} <= {"turn_start"}
