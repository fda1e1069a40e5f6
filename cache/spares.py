"""When is a snapshot worth its row that is used only if the newer one is not?

A spare stands where the prompt or the user's words end, before the turn's end, in case that the answer is not repeated.
Knows nothing of lines or pools.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.prefix_match import MIN_BRANCH_TOKENS
from turnkeep.cache.spec import CacheSpec


class SpareRule:
    """row_tokens: tokens whose keys and values take as much room as a row."""

    def __init__(self, spec: CacheSpec, cost: PrefillCost) -> None:
        self.row_tokens = spec.bytes_per_row // spec.kv.bytes_per_token if spec.kv is not None else 0
        self._cost = cost

    def is_near(self, places: Iterable[int], position: int) -> bool:
        """Whether one of these places is so close before `position` that the tokens in between take no more room than
        another row. 0 is no place."""
        limit = max(self.row_tokens, MIN_BRANCH_TOKENS)
        return any(place and 0 <= position - place <= limit for place in places)

    def pays(self, chance: float, base: int, position: int) -> bool:
        """Whether a spare at `position` that is used instead of one at `base` with this chance saves at least what its
        bytes would save as pages, of tokens that cost what the prompt's do on average."""
        row_s = self._cost.seconds(0, position) / position * self.row_tokens
        return chance * self._cost.seconds(base, position) >= row_s
