"""Sharing of pages: partly filled tails, copies on write, siblings, duplicates, and when a page is free."""

from __future__ import annotations

import pytest
from cache_driver import MODEL_KINDS, CacheDriver, ModelKind

PROMPT = list(range(100, 110))  # two full pages of 4 and half a page


def num_free(driver: CacheDriver) -> int:
    return driver.cache.stats().num_free_pages


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_the_tail_page_is_written_on_without_a_copy_when_nobody_else_writes_it(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    known = driver.turn(PROMPT, [1]).token_ids
    free = num_free(driver)
    run = driver.turn([*known, 2], [3])
    assert run.num_reused == 10
    assert driver.num_copies == 0
    assert num_free(driver) == free
    assert driver.cache.stats().counters.num_adopted_pages == 1


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_of_two_forks_one_writes_the_tail_page_on_and_the_other_copies_it(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    known = driver.turn(PROMPT, [1, 2]).token_ids
    first, second = driver.open([*known, 5, 6]), driver.open([*known, 7, 8, 9])
    assert first is not None
    assert second is not None
    assert first.num_reused == second.num_reused == 11
    assert first.seq.page_ids[:2].tolist() == second.seq.page_ids[:2].tolist()
    assert first.seq.page_ids[2] != second.seq.page_ids[2]
    for run in (first, second):
        assert driver.step(run)
        driver.publish(run)
        driver.check()
    assert driver.num_copies == 1
    for run in (first, second):
        driver.verify(run)
        driver.cache.finish(run.seq, run.token_ids, keep_turn_end=True)
        driver.check()
    assert driver.match([*known, 5, 6, 7]).num_tokens == 14
    assert driver.match([*known, 7, 8, 9, 1]).num_tokens == 15


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_a_tail_used_in_part_is_copied(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    driver.turn(PROMPT, [1, 2], turn_start=9)
    run = driver.open([*PROMPT[:9], 55])
    assert run is not None
    assert run.num_reused == 9
    (copy,), _ = driver.cache.drain_copies()
    assert copy.num_tokens == 1
    assert copy.target == run.seq.page_ids[2]
    assert copy.source != copy.target


def test_a_writer_goes_on_in_its_own_page_while_others_copy_the_committed_part() -> None:
    driver = CacheDriver(page_size=16)
    writer = driver.open(list(range(5)))
    assert writer is not None
    assert driver.step(writer, None, [(5, "turn_start")])
    driver.publish(writer)
    page = writer.seq.page_ids[0]
    others = []
    for number in range(3):
        writer.token_ids.append(50 + number)
        assert driver.step(writer)
        assert writer.seq.page_ids[0] == page
        other = driver.open([*range(5), 60 + number])
        assert other is not None
        assert other.num_reused == 5
        assert other.seq.page_ids[0] != page
        assert driver.step(other)
        others.append(other)
    for run in (writer, *others):
        driver.verify(run)
        driver.cache.finish(run.seq, run.token_ids, keep_turn_end=True)
        driver.check()
    assert driver.match([*range(5), 50, 51, 52, 1]).num_tokens == 8


def test_a_copy_reads_its_source_even_if_the_source_leaves_the_tree_before() -> None:
    driver = CacheDriver("attention_only", page_size=8, num_pages=3)
    driver.turn([1, 2, 3, 4], [5])
    reader = driver.open([1, 2, 9])
    assert reader is not None
    # The page is still to be read: neither eviction nor a new sequence gets it.
    driver.cache.clear()
    assert driver.cache.stats().num_tree_pages == 1
    assert not driver.cache.can_provide(2, 0)
    assert driver.cache.can_provide(1, 0)
    # A sibling that holds the same tokens and more replaces it in the tree.
    longer = driver.open_match(driver.cache.cold_match("", [1, 2, 3, 4, 5, 6]))
    assert longer is not None
    assert driver.cache.grow(longer.seq, 6)
    driver.compute(longer, 6)
    driver.cache.finish(longer.seq, longer.token_ids, keep_turn_end=False)
    driver.cache.check()
    assert driver.cache.stats().num_tree_pages == 1
    assert driver.cache.stats().num_free_pages == 0  # the reader's, the sibling's, the source
    assert driver.step(reader)
    assert num_free(driver) == 1
    driver.check()


def test_a_copy_is_cancelled_with_its_sequence() -> None:
    driver = CacheDriver(num_pages=4, page_size=8)
    driver.turn([1, 2, 3, 4, 5], [6], turn_start=3)
    reader = driver.open([1, 2, 3, 9])
    assert reader is not None
    driver.cache.close(reader.seq)
    driver.check()
    assert driver.cache.drain_copies() == ((), ())


def test_copies_are_handed_out_once() -> None:
    driver = CacheDriver()
    known = driver.turn(PROMPT, [1], turn_start=9).token_ids
    assert driver.open([*known[:9], 7]) is not None
    pages, rows = driver.cache.drain_copies()
    assert (len(pages), len(rows)) == (1, 1)
    assert driver.cache.drain_copies() == ((), ())


def test_advancing_over_copies_that_never_ran_is_refused() -> None:
    driver = CacheDriver()
    known = driver.turn(PROMPT, [1]).token_ids
    run = driver.open([*known, 2])
    assert run is not None
    assert driver.cache.grow(run.seq, 11)
    with pytest.raises(ValueError, match="copies"):
        driver.cache.advance(run.seq, 1)
    driver.run_copies()
    with pytest.raises(ValueError, match="capacity"):
        driver.cache.advance(run.seq, 3)
    driver.cache.advance(run.seq, 1)


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_equal_pages_of_two_sequences_become_one(kind: ModelKind) -> None:
    driver = CacheDriver(kind, num_pages=40)
    runs = [driver.open(PROMPT) for _ in range(3)]
    for run in runs:
        assert run is not None
        assert driver.step(run)
    assert num_free(driver) == 40 - 9
    for run in runs:
        assert run is not None
        driver.publish(run)
        driver.check()
        driver.verify(run)
    assert num_free(driver) == 40 - 2 - 3
    assert driver.cache.stats().counters.num_freed_duplicates == 4
    tables = [run.seq.page_ids.tolist() for run in runs if run is not None]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    for run in runs:
        assert run is not None
        run.token_ids += [1, 2, 3]
        assert driver.step(run)
        driver.publish(run)
        driver.verify(run)
    driver.check()
    assert num_free(driver) == 40 - 3 - 3  # the third page is full now and shared, each has a tail of its own


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_longer_sibling_takes_over_the_snapshots_of_a_shorter_one(kind: ModelKind) -> None:
    driver = CacheDriver(kind, page_size=16)
    short = driver.open([1, 2, 3, 4, 5])
    assert short is not None
    assert driver.step(short, None, [(3, "trunk"), (5, "turn_start")])
    driver.publish(short)
    handle_position = driver.snapshot_positions()
    long = driver.open_match(driver.cache.cold_match("", [1, 2, 3, 4, 5, 6, 7, 8]))
    assert long is not None
    assert driver.step(long, None, [(7, "turn_start")])
    driver.publish(long)
    driver.check()
    if driver.cache.has_state:
        assert handle_position == [3, 5]
        assert driver.snapshot_positions() == [3, 5, 7]
        assert len(driver.nodes()) == 1
    short.token_ids += [90, 91]
    assert driver.step(short)
    driver.verify(short)
    driver.cache.finish(short.seq, short.token_ids, keep_turn_end=True)
    driver.cache.finish(long.seq, long.token_ids, keep_turn_end=True)
    driver.check()
    assert driver.match([1, 2, 3, 4, 5, 6, 7, 8, 9]).num_tokens == 8
    assert driver.match([1, 2, 3, 4, 5, 90, 91, 9]).num_tokens == 7
    assert driver.match([1, 2, 3, 9]).num_tokens == 3


def test_a_snapshot_inside_a_page_that_is_there_already_needs_no_second_page() -> None:
    driver = CacheDriver(page_size=16)
    long = driver.turn(list(range(14)), [50], turn_start=14)
    assert long.seq.is_closed
    free = num_free(driver)
    short = driver.open(list(range(9)))
    assert short is not None
    assert driver.step(short, None, [(8, "turn_start")])
    driver.publish(short)
    driver.cache.close(short.seq)
    driver.check()
    assert num_free(driver) == free
    assert driver.snapshot_positions() == [8, 14]


def test_pages_beyond_the_deepest_snapshot_go_at_once() -> None:
    driver = CacheDriver(num_pages=20)
    run = driver.open(list(range(30)))
    assert run is not None
    assert driver.step(run, None, [(9, "turn_start")])
    driver.publish(run)
    assert driver.cache.stats().num_tree_pages == 7
    driver.cache.close(run.seq)
    driver.check()
    assert driver.cache.stats().num_tree_pages == 3
    assert num_free(driver) == 17


def test_evicting_a_snapshot_frees_the_pages_up_to_the_next_one_that_is_left() -> None:
    driver = CacheDriver(num_pages=20, num_rows=3)
    driver.turn(list(range(30)), [1] * 8, turn_start=9)
    assert driver.snapshot_positions() == [9, 37]
    assert num_free(driver) == 10
    deep = driver.match([*range(30), *([1] * 8)]).snapshot
    assert deep is not None
    driver.cache._reclaimer.drop(deep)
    driver.check()
    assert driver.snapshot_positions() == [9]
    assert num_free(driver) == 17


def test_evicting_a_snapshot_above_another_one_frees_its_row_only() -> None:
    driver = CacheDriver(num_pages=20, num_rows=3, eviction_policy="lru")
    driver.turn(list(range(30)), [1] * 8, turn_start=9)
    other = driver.open([200] * 4)
    assert other is not None
    assert driver.step(other, None, [(3, "trunk")])
    assert driver.snapshot_positions() == [37]
    assert num_free(driver) == 20 - 10 - 1


def test_an_abort_in_the_middle_of_anything_returns_to_the_baseline() -> None:
    driver = CacheDriver(num_pages=20, num_rows=6)
    known = driver.turn(list(range(10)), [1, 2], turn_start=9).token_ids
    baseline = driver.cache.stats()
    for stage in range(6):
        run = driver.open([*known[:9], *range(60, 70)])
        assert run is not None
        if stage >= 1:
            assert driver.cache.grow(run.seq, 19)
        if stage >= 2:
            driver.reserve(run, 15, "turn_start")
        if stage >= 3:
            driver.run_copies()
        if stage >= 4:
            driver.compute(run, 19)
        if stage >= 5:
            driver.cache.commit(run.seq, run.token_ids)
        driver.cache.close(run.seq)
        driver.cache.close(run.seq)
        driver.check()
        stats = driver.cache.stats()
        assert stats.num_free_pages == baseline.num_free_pages
        assert stats.num_free_rows == baseline.num_free_rows
        assert stats.num_branches == baseline.num_branches


def test_a_closed_sequence_cannot_be_used() -> None:
    driver = CacheDriver()
    run = driver.open(PROMPT)
    assert run is not None
    driver.cache.close(run.seq)
    for call in (
        lambda: driver.cache.grow(run.seq, 4),
        lambda: driver.cache.advance(run.seq, 1),
        lambda: driver.cache.commit(run.seq, PROMPT),
        lambda: driver.cache.reserve_export(run.seq, 4, "trunk"),
        lambda: driver.cache.finish(run.seq, PROMPT, keep_turn_end=True),
        lambda: driver.cache.suspend(run.seq, PROMPT),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
    driver.assert_empty()


def test_committing_fewer_tokens_than_are_computed_is_refused() -> None:
    driver = CacheDriver("attention_free")
    run = driver.open([1])
    assert run is not None
    run.token_ids += [2] * 9
    assert driver.step(run)
    with pytest.raises(ValueError, match="only 3 are given"):
        driver.cache.commit(run.seq, [1, 2, 2])


def test_a_model_without_attention_needs_no_pages() -> None:
    driver = CacheDriver("attention_free", num_pages=0)
    known = driver.turn(list(range(40)), [1, 2], trunk=7, turn_start=35).token_ids
    run = driver.turn([*known, 3], [4])
    assert run.num_reused == 41
    assert driver.cache.pages_for(1000) == 0
    assert len(run.seq.page_ids) == 0
    assert driver.match([*range(7), 99]).num_tokens == 7


def test_pools_in_which_nothing_can_run_are_refused() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        CacheDriver("hybrid", num_pages=0)
    with pytest.raises(ValueError, match="num_state_rows"):
        CacheDriver("hybrid", num_rows=0)
    CacheDriver("attention_only", num_rows=0)
