"""Work per call, counted in executed lines: it depends on the pages touched, not on the size of the tree."""

from __future__ import annotations

from math import log

import pytest
from cache_driver import CacheDriver, ModelKind, Run
from counted_lines import count_lines

SIZES = (10, 100, 1000)


def filled(kind: ModelKind, num_conversations: int, num_spare: int = 20) -> CacheDriver:
    """A cache of so many conversations that share their first page, with room for a little more."""
    driver = CacheDriver(
        kind,
        num_pages=num_conversations * 7 + 1 + num_spare,
        num_rows=num_conversations * 2 + 4,
        checks=False,
    )
    for number in range(num_conversations):
        driver.turn([1, 2, 3, 4, number, *([5] * 24)], [6, 7], f"c{number}", turn_start=20)
    return driver


def opened(driver: CacheDriver, prompt: list[int]) -> Run:
    run = driver.open(prompt, "new")
    assert run is not None
    return run


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_matching_opening_and_committing_do_not_depend_on_the_size_of_the_tree(kind: ModelKind) -> None:
    costs = []
    for size in SIZES:
        driver = filled(kind, size)
        prompt = [1, 2, 3, 4, size // 2, *([5] * 24), 6, 9, 9, 9]
        match = driver.match(prompt)
        run = opened(driver, prompt)
        costs.append(
            [
                count_lines(lambda driver=driver, prompt=prompt: driver.match(prompt)),  # type: ignore[misc]
                # The fewest of three: once in fifty observations a table of forecasts is built again, of constant size.
                min(count_lines(lambda: driver.open_match(match)) for _ in range(3)),  # noqa: B023
                count_lines(lambda driver=driver, run=run: driver.step(run)),  # type: ignore[misc]
                count_lines(lambda driver=driver, run=run: driver.publish(run)),  # type: ignore[misc]
                count_lines(
                    lambda driver=driver, run=run: driver.cache.finish(  # type: ignore[misc]
                        run.seq, run.token_ids, keep_turn_end=True
                    )
                ),
            ]
        )
    for small, *larger in zip(*costs, strict=True):
        for size, cost in zip(SIZES[1:], larger, strict=True):
            assert cost <= small * log(size) / log(SIZES[0]) + 20


@pytest.mark.parametrize("kind", ["hybrid", "attention_only"])
def test_evicting_costs_what_it_frees(kind: ModelKind) -> None:
    costs = []
    for size in SIZES:
        driver = filled(kind, size, num_spare=1)
        run = opened(driver, [99] * 100)
        costs.append(count_lines(lambda driver=driver, run=run: driver.cache.grow(run.seq, 100)))  # type: ignore[misc]
        assert driver.cache.stats().counters.num_evicted_pages >= 20
    for size, cost in zip(SIZES[1:], costs[1:], strict=True):
        assert cost <= costs[0] * log(size) / log(SIZES[0]) + 50


def test_committing_costs_the_new_pages_however_long_the_sequence_is() -> None:
    costs = []
    for length in (100, 1000, 10_000):
        driver = CacheDriver(num_pages=length, checks=False)
        run = opened(driver, list(range(length)))
        assert driver.step(run)
        driver.publish(run)
        run.token_ids += range(20_000, 20_040)
        assert driver.cache.grow(run.seq, length + 40)
        driver.cache.advance(run.seq, 40)
        costs.append(count_lines(lambda driver=driver, run=run: driver.publish(run)))  # type: ignore[misc]
    assert costs[2] <= costs[0] * 1.1


def test_a_decode_step_that_needs_no_page_is_a_handful_of_lines() -> None:
    driver = CacheDriver(page_size=16)
    run = opened(driver, list(range(17)))
    assert driver.step(run)
    driver.publish(run)
    run.token_ids += [1, 2]
    assert count_lines(lambda: driver.cache.grow(run.seq, 18)) <= 5
    assert count_lines(lambda: driver.cache.advance(run.seq, 1)) <= 15
    assert count_lines(lambda: driver.cache.commit(run.seq, run.token_ids)) <= 15
    assert count_lines(lambda: driver.cache.drain_copies()) <= 8


def test_a_prompt_of_a_hundred_thousand_tokens_is_matched_in_a_few_lines_per_page() -> None:
    driver = CacheDriver(page_size=16, num_pages=6300, checks=False)
    prompt = list(range(100_000))
    run = opened(driver, prompt)
    assert driver.cache.grow(run.seq, 100_000)
    driver.run_copies()
    driver.cache.advance(run.seq, 100_000)
    driver.cache.finish(run.seq, prompt, keep_turn_end=True)
    matches = []
    assert count_lines(lambda: matches.append(driver.match([*prompt, 1]))) <= 6 * 6250 + 200
    assert matches[0].num_tokens == 100_000
