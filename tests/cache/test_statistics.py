"""What the cache counts: every page, hit, snapshot and lost token, each once and under its reason."""

from __future__ import annotations

import pytest
from cache_driver import MODEL_KINDS, CacheDriver, ModelKind

from turnkeep.cache.statistics import CacheCounters

PROMPT = list(range(22))


def counters(driver: CacheDriver) -> CacheCounters:
    return driver.cache.stats().counters


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_full_pages_of_a_prompt_are_reused_or_missed_and_the_rest_is_generation(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    run = driver.turn(PROMPT, list(range(40, 50)), turn_start=20)
    first = counters(driver)
    if kind == "attention_free":
        assert (first.num_new_pages, first.num_reused_pages, first.num_missed_pages) == (0, 0, 0)
        return
    assert (first.num_reused_pages, first.num_missed_pages) == (0, 5)  # the last token of a prompt is never looked up
    assert (first.num_new_pages, first.num_generation_pages) == (8, 2)
    driver.turn([*run.token_ids, *range(60, 70)], [1])
    second = counters(driver)
    assert (second.num_reused_pages, second.num_missed_pages) == (7, 5 + 3)
    assert second.num_generation_pages == 2
    assert second.num_new_pages == 8 + 3


def test_hits_are_told_by_where_in_a_page_they_end() -> None:
    driver = CacheDriver()
    driver.turn(PROMPT, [1], turn_start=20)
    driver.turn([*PROMPT[:20], 7, 7, 7], [1])
    driver.turn([*PROMPT, 1, 5], [1])
    driver.turn([99, 98], [1])
    assert counters(driver).hits_by_alignment == {"aligned": 1, "unaligned": 1}
    assert (counters(driver).num_hits, counters(driver).num_opens) == (2, 4)


def test_a_snapshot_that_found_no_row_is_the_reason_when_its_tokens_are_computed_again() -> None:
    driver = CacheDriver(num_rows=2)
    busy = [driver.open([60, 61, 62]), driver.open(PROMPT)]
    run = busy[1]
    assert run is not None
    assert driver.step(run, None, [(18, "turn_start")])
    driver.publish(run)
    assert counters(driver).skipped_snapshots == {"no_row": 1}
    match = driver.match([*PROMPT[:18], 5, 6])
    assert (match.num_tokens, match.num_lost_tokens, match.loss_reason) == (0, 18, "capacity")
    assert driver.match([*PROMPT[:17], 5, 6]).loss_reason == "no_snapshot"


@pytest.mark.parametrize("kind", ["hybrid", "attention_free"])
def test_snapshots_are_weighed_and_those_without_a_use_are_told_when_they_go(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    run = driver.turn(PROMPT, [1, 2], trunk=8, turn_start=20)
    row_bytes = driver.cache._reclaimer._row_bytes
    assert counters(driver).num_snapshot_bytes == 3 * row_bytes
    assert counters(driver).unused_snapshots == {}
    driver.turn([*run.token_ids, 5], [3])
    driver.cache.clear()
    gone = counters(driver).unused_snapshots
    assert gone == {"trunk": 1, "turn_start": 1, "turn_end": 1}  # of the four, the first turn's end was used


def test_the_counts_have_flat_names_for_the_stats_message() -> None:
    driver = CacheDriver()
    driver.turn(PROMPT, [1], turn_start=20)
    driver.turn([*PROMPT[:20], 7, 7, 7], [1])
    values = driver.cache.stats().counter_values()
    assert values["hits_by_alignment.aligned"] == 1
    assert values["num_reused_tokens"] == 20
    assert values["created_snapshots.turn_start"] == 1


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_the_most_that_was_in_use_at_once_is_remembered(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    before = driver.cache.stats()
    assert (before.max_used_pages, before.max_used_rows) == (0, 0)
    driver.turn(PROMPT, list(range(40, 50)), turn_start=20)
    driver.turn([90, 91, 92], [93])
    most = driver.cache.stats()
    assert most.max_used_pages >= most.num_used_pages
    assert most.max_used_rows >= most.num_used_rows
    driver.cache.clear()
    after = driver.cache.stats()
    assert (after.num_used_pages, after.num_used_rows) == (0, 0)
    assert (after.max_used_pages, after.max_used_rows) == (most.max_used_pages, most.max_used_rows)
    assert after.max_used_pages == (0 if kind == "attention_free" else 9)
    assert after.max_used_rows == (0 if kind == "attention_only" else 3)
    assert {name: number for name, number in after.gauge_values().items() if name.startswith("max_")} == {
        "max_used_pages": after.max_used_pages,
        "max_used_rows": after.max_used_rows,
    }
