"""Where a turn should end: after its last token, or at its last full page.

The next prompt does not always repeat an answer to its last token: a template or a client trims its end, text that is
encoded again joins its last piece with what follows. A snapshot after the last token is then of no use, and all of the
answer is computed again; one at the last full page costs less than a page. How often that happens is learnt online, by
line of conversation; where prompts repeat everything, turns end after their last token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from turnkeep.cache.encoded_tokens import TokenIds, encode_tokens
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.prefix_history import Mark, PagePrefixes
from turnkeep.cache.sequence_cache import SequenceCache

PRIOR_TURNS = 10.0  # worth of turns that were repeated to their last token
LINE_TURNS = 2.0  # weight of all lines in what is expected of one


@dataclass(slots=True)
class EndHabits:
    """Of one line: turns that the next prompt repeated to their last token, and those cut after their last full page;
    others say nothing. places: both ends of the newest turn, until it is known which of them was repeated."""

    num_whole: int = 0
    num_cut: int = 0
    places: tuple[Mark, Mark] | None = None


class TurnEndPlaces:
    """All lines together, and the choice."""

    def __init__(self, page_size: int, cost: PrefillCost) -> None:
        self._page_size = page_size
        self._cost = cost
        self._num_whole = 0
        self._num_cut = 0

    def may_be_cut(self, habits: EndHabits, base: int, num_prompt_tokens: int) -> bool:
        """Whether a turn with this prompt, resumed at `base`, would better not end within a page. O(1)."""
        end = num_prompt_tokens + self._page_size // 2
        return self._is_cut_better(habits, base, num_prompt_tokens, end)

    def ended(
        self, habits: EndHabits, prefixes: PagePrefixes, seq: SequenceCache, token_ids: TokenIds, places: Iterable[int]
    ) -> int:
        """A turn is about to end, all its full pages committed: after how many tokens it should, in expected seconds.

        prefixes: of its prompt. places: where else its line could resume. O(new pages).
        """
        end = seq.num_computed_tokens
        page = end // self._page_size * self._page_size
        if not 0 < page < end:
            habits.places = None
            return end
        prefixes.extend(seq.encoded)
        last = Mark(end, prefixes.digests[page // self._page_size], bytes(encode_tokens(token_ids[page:end])))
        habits.places = (prefixes.mark(page), last)
        base = max((place for place in places if place <= page), default=0)
        return page if self._is_cut_better(habits, base, page, end) else end

    def settled(self, habits: EndHabits, stable_tokens: int) -> Mark | None:
        """The template repeats so many tokens of the turn. Its last full page if that is what is left of its end, which
        is then learnt at once."""
        places = habits.places
        if places is None or stable_tokens >= places[1].position:
            return None
        habits.places = None
        if stable_tokens < places[0].position:
            return None
        self._count(habits, is_cut=True)
        return places[0]

    def returned(self, habits: EndHabits, prefixes: PagePrefixes) -> None:
        """The next prompt of the line is here."""
        if habits.places is not None and prefixes.repeats(habits.places[0]):
            self._count(habits, is_cut=not prefixes.repeats(habits.places[1]))
        habits.places = None

    def _is_cut_better(self, habits: EndHabits, base: int, page: int, end: int) -> bool:
        """Whether those who repeat all lose less at `page` than the others at `end`, who fall back to `base`."""
        cut = self._num_cut / (self._num_cut + self._num_whole + PRIOR_TURNS)
        cut = (habits.num_cut + LINE_TURNS * cut) / (habits.num_cut + habits.num_whole + LINE_TURNS)
        return cut * self._cost.seconds(base, page) > (1 - cut) * self._cost.seconds(page, end)

    def _count(self, habits: EndHabits, *, is_cut: bool) -> None:
        habits.num_cut += is_cut
        habits.num_whole += not is_cut
        self._num_cut += is_cut
        self._num_whole += not is_cut
