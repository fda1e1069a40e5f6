"""Snapshots: how they come about without copies, how exports that fail are given back, suspension."""

from __future__ import annotations

import pytest
from cache_driver import MODEL_KINDS, CacheDriver, ModelKind

STATEFUL: tuple[ModelKind, ...] = ("hybrid", "attention_free")
PROMPT = list(range(100, 110))


def num_free_rows(driver: CacheDriver) -> int:
    return driver.cache.stats().num_free_rows


@pytest.mark.parametrize("kind", STATEFUL)
def test_the_live_row_becomes_the_turn_end_without_a_copy(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    run = driver.open(PROMPT)
    assert run is not None
    assert driver.step(run)
    row = run.seq.state_row
    driver.cache.finish(run.seq, run.token_ids, keep_turn_end=True)
    assert driver.cache.drain_copies() == ((), ())
    match = driver.match([*PROMPT, 1])
    assert match.snapshot is not None
    assert (match.snapshot.row, match.snapshot.kind, match.num_tokens) == (row, "turn_end", 10)
    assert run.seq.is_closed
    assert run.seq.state_row is None


def test_finishing_without_a_turn_end_leaves_the_boundaries_only() -> None:
    driver = CacheDriver()
    run = driver.open(PROMPT)
    assert run is not None
    assert driver.step(run, None, [(9, "turn_start")])
    driver.publish(run)
    assert driver.cache.finish(run.seq, run.token_ids, keep_turn_end=False) is None
    driver.check()
    assert driver.snapshot_positions() == [9]


def test_exports_that_are_computed_are_published_by_finishing() -> None:
    driver = CacheDriver()
    run = driver.open(PROMPT)
    assert run is not None
    assert driver.step(run, None, [(3, "trunk"), (9, "turn_start")])
    driver.cache.finish(run.seq, run.token_ids, keep_turn_end=True)
    driver.check()
    assert driver.snapshot_positions() == [3, 9, 10]


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_sequence_that_computed_nothing_leaves_nothing(kind: ModelKind) -> None:
    for end in ("finish", "suspend", "close"):
        driver = CacheDriver(kind)
        run = driver.open(PROMPT)
        assert run is not None
        if end == "finish":
            assert driver.cache.finish(run.seq, run.token_ids, keep_turn_end=True) is None
        elif end == "suspend":
            driver.cache.suspend(run.seq, run.token_ids)
        else:
            driver.cache.close(run.seq)
        driver.assert_empty()


def test_an_export_keeps_its_row_when_asked_again_and_gives_it_back_when_the_step_never_runs() -> None:
    driver = CacheDriver(num_rows=5)
    run = driver.open(PROMPT)
    assert run is not None
    row = driver.cache.reserve_export(run.seq, 5, "trunk")
    assert row is not None
    assert driver.cache.reserve_export(run.seq, 5, "trunk") == row
    assert num_free_rows(driver) == 3
    driver.cache.check()
    driver.cache.publish_exports(run.seq, run.token_ids)  # nothing is computed yet
    assert driver.snapshot_positions() == []
    driver.cache.close(run.seq)
    assert num_free_rows(driver) == 5


def test_an_export_of_a_computed_position_is_refused() -> None:
    driver = CacheDriver()
    run = driver.open(PROMPT)
    assert run is not None
    assert driver.step(run)
    with pytest.raises(ValueError, match="position 10 is computed already"):
        driver.cache.reserve_export(run.seq, 10, "turn_start")


def test_an_export_without_a_row_is_skipped_and_counted() -> None:
    driver = CacheDriver(num_rows=1)
    run = driver.open(PROMPT)
    assert run is not None
    assert driver.cache.reserve_export(run.seq, 5, "trunk") is None
    assert driver.cache.stats().counters.skipped_snapshots == {"no_row": 1}


def test_a_model_without_state_exports_nothing_and_skips_nothing() -> None:
    driver = CacheDriver("attention_only")
    run = driver.open(PROMPT)
    assert run is not None
    assert driver.cache.reserve_export(run.seq, 5, "trunk") is None
    assert not driver.cache.stats().counters.skipped_snapshots
    assert run.seq.state_row is None


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_snapshot_that_exists_is_not_written_again(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    first, second = driver.open([*PROMPT, 1, 2]), driver.open([*PROMPT, 3, 4])
    assert first is not None
    assert second is not None
    assert driver.step(first, None, [(9, "trunk")])
    driver.publish(first)
    rows = num_free_rows(driver)
    assert driver.cache.reserve_export(second.seq, 9, "trunk") is None
    assert num_free_rows(driver) == rows
    assert driver.cache.stats().counters.skipped_snapshots == {"duplicate": 1}
    assert driver.step(second)
    driver.publish(second)
    driver.check()
    assert driver.snapshot_positions() == [9]


def test_of_two_equal_snapshots_computed_at_once_one_is_kept() -> None:
    driver = CacheDriver(num_rows=6)
    runs = [driver.open(PROMPT), driver.open(PROMPT)]
    for run in runs:
        assert run is not None
        assert driver.step(run, None, [(9, "turn_start")])
    for run in runs:
        assert run is not None
        driver.publish(run)
        driver.check()
    assert num_free_rows(driver) == 3
    handles = [driver.cache.finish(run.seq, run.token_ids, keep_turn_end=True) for run in runs if run is not None]
    assert num_free_rows(driver) == 4
    assert driver.snapshot_positions() == [9, 10]
    # The second found the turn end of the first: its opinion does not take it from the first.
    assert handles[0] is not None
    assert handles[1] is not None
    driver.cache.end_turn(handles[1], 5)
    driver.check()
    assert driver.snapshot_positions() == [9, 10]
    driver.cache.end_turn(handles[0], 5)
    driver.check()
    assert driver.snapshot_positions() == [9]


def test_several_snapshots_stand_in_one_page() -> None:
    driver = CacheDriver(page_size=16)
    run = driver.open(list(range(15)))
    assert run is not None
    assert driver.step(run, None, [(position, "declared") for position in (2, 3, 7, 14)])
    driver.publish(run)
    driver.cache.close(run.seq)
    driver.check()
    assert driver.cache.stats().num_tree_pages == 1
    for position in (2, 3, 7, 14):
        fork = driver.open([*range(position), 77])
        assert fork is not None
        assert fork.num_reused == position
        assert driver.step(fork)
        driver.cache.close(fork.seq)
    driver.check()


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_suspended_request_resumes_where_it_was(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    run = driver.open(PROMPT, "c")
    assert run is not None
    assert driver.step(run, None, [(9, "turn_start")])
    driver.publish(run)
    for token_id in (1, 2, 3):
        run.token_ids.append(token_id)
        assert driver.step(run)
    run.token_ids.append(4)  # sampled, not computed
    driver.cache.suspend(run.seq, run.token_ids)
    driver.check()
    resumed = driver.open(run.token_ids, "c")
    assert resumed is not None
    assert resumed.num_reused == 13
    driver.finish_turn(resumed, [5])
    assert driver.match([*run.token_ids, 6]).num_tokens == 14


@pytest.mark.parametrize("kind", STATEFUL)
def test_the_state_of_a_suspended_request_is_superseded_when_its_turn_ends(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    run = driver.open(PROMPT, "c")
    assert run is not None
    assert driver.step(run, 7)
    driver.cache.suspend(run.seq, run.token_ids)
    assert driver.snapshot_positions(superseded=False) == [7]
    driver.turn(PROMPT, [1], "c", turn_start=9)
    assert driver.snapshot_positions(superseded=True) == [7]
    assert driver.snapshot_positions(superseded=False) == [9, 10]
    assert driver.cache.stats().num_branches == 1


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_suspended_request_whose_state_was_evicted_starts_again(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    run = driver.open(PROMPT, "c")
    assert run is not None
    assert driver.step(run)
    driver.cache.suspend(run.seq, run.token_ids)
    driver.cache.clear()
    resumed = driver.open(PROMPT, "c")
    assert resumed is not None
    assert resumed.num_reused == 0
    assert driver.step(resumed)


def test_a_turn_suspended_in_its_prefill_is_suspended_again_and_again() -> None:
    driver = CacheDriver(num_rows=3, num_pages=6)
    run = driver.open(list(range(20)), "c")
    assert run is not None
    for done in range(2, 20, 2):
        assert driver.step(run, 2)
        driver.cache.suspend(run.seq, run.token_ids)
        driver.check()
        run = driver.open(list(range(20)), "c")
        assert run is not None
        assert run.num_reused == done
    assert driver.snapshot_positions(superseded=False) == [18]
