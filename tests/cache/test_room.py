"""Admission and eviction: what is promised can be had, what fails changes nothing, and who goes first."""

from __future__ import annotations

import random

import pytest
from cache_driver import MODEL_KINDS, CacheDriver, ModelKind

from turnkeep.cache.eviction import LRUPolicy, Need
from turnkeep.cache.page_node import PageNode

NO_NEED = Need(0, 0)


def make_item(last_used_s: float, *, is_superseded: bool = False) -> PageNode:
    item = PageNode(None, b"", 0, 0, 0)
    item.last_used_s = last_used_s
    item.is_superseded = is_superseded
    return item


def evict_all(policy: LRUPolicy) -> list[PageNode]:
    order = []
    while (item := policy.victim(NO_NEED)) is not None:
        assert isinstance(item, PageNode)
        policy.removed(item)
        order.append(item)
    return order


def test_superseded_things_go_first_and_each_group_by_last_use() -> None:
    policy = LRUPolicy()
    items = [make_item(5.0), make_item(1.0), make_item(9.0, is_superseded=True), make_item(7.0, is_superseded=True)]
    for item in items:
        policy.added(item)
    assert evict_all(policy) == [items[3], items[2], items[1], items[0]]


def test_a_change_of_use_or_worth_counts_from_then_on() -> None:
    policy = LRUPolicy()
    first, second, third = make_item(1.0), make_item(2.0), make_item(3.0)
    for item in (first, second, third):
        policy.added(item)
    first.last_used_s = 4.0
    policy.changed(first)
    third.is_superseded = True
    policy.changed(third)
    assert evict_all(policy) == [third, second, first]


def test_what_was_removed_is_no_victim_until_it_is_added_again() -> None:
    policy = LRUPolicy()
    item = make_item(1.0)
    policy.added(item)
    policy.removed(item)
    policy.changed(item)
    assert policy.victim(NO_NEED) is None
    policy.added(item)
    assert policy.victim(NO_NEED) is item


def test_the_heap_does_not_grow_with_changes() -> None:
    policy = LRUPolicy()
    items = [make_item(float(number)) for number in range(20)]
    for item in items:
        policy.added(item)
    for number in range(10_000):
        items[number % 20].last_used_s = 100.0 + number
        policy.changed(items[number % 20])
    assert len(policy) == 20
    assert len(policy._heap) <= 64 + 3 * 20 + 1
    assert evict_all(policy) == items


def test_equal_times_go_in_the_order_of_arrival() -> None:
    policy = LRUPolicy()
    items = [make_item(1.0) for _ in range(10)]
    for item in items:
        policy.added(item)
    assert evict_all(policy) == items


def test_without_state_the_leaves_of_the_least_recently_used_line_go_first() -> None:
    driver = CacheDriver("attention_only", num_pages=12)
    old = driver.turn([1] * 16, [1]).token_ids
    new = driver.turn([2] * 16, [1]).token_ids
    again = driver.open([*old, 3])  # the older one is used again
    assert again is not None
    driver.cache.close(again.seq)
    other = driver.open([3] * 24)
    assert other is not None
    assert driver.step(other)  # needs 6 of 12 pages, 8 are taken
    assert driver.match([*old, 9]).num_tokens == 16
    assert driver.match([*new, 9]).num_tokens == 8
    driver.check()


def test_a_shared_trunk_goes_after_what_hangs_on_it() -> None:
    driver = CacheDriver("attention_only", num_pages=20)
    trunk = [1] * 8
    for number in range(4):
        driver.turn([*trunk, *([10 + number] * 8)], [1])
    other = driver.open([3] * 60)
    assert other is not None
    assert driver.step(other)
    assert driver.cache.stats().num_tree_pages == 5
    assert driver.match([*trunk, 9]).num_tokens == 8
    assert driver.match([*trunk, *([13] * 9)]).num_tokens == 16


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_what_an_open_sequence_uses_is_never_evicted(kind: ModelKind) -> None:
    driver = CacheDriver(kind, num_pages=12, num_rows=4)
    known = driver.turn(list(range(18)), [1, 2], turn_start=10).token_ids
    run = driver.open([*known, 3])
    assert run is not None
    driver.run_copies()
    for number in range(5):
        other = driver.open([50 + number] * 12)
        assert other is not None
        assert driver.step(other)
        driver.cache.finish(other.seq, other.token_ids, keep_turn_end=True)
        driver.verify(run)
    driver.cache.clear()
    driver.verify(run)
    assert driver.step(run)
    driver.check()


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_what_fails_for_lack_of_room_changes_nothing(kind: ModelKind) -> None:
    driver = CacheDriver(kind, num_pages=8, num_rows=2)
    cached = driver.turn([7] * 6, [1]).token_ids
    run = driver.open([1] * 9)
    assert run is not None
    assert driver.step(run)
    before = driver.cache.stats()
    if driver.cache.has_pages:
        assert not driver.cache.grow(run.seq, 100)
        assert driver.cache.stats() == before
        assert not driver.cache.can_provide(6, 0)
    if driver.cache.has_state:
        second = driver.open([2] * 5)
        assert second is not None  # evicts the snapshot for its row
        assert driver.step(second)
        before = driver.cache.stats()
        assert not driver.cache.can_provide(0, 1)
        assert driver.open([3] * 4) is None
        assert driver.open([*cached, 5]) is None
        assert driver.cache.stats() == before
    driver.check()


