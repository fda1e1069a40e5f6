"""Branches of a conversation: what supersedes what, what is shared, and the end of a turn."""

from __future__ import annotations

import pytest
from cache_driver import CacheDriver

PROMPT = list(range(100, 120))


def test_a_new_turn_supersedes_the_boundaries_of_the_one_before() -> None:
    driver = CacheDriver(eviction_policy="lru")
    known = driver.turn(PROMPT, [1, 2, 3], "c", trunk=5, turn_start=18).token_ids
    assert driver.snapshot_positions(superseded=True) == []
    driver.turn([*known, *range(30, 40)], [4, 5], "c", trunk=5, turn_start=31)
    assert driver.snapshot_positions(superseded=True) == [18, 22]
    assert driver.snapshot_positions(superseded=False) == [5, 31, 34]


def test_a_conversation_without_a_tag_is_recognised_by_its_history() -> None:
    driver = CacheDriver(eviction_policy="lru")
    known = driver.turn(PROMPT, [1, 2, 3], turn_start=18).token_ids
    driver.turn([*known, 7], [4, 5], turn_start=24)
    assert driver.snapshot_positions(superseded=True) == [18, 22]
    assert driver.cache.stats().num_branches == 1


def test_a_turn_end_is_not_superseded_before_the_next_one_is_known_to_be_repeated() -> None:
    driver = CacheDriver()
    known = driver.turn(PROMPT, [1, 2, 3], "c").token_ids
    run = driver.open([*known, 7], "c")
    assert run is not None
    handle = driver.finish_turn(run, [4, 5])
    assert driver.snapshot_positions(superseded=False) == [22, 25]
    driver.settle(handle, 26)
    assert driver.snapshot_positions(superseded=True) == [22]


def test_a_turn_end_that_will_not_be_repeated_is_dropped_and_the_one_before_stays() -> None:
    driver = CacheDriver()
    known = driver.turn(PROMPT, [1, 2, 3], "c").token_ids
    free = driver.cache.stats().num_free_pages
    driver.turn([*known, 7], [4] * 9, "c", stable_tokens=24)
    assert driver.snapshot_positions(superseded=False) == [22]
    assert driver.cache.stats().num_free_pages == free
    assert driver.cache.stats().counters.dropped_snapshots == {"turn_end": 1}


def test_what_the_next_prompt_will_not_repeat_of_earlier_turns_is_superseded() -> None:
    driver = CacheDriver()
    known = driver.turn(PROMPT, [1, 2, 3], "c", turn_start=18).token_ids
    driver.turn([*known, 7], [4, 5], "c", stable_tokens=19)
    assert driver.snapshot_positions(superseded=False) == [18]
    assert driver.snapshot_positions(superseded=True) == [22]


@pytest.mark.parametrize("stable", [0, 22, 1000])
def test_only_the_first_end_of_turn_counts(stable: int) -> None:
    driver = CacheDriver()
    run = driver.open(PROMPT, "c")
    assert run is not None
    handle = driver.finish_turn(run, [1, 2, 3])
    driver.settle(handle, stable)
    expected = driver.snapshot_positions()
    for again in (0, 22, 1000):
        driver.settle(handle, again)
        assert driver.snapshot_positions() == expected == ([22] if stable >= 22 else [])


def test_an_end_of_turn_that_comes_after_the_next_request_cannot_take_its_state() -> None:
    driver = CacheDriver()
    run = driver.open(PROMPT, "c")
    assert run is not None
    handle = driver.finish_turn(run, [1, 2, 3])
    follower = driver.open([*run.token_ids, 8], "c")
    assert follower is not None
    driver.settle(handle, 3)
    assert follower.num_reused == 22
    driver.finish_turn(follower, [9])
    driver.settle(handle, 3)
    assert 22 in driver.snapshot_positions()


def test_a_late_end_of_turn_of_a_snapshot_that_another_line_used_keeps_it() -> None:
    driver = CacheDriver()
    run = driver.open(PROMPT, "c")
    assert run is not None
    handle = driver.finish_turn(run, [1, 2, 3])
    driver.turn([*run.token_ids, 8], [9], "other", stable_tokens=0)
    driver.settle(handle, 3)
    assert driver.snapshot_positions(superseded=False) == [22]


