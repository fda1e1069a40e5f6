"""Wishes of clients, shares of conversations and tenants, time to live, and what closing a conversation frees."""

from __future__ import annotations

import pytest
from cache_driver import CacheDriver, Run

from turnkeep.cache.config import CacheConfig
from turnkeep.cache.policies import EVICTION_POLICIES, EvictionPolicyName


def prompt_of(number: int, num_tokens: int = 20) -> list[int]:
    return [100 * number + token for token in range(num_tokens)]


def held_turn(driver: CacheDriver, number: int, retention_s: float) -> Run:
    """One turn of conversation `c{number}` whose client asks that it stays; the turn ends at its 20th token."""
    match = driver.match(prompt_of(number))
    seq = driver.cache.open(match, match.token_ids, conversation_id=f"c{number}", retention_s=retention_s)
    assert seq is not None
    run = Run(seq, prompt_of(number), f"c{number}", "")
    driver.settle(driver.finish_turn(run, [1]), 1000)
    return run


def num_kept(driver: CacheDriver, number: int, cache_root: str = "") -> int:
    return driver.match([*prompt_of(number), 1, 2], cache_root).num_tokens


@pytest.mark.parametrize("eviction_policy", EVICTION_POLICIES)
def test_what_a_client_asks_to_be_kept_outlives_what_nobody_asked_for(eviction_policy: EvictionPolicyName) -> None:
    driver = CacheDriver(config=CacheConfig(eviction_policy=eviction_policy), num_rows=8, num_pages=100)
    held_turn(driver, 0, 600.0)
    for number in range(1, 20):
        driver.turn(prompt_of(number), [1], f"c{number}")
    assert num_kept(driver, 0) == 20
    driver.clock.now_s += 600.0
    for number in range(20, 40):
        driver.turn(prompt_of(number), [1], f"c{number}")
    assert num_kept(driver, 0) == 0
    driver.assert_empty()


def test_wishes_are_bounded_in_time() -> None:
    driver = CacheDriver(config=CacheConfig(eviction_policy="lru", max_retention_s=50.0), num_rows=8, num_pages=100)
    held_turn(driver, 0, 1e9)
    driver.clock.now_s += 50.0
    for number in range(1, 20):
        driver.turn(prompt_of(number), [1], f"c{number}")
    assert num_kept(driver, 0) == 0


def test_wishes_are_bounded_in_number_and_refused_ones_are_counted() -> None:
    driver = CacheDriver(config=CacheConfig(eviction_policy="lru", max_held_share=0.25), num_rows=8, num_pages=100)
    for number in range(3):
        held_turn(driver, number, 1000.0)
    assert driver.cache.stats().counters.num_refused_holds == 1
    for number in range(3, 20):
        driver.turn(prompt_of(number), [1], f"c{number}")
    assert [num_kept(driver, number) for number in range(3)] == [20, 20, 0]


def test_a_wish_gives_way_when_nothing_else_is_left() -> None:
    driver = CacheDriver(config=CacheConfig(max_held_share=1.0), num_rows=4, num_pages=100)
    for number in range(10):
        held_turn(driver, number, 1000.0)
    assert num_kept(driver, 9) == 20
    driver.check()


def test_a_superseded_snapshot_is_not_held_any_longer() -> None:
    driver = CacheDriver(config=CacheConfig(eviction_policy="lru", max_held_share=1.0), num_rows=6, num_pages=100)
    run = held_turn(driver, 0, 1000.0)
    driver.turn([*run.token_ids, 5], [6], "c0")
    for number in range(1, 6):
        driver.turn(prompt_of(number), [1], f"c{number}")
    assert driver.match([*run.token_ids, 77]).num_tokens == 0
    assert driver.match([*run.token_ids, 5, 6, 7]).num_tokens == 22


def test_who_has_more_than_its_share_gives_first() -> None:
    driver = CacheDriver(
        config=CacheConfig(max_conversation_share=0.5, reuse_policy="per_request"), num_rows=12, num_pages=200
    )
    driver.turn(prompt_of(1), [1], "quiet")
    driver.clock.now_s += 1000.0
    known = prompt_of(0)
    for number in range(20):
        known = driver.turn([*known, number], [1, 2], "busy").token_ids
    assert num_kept(driver, 1) == 20
    assert driver.match([*known, 5]).num_tokens == len(known) - 1
    driver.check()


