"""Where turns end: after their last token, or a part of a page before it where prompts do not repeat the end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.density_policy import DensityPolicy
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.prefix_history import PagePrefixes
from turnkeep.cache.spares import SpareRule
from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec
from turnkeep.cache.turn_end_place import EndHabits, TurnEndPlaces

PARTS = (StatePart("state", 1, (64,), "float32"),)
PAGE = 8
SPEC = CacheSpec(PAGE, KVSpec(1, 1, 4, "bfloat16"), StateSpec(PARTS))


class Chat:
    """One conversation after the other through a cache, token by token."""

    def __init__(self, *, exports: bool = True) -> None:
        self.now_s = 0.0
        self.exports = exports
        self.cache = CacheManager(
            SPEC,
            num_pages=4000,
            num_state_rows=400,
            clock=lambda: self.now_s,
            policy=DensityPolicy(SPEC, lambda: self.now_s),
        )
        self.random = random.Random(0)

    def words(self, number: int) -> list[int]:
        return [self.random.randrange(1 << 30) for _ in range(number)]

    def turn(self, prompt: list[int], answer: list[int], name: str, num_unstable: int = 0) -> int:
        """Prompt tokens reused. num_unstable: last tokens of the answer that the template is known not to repeat."""
        cache = self.cache
        self.now_s += 10
        seq = cache.open(cache.match("", prompt, name), prompt, conversation_id=name)
        assert seq is not None
        known = prompt + answer
        assert cache.grow(seq, len(known))
        reused = seq.num_computed_tokens
        cache.drain_copies()
        cache.advance(seq, len(prompt) - reused)
        cache.commit(seq, prompt)
        for position in range(len(prompt) + 1, len(known)):
            if self.exports and seq.may_end_early and position % PAGE == 0:
                cache.reserve_export(seq, position, "page_end")
                cache.check()
            cache.advance(seq, 1)
        handle = cache.finish(seq, known, keep_turn_end=True)
        assert handle is not None
        cache.check()
        cache.end_turn(handle, len(known) - num_unstable)
        return reused

    def conversation(self, name: str, num_turns: int, num_cut: int, num_unstable: int = 0) -> list[int]:
        """Tokens of each prompt that were computed again although the turn before had computed them."""
        prompt, lost, repeated = self.words(31), [], 0
        for _ in range(num_turns):
            answer = self.words(29)
            lost.append(repeated - self.turn(prompt, answer, name, num_unstable))
            history = (prompt + answer)[: len(prompt) + len(answer) - num_cut]
            repeated = min(len(history), len(prompt) + len(answer) - 1)
            prompt = history + self.words(13)
        return lost[1:]


def test_answers_that_are_repeated_to_their_end_lose_nothing() -> None:
    chat = Chat()
    assert {lost for name in "abcd" for lost in chat.conversation(name, 8, num_cut=0)} == {0}


def test_answers_whose_last_tokens_are_not_repeated_lose_less_than_a_page() -> None:
    chat = Chat()
    before = chat.conversation("a", 6, num_cut=2)
    after = [lost for name in "bcde" for lost in chat.conversation(name, 6, num_cut=2)]
    assert max(before) >= 27
    assert sorted(after)[len(after) // 2] < PAGE  # those that end just behind a page's end lose the page before too
    assert sum(after) / len(after) < sum(before) / len(before) / 2


def test_what_the_template_trims_is_learnt_before_the_next_prompt_comes() -> None:
    chat = Chat()
    for number in range(20):
        chat.turn(chat.words(31), chat.words(27), f"single {number}", num_unstable=2)
    assert max(chat.conversation("a", 4, num_cut=2, num_unstable=2)) < PAGE


def test_a_turn_whose_state_at_a_page_is_not_at_hand_ends_after_its_last_token() -> None:
    chat = Chat(exports=False)
    for name in "abcd":
        chat.conversation(name, 6, num_cut=2)
    prompt, answer = chat.words(31), chat.words(29)
    chat.turn(prompt, answer, "whole")
    assert chat.turn(prompt + answer + chat.words(5), [1, 2], "whole") == len(prompt + answer) - 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60), st.integers(0, 200), st.integers(201, 299))
def test_the_cheaper_place_is_chosen_by_what_was_seen(seen: list[tuple[bool, bool]], base: int, page: int) -> None:
    """Against a count by hand: turns of the line itself, and of all lines with the prior."""
    cost = PrefillCost(1.0, 0.0)
    places, own, other = TurnEndPlaces(PAGE, cost), EndHabits(), EndHabits()
    tokens = list(range(24))
    prefixes = {is_cut: _prefixes(tokens[:17] if is_cut else tokens) for is_cut in (False, True)}
    for is_own, is_cut in seen:
        habits = own if is_own else other
        habits.places = (prefixes[False].mark(16), prefixes[False].mark(20))
        places.returned(habits, prefixes[is_cut])
        assert habits.places is None
    num_cut, own_cut = sum(cut for _, cut in seen), sum(cut for mine, cut in seen if mine)
    share = num_cut / (len(seen) + 10)
    share = (own_cut + 2 * share) / (sum(mine for mine, _ in seen) + 2)
    expected = share * (page - base) > (1 - share) * PAGE / 2
    assert places.may_be_cut(own, base, page) == expected


def _prefixes(token_ids: list[int]) -> PagePrefixes:
    return PagePrefixes("", b"".join(token.to_bytes(4, "big") for token in token_ids), PAGE, None)


def test_prompts_that_go_elsewhere_or_repeat_less_say_nothing() -> None:
    places, habits = TurnEndPlaces(PAGE, PrefillCost()), EndHabits()
    whole = _prefixes(list(range(24)))
    habits.places = (whole.mark(16), whole.mark(20))
    places.returned(habits, _prefixes([*range(9), *range(50, 70)]))
    habits.places = (whole.mark(16), whole.mark(20))
    places.settled(habits, 12)
    assert (habits.num_cut, habits.num_whole, habits.places) == (0, 0, None)


@pytest.mark.parametrize(("chance", "pays"), [(0.1, False), (0.4, True)])
def test_a_spare_saves_as_much_as_its_bytes_would_as_pages(chance: float, pays: bool) -> None:
    rule = SpareRule(SPEC, PrefillCost(1.0, 0.0))
    assert rule.row_tokens == 16
    assert rule.pays(chance, 0, 64) is pays
    assert rule.is_near([0, 50], 64)
    assert not rule.is_near([0, 20, 65], 64)