def test_an_end_of_turn_after_its_snapshot_was_evicted_does_nothing() -> None:
    driver = CacheDriver()
    run = driver.open(PROMPT, "c")
    assert run is not None
    handle = driver.finish_turn(run, [1, 2, 3])
    driver.cache.clear()
    driver.settle(handle, 3)
    driver.settle(handle, 30)
    driver.assert_empty()


def test_a_missing_end_of_turn_leaves_an_ordinary_snapshot() -> None:
    driver = CacheDriver()
    known = driver.turn(PROMPT, [1, 2, 3], "c", stable_tokens=-1).token_ids
    driver.turn([*known, 7], [4], "c", stable_tokens=-1)
    driver.turn([*known, 7, 4, 8], [5], "c")
    assert driver.snapshot_positions(superseded=True) == [22, 24]
    driver.cache.close_conversation("", "c")
    driver.check()
    assert driver.snapshot_positions(superseded=False) == []


def test_a_fork_supersedes_nothing_of_the_branch_it_left() -> None:
    driver = CacheDriver(eviction_policy="lru")
    driver.turn(PROMPT, [1, 2, 3], "c", turn_start=18)
    driver.turn([*PROMPT[:18], 50, 51, 52], [4], "c", turn_start=20)  # an edited message
    assert driver.snapshot_positions(superseded=True) == []
    assert driver.snapshot_positions() == [18, 20, 21, 22]
    assert driver.cache.stats().num_branches == 2


def test_two_requests_that_resume_at_once_from_one_snapshot_are_two_branches() -> None:
    driver = CacheDriver()
    known = driver.turn(PROMPT, [1, 2, 3], "c").token_ids
    runs = [driver.open([*known, 60], "c"), driver.open([*known, 70], "c")]
    for run in runs:
        assert run is not None
        driver.settle(driver.finish_turn(run, [5]), 100)
    assert driver.snapshot_positions(superseded=False) == [24, 24]
    assert driver.snapshot_positions(superseded=True) == [22]  # both moved on
    assert driver.cache.stats().num_branches == 2


def test_a_snapshot_kept_by_two_branches_is_superseded_by_the_last_one() -> None:
    driver = CacheDriver()
    known = driver.turn(PROMPT, [1, 2, 3], "parent").token_ids
    driver.turn([*known, 60], [5], "child")  # a sub-agent with an id of its own
    assert driver.snapshot_positions(superseded=True) == []
    driver.turn([*known, 70], [5], "parent")
    assert driver.snapshot_positions(superseded=True) == [22]


def test_the_snapshot_a_turn_resumed_from_is_held_until_its_own_replacement() -> None:
    driver = CacheDriver(num_rows=4, num_pages=40, eviction_policy="lru")
    known = driver.turn(PROMPT, [1, 2, 3], "c").token_ids
    run = driver.open([*known, *range(30, 40)], "c")
    assert run is not None
    driver.run_copies()
    driver.cache.clear()
    assert driver.snapshot_positions() == [22]
    assert driver.step(run, None, [(30, "turn_start")])
    driver.publish(run)
    driver.cache.clear()
    assert driver.snapshot_positions() == []
    driver.verify(run)


def test_closing_a_sequence_lets_go_of_what_it_resumed_from() -> None:
    driver = CacheDriver()
    known = driver.turn(PROMPT, [1, 2, 3], "c").token_ids
    run = driver.open([*known, 5], "c")
    assert run is not None
    driver.cache.clear()
    assert driver.snapshot_positions() == [22]
    driver.cache.close(run.seq)
    driver.assert_empty()


def test_trunks_are_never_superseded() -> None:
    driver = CacheDriver()
    for number in range(3):
        driver.turn([*PROMPT, number], [1], f"c{number}", trunk=10, turn_start=20)
        driver.cache.close_conversation("", f"c{number}")
    driver.check()
    assert driver.snapshot_positions(superseded=False) == [10]


