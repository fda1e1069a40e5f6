"""Eviction by density: forecasts that learn, costs that are measured, and what goes first under shortage."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.eviction import EvictionPolicy
from turnkeep.cache.policies import EVICTION_POLICIES, make_policy
from turnkeep.cache.prefill_cost import PrefillCost, num_pairs
from turnkeep.cache.return_forecast import MAX_AGED, NUM_BINS, ReturnForecast, Waiter
from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec

SPEC = CacheSpec(4, KVSpec(1, 1, 4, "bfloat16"), StateSpec((StatePart("state", 1, (64,), "float32"),)))


class Bench:
    """A manager of a hybrid model without tensors; `turn` serves one request and says how much was reused."""

    def __init__(self, num_rows: int, num_pages: int = 4000, policy: str = "density") -> None:
        self.now_s = 0.0
        self.policy: EvictionPolicy = make_policy(policy, SPEC, lambda: self.now_s, PrefillCost())  # type: ignore[arg-type]
        self.cache = CacheManager(
            SPEC,
            num_pages=num_pages,
            num_state_rows=num_rows + 1,
            clock=lambda: self.now_s,
            policy=self.policy,
        )

    def turn(
        self,
        prompt: list[int],
        answer: list[int],
        conversation_id: str | None = None,
        *,
        is_call: bool = False,
        has_template: bool = True,
        words_end: int | None = None,
        is_dropped: bool = False,
    ) -> int:
        """words_end: of the user, the prompt's end unless given. is_dropped: the next prompt repeats no more."""
        cache = self.cache
        match = cache.match("", prompt, conversation_id)
        seq = cache.open(match, prompt, conversation_id=conversation_id)
        assert seq is not None
        assert cache.grow(seq, len(prompt) + len(answer))
        reused = seq.num_computed_tokens
        start = words_end if words_end is not None else len(prompt)
        given = (*seq.boundaries, *([Boundary(start, "turn_start")] if has_template else []))
        for boundary in sorted(given, key=lambda boundary: boundary.position):
            if reused < boundary.position <= len(prompt):
                cache.reserve_export(seq, boundary.position, boundary.kind)
        cache.drain_copies()
        cache.advance(seq, len(prompt) - reused)
        cache.publish_exports(seq, prompt)
        cache.advance(seq, len(answer) - 1)
        known = prompt + answer
        handle = cache.finish(seq, known, keep_turn_end=True)
        assert handle is not None
        cache.end_turn(handle, start if is_dropped else len(known), has_tool_call=is_call)
        return reused


def _words(name: str) -> list[int]:
    """Forty tokens that no other name has."""
    chance = random.Random(name)
    return [chance.randrange(1 << 30) for _ in range(40)]


def test_who_stayed_away_longer_than_anybody_returned_is_forecast_to_return_late() -> None:
    forecast = ReturnForecast()
    for number in range(60):
        waiter = Waiter()
        forecast.wait(waiter, "tool", 100.0 * number)
        for _ in forecast.advance(100.0 * number + 16.0):
            pass
        forecast.returned(waiter, 100.0 * number + 16.0)
    waiter = Waiter()
    forecast.wait(waiter, "tool", 10_000.0)
    indices = []
    for age_s in (0.0, 12.0, 60.0, 600.0):
        for _ in forecast.advance(10_000.0 + age_s):
            pass
        indices.append(forecast.index(waiter))
    assert indices[1] > indices[0] > indices[2] > indices[3]  # the closer to 16 s the surer, and then less and less


def test_kinds_of_waiters_learn_apart() -> None:
    forecast = ReturnForecast()
    now_s = 0.0
    for _ in range(40):
        tool, text = Waiter(), Waiter()
        forecast.wait(tool, "tool", now_s)
        forecast.wait(text, "text", now_s)
        for gap_s, waiter in ((2.0, tool), (200.0, text)):
            for _ in forecast.advance(now_s + gap_s):
                pass
            forecast.returned(waiter, now_s + gap_s)
        now_s += 500.0
    assert forecast.first_index("tool") > 5 * forecast.first_index("text")


def test_measured_steps_give_the_cost_of_tokens_and_pairs() -> None:
    cost, chance = PrefillCost(), random.Random(0)
    for _ in range(64):
        start, num_tokens = chance.randrange(100_000), chance.randrange(1, 512)
        pairs = num_pairs(start, start + num_tokens)
        cost.measured(num_tokens, pairs, 0.002 + 3e-5 * num_tokens + 2e-9 * pairs)
    assert cost.per_token_s == pytest.approx(3e-5, rel=0.05)
    assert cost.per_pair_s == pytest.approx(2e-9, rel=0.05)
    assert cost.seconds(1000, 3000) == pytest.approx(3e-5 * 2000 + 2e-9 * 4e6, rel=0.05)


