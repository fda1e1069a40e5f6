"""Requests whose prefix lies in a colder tier: they wait for it to be loaded while others run.

Waiting is bounded: a request starts so many loads, each ends, and then it runs with what is there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from turnkeep.scheduler.request import Request

if TYPE_CHECKING:
    from turnkeep.cache.cache_manager import CacheManager
    from turnkeep.cache.prefix_match import PrefixMatch

MAX_LOADS = 2  # that one request may start: what is loaded can be lost again before it is used


class ColdPrefixes:
    """Asks the colder tiers of a cache on behalf of requests that are about to be admitted."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache

    @property
    def takes_room(self) -> bool:
        """What is handed over in part holds pages, whoever waits for it; for some moments."""
        return self._cache.tiers is not None and self._cache.tiers.loader.is_handing_over

    def improved(self, request: Request, match: PrefixMatch) -> PrefixMatch | None:
        """The match to go on with; None while a deeper one is on its way."""
        tiers = self._cache.tiers
        if tiers is None:
            return match
        cold = tiers.find(match)
        if cold is not None:
            state = tiers.load(cold, match, request.conversation_id, may_start=request.num_loads < MAX_LOADS)
            request.num_loads += state in ("started", "done")
            request.num_cold_tokens = max(request.num_cold_tokens, cold.position)
            if state in ("started", "waiting"):
                return None
            if state == "done":
                match = self._cache.match(match.cache_root, match.token_ids, request.conversation_id)
        if request.num_cold_tokens > match.num_tokens:
            match = replace(match, num_cold_tokens=request.num_cold_tokens)
        return match