def test_a_match_counts_as_taken_when_room_is_promised() -> None:
    driver = CacheDriver(num_pages=8, num_rows=2)
    known = driver.turn([7] * 6, [1]).token_ids
    match = driver.match([*known, 2])
    assert driver.cache.can_provide(8, 2)
    assert not driver.cache.can_provide(7, 1, match)
    assert driver.cache.can_provide(6, 1, match)
    assert not driver.cache.can_provide(6, 2, match)


def test_new_pages_of_a_match_are_what_opening_and_growing_take() -> None:
    for kind in ("hybrid", "attention_only"):
        driver = CacheDriver(kind, num_pages=20)
        known = driver.turn(list(range(9)), [1, 2], turn_start=7).token_ids
        for prompt in ([*known, 3, 4, 5, 6], [*known[:7], 3], [*known[:7], *range(60, 75)], [90] * 3):
            match = driver.match(prompt)
            expected = driver.cache.num_new_pages(match, 18)
            free = driver.cache.stats().num_free_pages
            run = driver.open_match(match)
            assert run is not None
            assert driver.cache.grow(run.seq, 18)
            assert free - driver.cache.stats().num_free_pages == expected
            driver.cache.close(run.seq)


def test_a_sequence_that_is_alone_can_use_the_whole_pool() -> None:
    """It resumed in the middle of a page and holds a copy of it: at last it gives up the original."""
    driver = CacheDriver(num_pages=6, num_rows=3)
    driver.turn(list(range(10)), [1, 2], turn_start=9)
    run = driver.open([*range(9), 50, 51])
    assert run is not None
    assert run.num_reused == 9
    run.token_ids += range(60, 73)
    for _ in range(15):
        assert driver.step(run, 1)
        driver.check()
    run.token_ids.append(1)
    assert not driver.step(run, 1)
    assert run.seq.num_computed_tokens == 24
    assert driver.cache.stats().counters.num_released_pins == 1
    driver.verify(run)


def test_when_a_match_leaves_too_little_the_cold_one_fits() -> None:
    driver = CacheDriver(num_pages=3, num_rows=1)
    known = driver.turn(list(range(9)), [1]).token_ids
    prompt = [*known, 2]
    match = driver.match(prompt)
    assert match.num_tokens == 9
    assert driver.open_match(match) is None  # its snapshot holds the only row
    cold = driver.cache.cold_match("", prompt)
    assert driver.cache.can_provide(driver.cache.num_new_pages(cold, 12), 1, cold)
    run = driver.open_match(cold)
    assert run is not None
    assert driver.step(run)
    driver.check()


def test_many_idle_conversations_never_keep_a_new_request_out() -> None:
    driver = CacheDriver(num_pages=30, num_rows=6, checks=False)
    for number in range(300):
        driver.turn([number] * 20, [1, 2, 3], f"c{number}", trunk=5, turn_start=18)
    driver.cache.check()
    driver.assert_empty()


def test_a_victim_is_chosen_again_until_the_need_is_met_and_never_beyond() -> None:
    driver = CacheDriver("attention_only", num_pages=20)
    generator = random.Random(5)
    for number in range(30):
        length = generator.randrange(1, 50)
        free = driver.cache.stats().num_free_pages
        run = driver.open([number] * length)
        assert run is not None
        assert driver.step(run)
        needed = driver.cache.pages_for(length)
        assert driver.cache.stats().num_free_pages == max(free - needed, 0)
        driver.cache.finish(run.seq, run.token_ids, keep_turn_end=False)
        driver.check()