def test_steps_that_took_no_time_are_not_learnt_from() -> None:
    cost = PrefillCost()
    for _ in range(64):
        cost.measured(0, 0.0, 1.0)
        cost.measured(16, 8.0, 0.0)
    assert cost.seconds(0, 10) > 0


def test_a_third_conversation_resumes_where_two_prompts_parted() -> None:
    bench = Bench(num_rows=64)
    shared = list(range(100, 150))
    assert bench.turn([*shared, 1, 2, 3], [9], "a") == 0
    assert bench.turn([*shared, 4, 5, 6], [9], "b") == 0
    assert bench.turn([*shared, 7, 8, 9], [9], "c") == 50
    assert bench.cache.stats().num_snapshots["branch"] == 1
    bench.cache.check()


@pytest.mark.parametrize("policy", ["density", "lru"])
def test_the_branch_snapshot_is_made_by_every_policy(policy: str) -> None:
    bench = Bench(num_rows=64, policy=policy)
    shared = list(range(100, 150))
    reused = [bench.turn([*shared, number], [9], f"c{number}") for number in range(4)]
    assert reused == [0, 0, 50, 50]


def test_a_conversation_that_leaves_its_own_line_gets_a_branch_snapshot_when_it_leaves_there_again() -> None:
    bench = Bench(num_rows=40)
    shared = _words("the words that each sub-agent starts from")
    assert bench.turn([*shared, *_words("first")], [1, 2, 3], "agents") == 0
    bench.turn([*shared, *_words("second")], [1, 2, 3], "agents")
    assert bench.cache.stats().counters.created_snapshots["branch"] == 0
    bench.turn([*shared, *_words("third")], [1, 2, 3], "agents")
    assert bench.cache.stats().counters.created_snapshots["branch"] == 1
    assert bench.turn([*shared, *_words("fourth")], [1, 2, 3], "agents") == len(shared)


def test_a_tool_call_that_returns_soon_outlives_a_chat_that_returns_late() -> None:
    bench = Bench(num_rows=6)
    history: dict[str, list[int]] = {}

    def serve(name: str, *, is_call: bool) -> int:
        prompt = [*history.get(name, []), *_words(f"{name} {bench.now_s}")]
        reused = bench.turn(prompt, [1, 2], name, is_call=is_call)
        history[name] = [*prompt, 1, 2]
        return reused

    for number in range(30):  # learn: calls return in 2 s, people in 300 s
        serve(f"tool{number}", is_call=True)
        serve(f"chat{number}", is_call=False)
        bench.now_s += 2
        serve(f"tool{number}", is_call=True)
        bench.now_s += 300
        serve(f"chat{number}", is_call=False)
    serve("tool", is_call=True)
    for number in range(5):
        serve(f"late{number}", is_call=False)
    bench.now_s += 2
    assert serve("tool", is_call=True) > 0
    bench.cache.check()


def test_a_second_try_of_a_long_message_costs_nothing_of_it() -> None:
    bench = Bench(num_rows=64)
    history = _words("first")
    bench.turn(history, [1, 2], "c")
    history = [*history, 1, 2, *(token for number in range(5) for token in _words(f"pasted {number}"))]
    assert bench.turn(history, [3], "c") == 41
    assert bench.turn([*history, 4], [5], "c") == len(history)


def test_prompts_that_rewrite_every_answer_resume_at_the_end_of_the_prompt_before() -> None:
    bench = Bench(num_rows=64)
    prompt, reused = _words("first"), []
    for number in range(4):
        reused.append(bench.turn(prompt, [1, 2, 3], "c", has_template=False))
        answer = [1, 2, 3] if number == 0 else []  # the first is repeated, so that an old snapshot is left
        prompt = [*prompt, *answer, *(token for part in "abc" for token in _words(f"{number} {part}"))]
    assert reused == [0, 42, 163, 283]


def test_the_users_last_words_stay_through_a_tool_loop_whose_work_the_template_drops() -> None:
    """Neither the end of the prompt, a few tokens later, nor that of a tool's result takes their place."""
    bench = Bench(num_rows=5)
    for number in range(8):  # every answer goes when the user speaks again
        bench.now_s += 10
        bench.turn(_words(f"chat {number}"), [1, 2, 3], f"chat {number}", words_end=36, is_dropped=True)
    prompt = _words("task")
    for step in range(4):
        bench.now_s += 1
        reused = bench.turn(prompt, [7, 8, 9], "agent", is_call=True, words_end=36)
        assert step == 0 or reused >= 36
        prompt = [*prompt, 7, 8, 9, *_words(f"result {step}")]
        for other in range(2):
            bench.turn(_words(f"{step} {other}"), [1, 2, 3], f"{step} {other}", words_end=36, is_dropped=True)
    bench.turn(prompt, [4, 5, 6], "agent", words_end=36, is_dropped=True)
    assert bench.turn([*_words("task")[:36], *_words("thanks")], [1], "agent", words_end=70) == 36


