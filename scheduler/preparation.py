"""Prefixes that a next turn is known to begin with, computed while the engine has nothing else to do.

One at a time, in small steps, at the end of every order: whatever is submitted goes first, and finds what was computed
so far in the cache like anything else. Nobody waits for a preparation and none produces an event.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.scheduler.step_plan import StepItem

if TYPE_CHECKING:
    from turnkeep.cache.cache_manager import CacheManager
    from turnkeep.cache.sequence_cache import SequenceCache

MAX_PREPARATIONS = 64
MIN_PREPARED_TOKENS = 16  # fewer are computed faster than they are kept
MAX_STEP_TOKENS = 128  # what somebody who comes in the middle of a step waits for


@dataclass(slots=True, eq=False)
class Preparation:
    """token_ids: how the conversation's next prompt will begin. cache: while it is the one that runs."""

    cache_root: str
    conversation_id: str | None
    token_ids: EncodedTokens
    cache: SequenceCache | None = None


@dataclass(slots=True)
class PreparationCounters:
    """Since the engine started. `tokens` are in no other count of computed tokens."""

    started: int = 0
    finished: int = 0
    tokens: int = 0
    yields: int = 0  # to requests that came before it was done
    dropped: int = 0  # overtaken by the conversation itself, or without room


class Preparations:
    """What waits to be prepared, the newest of each line of a conversation, and the one that runs."""

    def __init__(self, cache: CacheManager, max_step_tokens: int) -> None:
        self._cache = cache
        self._max_step_tokens = min(max_step_tokens, MAX_STEP_TOKENS)
        self._waiting: OrderedDict[int, Preparation] = OrderedDict()  # newest last
        self._running: Preparation | None = None
        self._num_added = 0
        self.counters = PreparationCounters()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or self.is_running

    @property
    def is_running(self) -> bool:
        """The step that was planned last, and not applied yet, is one of a preparation."""
        return self._running is not None

    def add(self, cache_root: str, conversation_id: str | None, token_ids: EncodedTokens) -> None:
        """The next prompt of the conversation will begin so. The oldest is forgotten beyond MAX_PREPARATIONS."""
        if not self._cache.prefix_caching:
            return
        self._num_added += 1
        self._waiting[self._num_added] = Preparation(cache_root, conversation_id, token_ids)
        if len(self._waiting) > MAX_PREPARATIONS:
            self._waiting.popitem(last=False)
            self.counters.dropped += 1

    def give_way(self, cache_root: str, conversation_id: str | None, token_ids: EncodedTokens) -> None:
        """A request was submitted: the one that runs stops where it is. What the request itself continues, or makes
        too late, is not computed any more."""
        running = self._running
        if running is not None:
            assert running.cache is not None
            self.counters.yields += 1
            self._cache.suspend(running.cache, running.token_ids)
            running.cache, self._running = None, None
            self._num_added += 1
            self._waiting[self._num_added] = running
        for number, one in list(self._waiting.items()):
            is_same = conversation_id is not None and conversation_id == one.conversation_id
            if one.cache_root == cache_root and (is_same or token_ids.starts_alike(one.token_ids, len(one.token_ids))):
                self._drop(number)

    def close_conversation(self, cache_root: str, conversation_id: str) -> None:
        """It will not return."""
        running = self._running
        if running is not None and (running.cache_root, running.conversation_id) == (cache_root, conversation_id):
            self.fail()
        for number, one in list(self._waiting.items()):
            if (one.cache_root, one.conversation_id) == (cache_root, conversation_id):
                self._drop(number)

    def plan_item(self) -> StepItem | None:
        """The next step's item, its pages owned; None when nothing is left that can be prepared."""
        while self._running is not None or self._waiting:
            if self._running is None:
                _, preparation = self._waiting.popitem()  # who spoke last is likely to be heard of first
                if not self._open(preparation):
                    continue
            item = self._next_item()
            if item is not None:
                return item
        return None

    def apply(self, item: StepItem) -> None:
        """The step ran."""
        running = self._running
        assert running is not None
        assert running.cache is not None
        self.counters.tokens += len(item.token_ids)
        self._cache.advance(running.cache, len(item.token_ids))
        self._cache.commit(running.cache, running.token_ids)
        if running.cache.num_computed_tokens == len(running.token_ids):
            self._cache.finish_preparation(running.cache, running.token_ids)
            self.counters.finished += 1
            self._running = None

    def fail(self) -> None:
        """Give up the one that runs."""
        if self._running is not None:
            assert self._running.cache is not None
            self._cache.close(self._running.cache)
            self._running = None
            self.counters.dropped += 1

    def clear(self) -> None:
        """The engine leaves."""
        self.fail()
        self._waiting.clear()

    def _drop(self, number: int) -> None:
        del self._waiting[number]
        self.counters.dropped += 1

    def _open(self, preparation: Preparation) -> bool:
        cache, ids = self._cache, preparation.token_ids
        match = cache.match(preparation.cache_root, ids, preparation.conversation_id)
        num_pages = cache.num_new_pages(match, len(ids))
        sequence = None
        is_worth = len(ids) - match.num_tokens >= MIN_PREPARED_TOKENS
        if is_worth and cache.can_provide(num_pages, int(cache.has_state), match):
            sequence = cache.open(match, ids, conversation_id=preparation.conversation_id, is_preparation=True)
        if sequence is None:
            self.counters.dropped += 1
            return False
        preparation.cache, self._running = sequence, preparation
        self.counters.started += 1
        return True

    def _next_item(self) -> StepItem | None:
        running = self._running
        assert running is not None
        assert running.cache is not None
        start = running.cache.num_computed_tokens
        end = min(len(running.token_ids), start + self._max_step_tokens)
        if not self._cache.grow(running.cache, end):
            self.fail()
            return None
        return StepItem(
            request_id="",  # of no request
            token_ids=running.token_ids[start:end],
            start=start,
            page_ids=running.cache.page_ids[: self._cache.pages_for(end)],
            state_row=running.cache.state_row,
            exports=(),
            sampling=None,
        )