def test_sub_agents_count_to_the_share_of_the_conversation_they_forked_from() -> None:
    driver = CacheDriver(config=CacheConfig(max_conversation_share=0.5), num_rows=12, num_pages=300)
    driver.turn(prompt_of(1), [1], "another")
    driver.clock.now_s += 1000.0
    parent = driver.turn(prompt_of(0), [1, 2], "parent").token_ids
    for number in range(30):
        child = driver.turn([*parent, 50 + number], [3], f"child{number}", turn_start=len(parent)).token_ids
        driver.turn([*child, 7], [8], f"child{number}")
        driver.turn([*parent, 40], [9], "parent")
    assert num_kept(driver, 1) == 20
    driver.check()


def test_a_tenant_with_more_than_its_share_gives_before_others_do() -> None:
    driver = CacheDriver(config=CacheConfig(eviction_policy="lru", max_tenant_share=0.5), num_rows=12, num_pages=200)
    driver.turn(prompt_of(1), [1], "a", cache_root="small")
    for number in range(30):
        driver.turn(prompt_of(number), [1], f"c{number}", cache_root="large")
    assert num_kept(driver, 1, "small") == 20
    assert num_kept(driver, 29, "large") == 20


def test_a_conversation_that_nobody_uses_for_its_time_to_live_is_let_go() -> None:
    driver = CacheDriver(config=CacheConfig(idle_ttl_s=100.0))
    driver.turn(prompt_of(0), [1], "c0")
    driver.clock.now_s += 60.0
    driver.turn(prompt_of(1), [1], "c1")
    assert num_kept(driver, 0) == 20
    driver.clock.now_s += 60.0
    driver.turn(prompt_of(2), [1], "c2")
    assert num_kept(driver, 0) == 0
    assert num_kept(driver, 1) == 20
    driver.check()


def test_a_turn_that_runs_longer_than_the_time_to_live_keeps_its_conversation() -> None:
    driver = CacheDriver(config=CacheConfig(idle_ttl_s=100.0))
    run = driver.open(prompt_of(0), "c0")
    assert run is not None
    driver.clock.now_s += 500.0
    driver.turn(prompt_of(1), [1], "c1")
    driver.settle(driver.finish_turn(run, [1]), 1000)
    driver.turn(prompt_of(2), [1], "c2")
    assert num_kept(driver, 0) == 20


def test_closing_a_conversation_frees_at_once_what_only_it_kept() -> None:
    driver = CacheDriver(num_pages=60, num_rows=12)
    trunk = prompt_of(9, 8)
    driver.turn([*trunk, *prompt_of(0)], [1], "stays", trunk=8)
    before = driver.cache.stats()
    driver.turn([*trunk, *prompt_of(1)], [1], "closed", trunk=8, turn_start=27)
    driver.cache.close_conversation("", "closed")
    after = driver.cache.stats()
    assert (after.num_free_pages, after.num_free_rows) == (before.num_free_pages, before.num_free_rows)
    assert after.counters.evicted_snapshots.total() == 0
    assert driver.match([*trunk, *prompt_of(0), 1, 2]).num_tokens == 28
    assert driver.match([*trunk, *prompt_of(1), 1, 2]).num_tokens == 8


def test_a_hit_renews_the_one_snapshot_that_served_and_not_its_whole_path() -> None:
    driver = CacheDriver(config=CacheConfig(eviction_policy="lru", reuse_policy="per_request"), num_pages=100)
    driver.turn(prompt_of(0), [1], "c0", trunk=4, turn_start=12)
    used = {snapshot.num_tokens: snapshot.last_used_s for snapshot in driver.cache._reclaimer.snapshots}
    run = driver.open([*prompt_of(0), 1, 2], "c0")
    assert run is not None
    driver.run_copies()
    driver.cache.close(run.seq)
    now = {snapshot.num_tokens: snapshot.last_used_s for snapshot in driver.cache._reclaimer.snapshots}
    assert [position for position in used if now[position] > used[position]] == [20]