def test_a_full_cache_takes_a_short_trunk_that_nobody_shared_only_where_prompts_were_seen_to_part() -> None:
    bench = Bench(num_rows=8)
    for number in range(100):
        bench.turn(_words(str(number)), [1, 2], f"c{number}")
    prompt = _words("new")
    seq = bench.cache.open(bench.cache.match("", prompt), prompt, conversation_id="new")
    assert seq is not None
    before = bench.cache.stats().counters.skipped_snapshots["not_worth"]
    assert bench.cache.reserve_export(seq, 5, "trunk") is None
    assert bench.cache.stats().counters.skipped_snapshots["not_worth"] == before + 1
    assert bench.cache.reserve_export(seq, 5, "branch") is not None


def test_after_a_quiet_night_no_event_lets_more_than_a_few_waiters_grow_older() -> None:
    forecast = ReturnForecast()
    waiters = [Waiter() for _ in range(2000)]
    for waiter in waiters:
        forecast.wait(waiter, "text", 0.0)
    night_s = 8 * 3600.0
    assert len(list(forecast.advance(night_s))) == MAX_AGED
    last = waiters[-1]
    forecast.returned(last, night_s)  # nobody had looked at it since
    assert last.age_bin == NUM_BINS - 1
    assert sum(len(list(forecast.advance(night_s))) for _ in range(10)) == len(waiters) - MAX_AGED - 1


def _crowd(policy: str) -> tuple[int, int]:
    """Reused and prompt tokens of 40 conversations that share three heads, in memory for about ten."""
    bench, chance = Bench(num_rows=20, num_pages=700, policy=policy), random.Random(5)
    heads = [[1000 * head + token for token in range(40)] for head in range(3)]
    history: dict[int, list[int]] = {}
    due: list[tuple[float, int, int]] = [(float(number), number, chance.randrange(2, 9)) for number in range(40)]
    reused = total = 0
    while due:
        due.sort()
        bench.now_s, number, num_turns = due.pop(0)
        prompt = [*history.get(number, heads[number % 3]), *(chance.randrange(5000, 9000) for _ in range(12))]
        is_call = number % 2 == 0
        reused += bench.turn(prompt, [7, 8, 9], f"c{number}", is_call=is_call)
        total += len(prompt)
        bench.cache.check()
        history[number] = [*prompt, 7, 8, 9]
        if num_turns:
            due.append((bench.now_s + chance.lognormvariate(0.7 if is_call else 3.5, 0.3), number, num_turns - 1))
    return reused, total


def test_under_shortage_density_reuses_more_than_recency() -> None:
    by_density, total = _crowd("density")
    by_recency, _ = _crowd("lru")
    assert by_density > by_recency
    assert by_density > 0.5 * total


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_policy_empties_the_cache_when_asked(policy: str) -> None:
    bench = Bench(num_rows=30, policy=policy)
    for number in range(10):
        bench.turn([number * 100 + token for token in range(20)], [1, 2], f"c{number}")
    bench.cache.clear()
    stats = bench.cache.stats()
    assert stats.num_free_pages == stats.num_pages
    assert stats.num_free_rows == stats.num_rows


def test_trimming_keeps_the_bytes_in_use_within_a_budget() -> None:
    bench = Bench(num_rows=60)
    for number in range(20):
        bench.turn([number * 100 + token for token in range(20)], [1, 2], f"c{number}")
    bench.cache.trim(5000)
    stats = bench.cache.stats()
    assert 0 < stats.num_used_pages * SPEC.bytes_per_page + stats.num_used_rows * SPEC.bytes_per_row <= 5000
    bench.cache.check()


def test_closing_a_conversation_takes_its_snapshots_out_of_the_order() -> None:
    bench = Bench(num_rows=60)
    prompts = {name: _words(name) for name in ("a", "b", "c")}
    for name, prompt in prompts.items():
        bench.turn(prompt, [1, 2], name)
    bench.cache.close_conversation("", "b")
    reused = {name: bench.cache.match("", [*prompt, 1, 2, 3]).num_tokens for name, prompt in prompts.items()}
    assert reused == {"a": 41, "b": 0, "c": 41}
    bench.cache.check()
    bench.cache.clear()


def _num_calls(num_conversations: int) -> int:
    """Function calls of one turn with an eviction, in a full cache of so many conversations."""
    bench = Bench(num_rows=3 * num_conversations, num_pages=40 * num_conversations)
    for number in range(2 * num_conversations):
        bench.turn([number * 50 + token for token in range(40)], [1, 2], f"c{number}")
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for number in range(20):
            bench.turn([1_000_000 + number * 50 + token for token in range(40)], [1, 2], f"new{number}")
    finally:
        sys.setprofile(None)
    assert bench.cache.stats().counters.evicted_snapshots.total() > 0
    return calls


def test_a_turn_costs_the_same_however_many_conversations_are_kept() -> None:
    assert _num_calls(400) < 1.5 * _num_calls(20)