def test_a_turn_start_that_others_publish_as_a_trunk_becomes_shared() -> None:
    driver = CacheDriver()
    driver.turn(PROMPT, [1], "a", turn_start=10)
    other = driver.open_match(driver.cache.cold_match("", [*PROMPT[:12], 50]), "b")
    assert other is not None
    assert driver.step(other)
    other.seq.exports.clear()
    driver.cache.close(other.seq)
    again = driver.open_match(driver.cache.cold_match("", [*PROMPT[:12], 50]), "b")
    assert again is not None
    assert driver.step(again, None, [(10, "trunk")])
    driver.publish(again)
    driver.cache.close_conversation("", "a")
    driver.cache.close(again.seq)
    driver.check()
    assert driver.snapshot_positions("trunk", superseded=False) == [10]


def test_closing_a_conversation_drops_what_only_it_kept_and_nothing_else() -> None:
    driver = CacheDriver(num_rows=5)
    driver.turn(PROMPT, [1], "old", turn_start=18)
    driver.turn([7] * 20, [1], "closed", turn_start=18)
    driver.cache.close_conversation("", "closed")
    driver.cache.close_conversation("", "closed")
    driver.cache.close_conversation("", "never seen")
    driver.cache.close_conversation("elsewhere", "old")
    driver.check()
    assert driver.cache.stats().num_conversations == 1
    assert driver.match([*PROMPT, 5]).num_tokens == 20
    assert driver.match([7] * 21).num_tokens == 0


def test_closing_a_conversation_of_a_model_without_state_frees_its_pages_first() -> None:
    driver = CacheDriver("attention_only", num_pages=18)
    trunk = [1] * 8
    driver.turn([*trunk, *([2] * 12)], [1], "old")
    driver.turn([*trunk, *([3] * 12)], [1], "closed")
    driver.turn([*trunk, *([4] * 12)], [1], "used again")
    for conversation_id in ("closed", "used again", "unknown"):
        driver.cache.close_conversation("", conversation_id)
    back = driver.open([*trunk, *([4] * 12), 5], "used again")
    assert back is not None
    driver.run_copies()
    driver.cache.close(back.seq)
    driver.check()
    other = driver.open([9] * 40)
    assert other is not None
    assert driver.step(other)  # 10 pages: 7 are free, 3 must go
    assert driver.match([*trunk, *([2] * 13)]).num_tokens == 20
    assert driver.match([*trunk, *([4] * 13)]).num_tokens == 20
    assert driver.match([*trunk, *([3] * 13)]).num_tokens == 8


def test_a_request_that_runs_while_its_conversation_is_closed_keeps_nothing_in_the_way() -> None:
    driver = CacheDriver()
    run = driver.open(PROMPT, "c")
    assert run is not None
    driver.cache.close_conversation("", "c")
    handle = driver.finish_turn(run, [1, 2], [(18, "turn_start")])
    driver.settle(handle, 100)
    assert driver.snapshot_positions(superseded=False) == []
    assert driver.snapshot_positions() == [18, 21]
    driver.assert_empty()


def test_branches_of_a_conversation_are_bounded_and_single_turns_go_first() -> None:
    driver = CacheDriver(num_rows=60, num_pages=400, max_branches=3, eviction_policy="lru")
    known = PROMPT
    for number in range(3):
        known = driver.turn([*known, 200 + number], [1, 2], "c", turn_start=len(known)).token_ids
    for number in range(10):
        driver.turn([300 + number] * 8, [1], "c", turn_start=7)
    stats = driver.cache.stats()
    assert stats.num_branches == 3
    assert stats.num_superseded_snapshots == 4 + 2 * 8
    assert driver.match([*known, 5]).snapshot is not None
    assert driver.match([*known, 5]).snapshot.is_superseded is False


def test_forks_that_come_to_nothing_leave_no_branch() -> None:
    driver = CacheDriver()
    driver.turn(PROMPT, [1, 2, 3], "c", turn_start=18)
    for _ in range(50):
        run = driver.open([*PROMPT[:19], 77], "d")
        assert run is not None
        driver.cache.close(run.seq)
    driver.check()
    stats = driver.cache.stats()
    assert (stats.num_branches, stats.num_conversations) == (1, 1)


def test_many_retries_from_one_snapshot_leave_only_those_that_still_have_something() -> None:
    driver = CacheDriver(num_rows=6, num_pages=100)
    driver.turn(PROMPT, [1], turn_start=18)
    for number in range(100):
        driver.turn(PROMPT[:19], [number, 2, 3])
    driver.check()
    assert driver.cache.stats().num_branches <= 6
