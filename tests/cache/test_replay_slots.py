"""History slots and folds: a live row stays behind, and whatever takes it over gets it folded first."""

from __future__ import annotations

import pytest

from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.copies import HistoryFold
from turnkeep.cache.sequence_cache import SequenceCache
from turnkeep.cache.spec import CacheSpec, HistorySpec, KVSpec, StatePart, StateSpec

CAPACITY = 8
PROMPT = list(range(10))


def make_cache(num_history_slots: int = 3) -> CacheManager:
    parts = (StatePart("ssm", 1, (2,), "float32"),)
    spec = CacheSpec(4, KVSpec(1, 1, 8, "float32"), StateSpec(parts), HistorySpec(CAPACITY, parts))
    return CacheManager(
        spec, num_pages=40, num_state_rows=12, num_history_slots=num_history_slots, clock=iter(range(10**6)).__next__
    )


def opened(cache: CacheManager, token_ids: list[int] = PROMPT) -> SequenceCache:
    """A sequence whose prompt but for the last token is computed."""
    sequence = cache.open(cache.match("", token_ids), token_ids, conversation_id="c")
    assert sequence is not None
    assert cache.grow(sequence, len(token_ids) + 20)
    cache.drain_copies()
    cache.drain_folds()
    cache.advance(sequence, len(token_ids) - 1 - sequence.num_computed_tokens)
    return sequence


def accept(cache: CacheManager, sequence: SequenceCache, num_tokens: int) -> tuple[int, int]:
    room = cache.history_room(sequence, num_tokens)
    cache.advance(sequence, num_tokens, in_history=True)
    cache.check()
    return room


def test_a_history_is_folded_before_a_path_that_might_not_fit() -> None:
    cache = make_cache()
    sequence = opened(cache)
    slot, row = sequence.history_slot, sequence.state_row
    assert slot is not None
    assert row is not None
    assert accept(cache, sequence, 3) == (slot, 0)
    assert accept(cache, sequence, 5) == (slot, 3)
    assert cache.drain_folds() == ()
    assert accept(cache, sequence, 1) == (slot, 0)
    assert cache.drain_folds() == (HistoryFold(slot, 8, row, row),)
    assert (sequence.num_folded_tokens, sequence.num_computed_tokens) == (17, 18)


def test_a_step_from_the_row_alone_wants_everything_in_it() -> None:
    cache = make_cache()
    sequence = opened(cache)
    accept(cache, sequence, 2)
    with pytest.raises(ValueError, match="behind"):
        cache.advance(sequence, 1)
    cache.fold(sequence)
    cache.advance(sequence, 1)
    assert sequence.num_history_tokens == 0
    (fold,) = cache.drain_folds()
    assert fold.num_tokens == 2
    cache.fold(sequence)
    assert cache.drain_folds() == ()


@pytest.mark.parametrize("ending", ["finish", "suspend"])
def test_a_row_that_becomes_a_snapshot_is_folded_into_itself(ending: str) -> None:
    cache = make_cache()
    sequence = opened(cache)
    slot, row = sequence.history_slot, sequence.state_row
    assert slot is not None
    assert row is not None
    accept(cache, sequence, 3)
    tokens = [*PROMPT, 20, 21, 22]
    if ending == "finish":
        cache.finish(sequence, tokens, keep_turn_end=True)
    else:
        cache.suspend(sequence, tokens)
    again = cache.open(cache.match("", tokens), tokens)  # in the same step: the fold comes before the copy
    assert again is not None
    assert again.num_computed_tokens == again.num_folded_tokens == 12
    assert again.history_slot == slot
    assert cache.drain_folds() == (HistoryFold(slot, 3, row, row),)
    ((copy,),) = [cache.drain_copies()[1]]
    assert (copy.source, copy.target) == (row, again.state_row)
    cache.check()


def test_an_aborted_sequence_gives_its_slot_back() -> None:
    cache = make_cache(num_history_slots=1)
    for _ in range(3):
        sequence = opened(cache)
        accept(cache, sequence, 2)
        cache.close(sequence)
        cache.check()


def test_more_sequences_than_slots_are_a_fault_of_the_caller() -> None:
    cache = make_cache(num_history_slots=1)
    opened(cache)
    with pytest.raises(RuntimeError, match="history slots"):
        opened(cache, [7, 7, 7, 7])


@pytest.mark.parametrize("num_tokens", [0, CAPACITY + 1])
def test_paths_that_never_fit_are_refused(num_tokens: int) -> None:
    cache = make_cache()
    with pytest.raises(ValueError, match="history"):
        cache.history_room(opened(cache), num_tokens)


def test_snapshots_that_a_failed_step_was_to_write_are_dropped() -> None:
    cache = make_cache()
    sequence = opened(cache)
    accept(cache, sequence, 3)
    tokens = [*PROMPT, 20, 21, 22]
    cache.finish(sequence, tokens, keep_turn_end=True)
    (fold,) = cache.drain_folds()
    cache.distrust({fold.target})
    assert cache.match("", tokens).num_tokens == 0
    cache.check()


@pytest.mark.parametrize(("position", "end"), [(14, 14), (9, 12), (30, 16)])
def test_a_turn_ends_where_its_tokens_are_repeated_as_far_as_the_row_allows(position: int, end: int) -> None:
    cache = make_cache()
    sequence = opened(cache)
    slot, row = sequence.history_slot, sequence.state_row
    assert slot is not None
    assert row is not None
    accept(cache, sequence, 3)
    cache.fold(sequence)
    cache.drain_folds()
    accept(cache, sequence, 4)
    cache.rewind(sequence, position)
    cache.check()
    tokens = [*PROMPT, *range(20, 28)]
    cache.finish(sequence, tokens, keep_turn_end=True)
    assert cache.match("", tokens).num_tokens == end
    assert cache.drain_folds() == ((HistoryFold(slot, end - 12, row, row),) if end > 12 else ())
    cache.check()
