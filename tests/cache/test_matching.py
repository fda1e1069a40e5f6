"""What of a prompt is found and how far it can be used."""

from __future__ import annotations

import numpy as np
import pytest
from cache_driver import MODEL_KINDS, CacheDriver, ModelKind

STATEFUL: tuple[ModelKind, ...] = ("hybrid", "attention_free")


@pytest.mark.parametrize("kind", MODEL_KINDS)
@pytest.mark.parametrize("prompt", [[], [5], list(range(20))])
def test_an_empty_cache_matches_nothing(kind: ModelKind, prompt: list[int]) -> None:
    match = CacheDriver(kind).match(prompt)
    assert (match.num_tokens, match.num_matched_tokens, match.loss_reason) == (0, 0, "none")


@pytest.mark.parametrize("kind", MODEL_KINDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_token_of_a_known_prompt_is_always_left(kind: ModelKind, page_size: int) -> None:
    driver = CacheDriver(kind, page_size=page_size)
    run = driver.turn(list(range(16)), [50], turn_start=15)
    known = run.token_ids[:16]
    assert driver.match(known).num_tokens == 15
    assert driver.match([*known, 51]).num_tokens == 16
    assert driver.match(known[:15]).num_tokens == (14 if kind == "attention_only" else 0)


@pytest.mark.parametrize("position", range(1, 41))
def test_a_state_can_be_resumed_at_any_position(position: int) -> None:
    driver = CacheDriver(page_size=16)
    prompt = list(range(41))
    driver.turn(prompt, [99], turn_start=position, stable_tokens=0)
    match = driver.match(prompt)
    assert match.num_tokens == position
    run = driver.turn(prompt, [99, 98])
    assert run.num_reused == position


@pytest.mark.parametrize("kind", STATEFUL)
def test_the_deepest_snapshot_within_the_common_prefix_is_used(kind: ModelKind) -> None:
    driver = CacheDriver(kind, page_size=4)
    prompt = list(range(30))
    run = driver.open(prompt)
    assert run is not None
    assert driver.step(run, None, [(3, "trunk"), (5, "declared"), (6, "declared"), (7, "declared"), (20, "turn_start")])
    driver.publish(run)
    for common, usable in [(2, 0), (3, 3), (4, 3), (5, 5), (6, 6), (7, 7), (8, 7), (19, 7), (20, 20), (29, 20)]:
        match = driver.match([*prompt[:common], 77, 78])
        assert match.num_tokens == usable
        assert match.num_matched_tokens == (common if common < 28 else 28)


def test_a_snapshot_beyond_the_common_prefix_is_not_used() -> None:
    driver = CacheDriver(page_size=16)
    driver.turn(list(range(12)), [20, 21], turn_start=12)
    match = driver.match([*range(10), 77, 78, 79])
    assert (match.num_tokens, match.num_matched_tokens) == (0, 10)
    assert match.loss_reason == "no_snapshot"
    assert match.num_lost_tokens == 10


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_snapshot_is_found_though_a_sibling_of_the_matched_page_carries_it(kind: ModelKind) -> None:
    driver = CacheDriver(kind, page_size=8)
    trunk = [1, 2, 3, 4, 5]  # ends inside a page, which the first conversation goes on filling
    driver.turn([*trunk, *([10] * 20)], [6], "first", trunk=5, turn_start=20)
    driver.turn([*trunk, *([20] * 20)], [6], "second", trunk=5, turn_start=20)
    match = driver.match([*trunk, *([20] * 13), 99])
    assert (match.num_tokens, match.num_matched_tokens) == (5, 18)
    run = driver.open_match(match)
    assert run is not None
    assert driver.step(run)
    driver.check()


def test_without_state_every_token_can_be_reused() -> None:
    driver = CacheDriver("attention_only", page_size=4)
    known = driver.turn(list(range(18)), [20, 21, 22]).token_ids
    for common in range(1, 20):
        match = driver.match([*known[:common], 77])
        assert match.num_tokens == match.num_matched_tokens == common


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_prefixes_are_never_shared_between_cache_roots(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    prompt = list(range(20))
    driver.turn(prompt, [30], turn_start=19, cache_root="a")
    assert driver.match(prompt, "a").num_tokens == 19
    for other in ("", "b"):
        match = driver.match(prompt, other)
        assert (match.num_tokens, match.num_matched_tokens, match.num_evicted_tokens) == (0, 0, 0)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_with_prefix_caching_off_nothing_is_matched_or_kept(kind: ModelKind) -> None:
    driver = CacheDriver(kind, prefix_caching=False)
    run = driver.turn(list(range(20)), [30, 31], "c", turn_start=19)
    assert driver.match(run.token_ids).num_matched_tokens == 0
    second = driver.open(run.token_ids, "c")
    assert second is not None
    assert driver.step(second, 10)
    driver.cache.suspend(second.seq, second.token_ids)
    driver.check()
    stats = driver.cache.stats()
    assert (stats.num_free_pages, stats.num_free_rows) == (stats.num_pages, stats.num_rows)
    assert stats.num_evictable_pages == 0
    assert not stats.counters.skipped_snapshots


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_match_changes_nothing_however_often_it_is_not_opened(kind: ModelKind) -> None:
    driver = CacheDriver(kind, num_rows=6)
    first = driver.turn(list(range(20)), [30], "c", turn_start=10).token_ids
    before = driver.cache.stats()
    for _ in range(2000):
        driver.match(first)
    assert driver.cache.stats() == before
    driver.check()


def test_matching_does_not_make_a_snapshot_recently_used() -> None:
    driver = CacheDriver(num_rows=3)
    old = driver.turn([1] * 6, [30]).token_ids
    new = driver.turn([2] * 6, [30]).token_ids
    driver.match([*old, 5])
    driver.turn([3] * 6, [30], turn_start=3)
    assert driver.match([*old, 5]).num_tokens == 0
    assert driver.match([*new, 5]).num_tokens == 6


def test_the_best_of_a_thousand_siblings_is_found() -> None:
    driver = CacheDriver("attention_only", page_size=16, num_pages=1100, checks=False)
    trunk = [7] * 16
    for number in range(1000):
        driver.turn([*trunk, *(number // 10**digit % 10 for digit in (2, 1, 0)), *([9] * 10)], [1])
    match = driver.match([*trunk, 4, 2, 7, 9, 9, 5, 5, 5])
    assert match.num_tokens == 16 + 5


def test_token_ids_that_do_not_fit_are_refused() -> None:
    driver = CacheDriver()
    for token_ids in ([-1, 2], [1 << 32]):
        with pytest.raises(ValueError, match="token ids"):
            driver.match(token_ids)
    assert driver.match(np.array([1, 2, 3], np.int32)).num_tokens == 0


def test_lists_and_arrays_of_the_same_tokens_match_alike() -> None:
    driver = CacheDriver()
    driver.turn(list(range(300, 320)), [1], turn_start=18)
    for dtype in (np.int32, np.int64, np.uint32):
        assert driver.match(np.arange(300, 321, dtype=dtype)).num_tokens == 20


def test_a_match_opened_with_other_tokens_is_refused() -> None:
    driver = CacheDriver()
    known = driver.turn(list(range(20)), [1]).token_ids
    match = driver.match([*known, 3])
    with pytest.raises(ValueError, match="20 tokens that were matched"):
        driver.cache.open(match, [9, *known[1:], 3])
    driver.cache.check()
    seq = driver.cache.open(match, [*known, 3, 4, 5])
    assert seq is not None
    assert seq.num_computed_tokens == 20


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_match_that_went_stale_is_found_again_when_opened(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    known = driver.turn(list(range(20)), [1, 2], turn_start=8).token_ids
    match = driver.match([*known, 3])
    assert match.num_tokens == 21
    driver.cache.clear()
    assert not match.is_current
    run = driver.open_match(match)
    assert run is not None
    assert run.num_reused == 0
    assert driver.step(run)
    driver.check()


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_loss_by_eviction_is_told_from_one_without_a_snapshot(kind: ModelKind) -> None:
    driver = CacheDriver(kind, page_size=4)
    known = driver.turn(list(range(21)), [1, 2], turn_start=9).token_ids
    driver.cache.clear()
    match = driver.match([*known, 3])
    assert (match.num_tokens, match.num_evicted_tokens, match.loss_reason) == (0, 22, "evicted")
    shorter = driver.match([*known[:12], 3])
    assert shorter.num_evicted_tokens == (12 if kind == "attention_only" else 9)
    assert driver.match([50, 51, 52]).loss_reason == "none"
    assert driver.match([*known, 3], "other").loss_reason == "none"


def test_a_loss_by_eviction_is_known_where_pages_stayed_for_others() -> None:
    driver = CacheDriver(page_size=4, num_rows=3, eviction_policy="lru")
    driver.turn(list(range(30)), [1], turn_start=18)
    other = driver.open([90] * 3)
    assert other is not None
    assert driver.step(other, None, [(2, "trunk")])  # takes the row of the turn start
    match = driver.match([*range(25), 77])
    assert (match.num_tokens, match.num_matched_tokens, match.num_evicted_tokens) == (0, 25, 18)
    assert match.loss_reason == "evicted"


def test_lost_and_reused_tokens_are_counted_once_per_request() -> None:
    driver = CacheDriver(page_size=4)
    known = driver.turn(list(range(20)), [1, 2], turn_start=8).token_ids
    driver.turn([*known, 3, 4], [5])
    running = driver.open([*known[:16], 60, 61])
    assert running is not None
    counters = driver.cache.stats().counters
    assert counters.num_opens == 3
    assert counters.num_hits == 2
    assert counters.num_prompt_tokens == 20 + 24 + 18
    assert counters.num_reused_tokens == 0 + 21 + 8
    assert counters.num_matched_tokens == 0 + 21 + 16
    assert counters.lost_tokens == {"no_snapshot": 8}
