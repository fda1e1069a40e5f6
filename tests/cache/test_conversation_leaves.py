"""With a conversation's tag the search starts where its last turn ended; what is found is the same as without."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from cache_driver import MODEL_KINDS, CacheDriver, ModelKind
from counted_lines import count_lines

from turnkeep.cache.prefix_match import PrefixMatch

TURN = list(range(100, 150))


def same(driver: CacheDriver, prompt: Sequence[int], conversation_id: str, cache_root: str = "") -> PrefixMatch:
    """The match with the tag, compared with the one without."""
    tagged = driver.match(prompt, cache_root, conversation_id)
    plain = driver.match(prompt, cache_root)
    for name in ("num_tokens", "num_matched_tokens", "num_evicted_tokens", "snapshot", "path", "tail"):
        assert getattr(tagged, name) == getattr(plain, name), name
    return tagged


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_returning_turn_starts_at_the_end_of_the_last(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    run = driver.turn(TURN, [1, 2, 3, 4], "c", turn_start=45)
    match = same(driver, [*run.token_ids, 9, 9], "c")
    assert match.num_tokens == len(run.token_ids) - 1
    assert match.known_pages is not None
    if kind != "attention_free":
        assert len(match.known_pages) == match.num_tokens // driver.page_size
    again = driver.turn([*run.token_ids, 9, 9], [5], "c")
    assert again.num_reused == match.num_tokens


@pytest.mark.parametrize("kind", MODEL_KINDS)
@pytest.mark.parametrize("kept", [53, 52, 48, 41, 40, 39, 4, 3, 0])
def test_a_prompt_that_leaves_the_last_turn_is_matched_up_to_there(kind: ModelKind, kept: int) -> None:
    driver = CacheDriver(kind)
    run = driver.turn(TURN, [1, 2, 3, 4], "c", trunk=8, turn_start=45)
    same(driver, [*run.token_ids[:kept], 99, 98, 97], "c")


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_turn_end_that_was_dropped_leaves_the_turn_start_to_be_found(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    run = driver.turn(TURN, list(range(20)), "c", turn_start=45, stable_tokens=45)
    match = same(driver, [*run.token_ids[:45], 98, 97, 96, 95, 94], "c")
    assert match.num_tokens == 45
    assert match.known_pages is not None


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_what_was_evicted_is_not_found_again(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    run = driver.turn(TURN, [1, 2, 3], "c", turn_start=20)
    driver.cache.clear()
    assert same(driver, [*run.token_ids, 9], "c").num_tokens == 0
    driver.turn(TURN, [1, 2, 3], "other")
    assert same(driver, [*run.token_ids, 9], "c").num_tokens == len(run.token_ids) - 1


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_every_line_of_a_conversation_is_found(kind: ModelKind) -> None:
    driver = CacheDriver(kind, num_pages=128)
    main = driver.turn(TURN, [1, 2, 3], "c", trunk=8)
    side = driver.turn([*TURN[:8], 5, 5, 5, 5, 5], [1, 2], "c")
    for run in (main, side):
        match = same(driver, [*run.token_ids, 9], "c")
        assert match.num_tokens == len(run.token_ids) - 1
        assert match.known_pages is not None


def test_a_tag_of_another_root_or_conversation_finds_nothing_of_this_one() -> None:
    driver = CacheDriver()
    run = driver.turn(TURN, [1, 2, 3], "c")
    assert same(driver, [*run.token_ids, 9], "c", "tenant").num_tokens == 0
    other = same(driver, [*run.token_ids, 9], "d")
    assert other.num_tokens == len(run.token_ids) - 1
    assert other.known_pages is None


def test_a_conversation_that_is_closed_is_looked_up_page_by_page() -> None:
    driver = CacheDriver()
    run = driver.turn(TURN, [1, 2, 3], "c")
    driver.cache.close_conversation("", "c")
    assert same(driver, [*run.token_ids, 9], "c").known_pages is None
    assert len(driver.cache._leaves) == 0
    assert driver.cache._leaves._num_tokens == 0


def test_leaves_are_bounded_in_lines_conversations_and_tokens() -> None:
    driver = CacheDriver(num_pages=512, num_rows=128, checks=False)
    leaves = driver.cache._leaves
    leaves._max_conversations = 3
    for number in range(6):
        for line in range(6):
            driver.turn([number, line, *TURN], [1, 2], f"c{number}")
    assert len(leaves) == 3
    assert all(len(kept) == 4 for kept in leaves._leaves.values())
    assert leaves._num_tokens == 3 * 4 * 53
    leaves._max_tokens = 300
    driver.turn([9, *TURN], [1, 2], "last")
    assert list(leaves._leaves) == [("", "c5"), ("", "last")]
    assert leaves._num_tokens == 4 * 53 + 52


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_long_returning_prompt_is_matched_in_the_same_few_lines_as_a_short_one(kind: ModelKind) -> None:
    costs = []
    for length in (1_600, 16_000, 100_000):
        driver = CacheDriver(kind, page_size=16, num_pages=length // 16 + 20, checks=False)
        prompt = list(range(length))
        run = driver.open(prompt, "c")
        assert run is not None
        assert driver.cache.grow(run.seq, length)
        driver.run_copies()
        driver.cache.advance(run.seq, length)
        driver.cache.finish(run.seq, prompt, keep_turn_end=True)
        following = [*prompt, *range(40)]
        costs.append(count_lines(partial(driver.match, following, "", "c")))
        assert driver.match(following, "", "c").num_tokens == length
    assert max(costs) <= min(costs) + 30
    assert costs[0] < 200
