"""What is remembered of prefixes that were seen: who had them first, for how long, and what it costs."""

from __future__ import annotations

from counted_lines import count_lines

from turnkeep.cache.encoded_tokens import encode_tokens
from turnkeep.cache.prefix_history import PagePrefixes, PrefixHistory


def prefixes(token_ids: list[int]) -> PagePrefixes:
    return PagePrefixes("", encode_tokens(token_ids), 4, None)


def test_the_line_that_computed_a_page_first_keeps_it_and_new_pages_belong_to_who_added_them() -> None:
    history = PrefixHistory()
    first, second = prefixes(list(range(16))), prefixes([*range(8), *range(100, 112)])
    history.remember(first, 0, 1)
    assert history.num_known_pages(second) == 2
    history.remember(second, 2, 2)
    assert [history.line_of(digest) for digest in second.digests[1:]] == [1, 1, 2, 2, 2]
    assert history.num_known_pages(prefixes([*range(16), 7, 7, 7, 7])) == 4


def test_what_was_not_used_for_long_is_forgotten_and_what_was_stays() -> None:
    history = PrefixHistory(max_pages=20)
    kept, left = prefixes([1] * 16), prefixes([2] * 16)
    history.remember(kept, 0, 1)
    history.remember(left, 0, 2)
    for number in range(10, 20):
        history.remember(prefixes([number] * 16), 0, number)
        history.remember(kept, history.num_known_pages(kept), 3)
        assert len(history) <= 20
    assert history.num_known_pages(kept) == 4
    assert history.line_of(kept.digests[4]) == 1
    assert history.num_known_pages(left) == 0


def test_a_prompt_that_grows_costs_its_new_pages() -> None:
    costs = []
    for length in (400, 40_000):
        history = PrefixHistory()
        history.remember(prefixes(list(range(length))), 0, 1)
        grown = prefixes([*range(length), 7, 7, 7, 7])
        costs.append(count_lines(lambda grown=grown, history=history: history.remember(grown, grown.num_pages - 1, 1)))
    assert costs[1] <= costs[0] + 40
