"""Who enters, who waits, who is refused and why.

A request enters when a live place is free and the pools can serve its uncached tokens plus a decode reserve, for it
and for everything that runs, evicting if that suffices. Knows the cache's counts, never its contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from turnkeep.scheduler.config import SchedulerConfig
from turnkeep.scheduler.request import Request
from turnkeep.scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from turnkeep.cache.cache_manager import CacheManager, PrefixMatch

Verdict = Literal["admitted", "blocked", "waits_for_prefix"]


class Admission:
    """Opens a request's cache when it may run. `waiting` is the scheduler's queue."""

    def __init__(self, cache: CacheManager, config: SchedulerConfig, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._config = config
        self._waiting = waiting
        self._needs_row = cache.spec.state is not None
        self._needs_pages = cache.spec.kv is not None
        self.num_bypasses = 0
        self.num_prefix_waits = 0

    def reason_to_refuse(self, request: Request) -> str | None:
        """Why the request can never run: the resource, what it needs and what there is. None when it can."""
        sampling = request.sampling
        if not request.token_ids:
            return "the prompt is empty"
        if sampling.max_new_tokens < 1:
            return f"max_new_tokens must be at least 1, not {sampling.max_new_tokens}"
        total = request.num_prompt_tokens + sampling.max_new_tokens
        if total > self._config.max_model_len:
            return (
                f"prompt of {request.num_prompt_tokens} tokens and max_new_tokens of {sampling.max_new_tokens} are "
                f"{total} tokens together, max_model_len is {self._config.max_model_len}"
            )
        # One page more than its tokens: it may resume from a snapshot whose partly filled last page it copies.
        num_pages = self._num_pages(request.max_computed_tokens) + self._needs_pages
        num_usable = self._cache.num_pages - 1
        if self._needs_pages and num_pages > num_usable:
            return f"pages: the request needs {num_pages} for {total} tokens, the pool has {num_usable}"
        num_rows = self._cache.num_state_rows - 1
        if self._needs_row and num_rows < 1:
            return f"state rows: the request needs 1, the pool has {num_rows}"
        return self._unknown_token(request)

    def _unknown_token(self, request: Request) -> str | None:
        vocab_size = self._config.vocab_size
        if vocab_size is None:
            return None
        for name, ids in (("prompt", request.token_ids), ("logit_bias", request.sampling.logit_bias)):
            if ids and (min(ids) < 0 or max(ids) >= vocab_size):
                return f"{name}: token id {min(ids) if min(ids) < 0 else max(ids)} is not in [0, {vocab_size})"
        return None

    def admit(self, running: list[Request]) -> list[Request]:
        """Take out of the queue what may run now, its cache opened; the caller puts it among `running`.

        One that does not fit does not stop smaller ones behind it, up to `max_bypassed` times; then everything
        behind it waits, and it fits at the latest when nothing runs. Looks at a bounded number of requests.
        """
        admitted: list[Request] = []
        blocked: list[Request] = []
        index = 0
        while (
            index < len(self._waiting)
            and len(blocked) < self._config.max_candidates
            and len(running) + len(admitted) < self._config.max_running
        ):
            request = self._waiting[index]
            verdict = self._try_admit(request, [*running, *admitted])
            if verdict == "admitted":
                self._waiting.remove(request)
                admitted.append(request)
                for passed in blocked:
                    passed.num_bypassed += 1
                self.num_bypasses += len(blocked)
            else:
                index += 1
            if verdict == "blocked":
                blocked.append(request)
            if any(passed.num_bypassed >= self._config.max_bypassed for passed in blocked):
                break
        return admitted

    def _try_admit(self, request: Request, running: Sequence[Request]) -> Verdict:
        cache = self._cache
        match = cache.match(request.cache_root, request.token_ids, request.conversation_id)
        if self._waits_for_prefix(request, match.num_tokens, running):
            return "waits_for_prefix"
        if self._open(request, match, running):
            return "admitted"
        # With nothing running everything can be evicted but what the match itself would hold on to.
        if not running and self._open(request, cache.match(request.cache_root, request.token_ids[:1]), running):
            return "admitted"
        return "blocked"

    def _open(self, request: Request, match: PrefixMatch, running: Sequence[Request]) -> bool:
        """Open the cache for the request and give it pages for all its known tokens, or change nothing."""
        cache = self._cache
        num_known = len(request.token_ids)
        shared = match.num_tokens // cache.spec.page_size if self._needs_pages else 0
        num_pages = self._num_pages(num_known) - shared + self._reserve_pages(request, num_known)
        for other in running:
            assert other.cache is not None
            num_pages += self._reserve_pages(other, other.cache.capacity_tokens)
        if not cache.can_provide(num_pages, int(self._needs_row), match):
            return False
        sequence = cache.open(match, request.token_ids, conversation_id=request.conversation_id)
        if sequence is None:
            return False
        if not cache.grow(sequence, num_known):
            cache.close(sequence)
            return False
        request.cache = sequence
        if request.admitted_s is None:
            request.num_cached_tokens = match.num_tokens
            request.num_matched_tokens = match.num_matched_tokens
        return True

    def _waits_for_prefix(self, request: Request, num_usable: int, running: Sequence[Request]) -> bool:
        """A running request is about to compute a prefix of this one's prompt, up to a boundary of its own."""
        if not self._cache.prefix_caching:
            return False
        for leader in running:
            is_known = leader.request_id == request.prefix_leader_id
            if not is_known and request.num_prefix_waits >= self._config.max_prefix_waits:
                continue
            if self._is_about_to_share(leader, request, num_usable):
                if not is_known:
                    request.prefix_leader_id = leader.request_id
                    request.num_prefix_waits += 1
                    self.num_prefix_waits += 1
                return True
        return False

    def _is_about_to_share(self, leader: Request, request: Request, num_usable: int) -> bool:
        assert leader.cache is not None
        computed = leader.cache.num_computed_tokens
        if computed >= leader.num_prompt_tokens or leader.cache_root != request.cache_root:
            return False
        for boundary in leader.boundaries:
            position = boundary.position
            if position <= computed or position - num_usable < self._config.min_shared_tokens:
                continue
            # A match leaves at least the last token to be computed.
            return position < len(request.token_ids) and (
                leader.token_ids[:position] == request.token_ids[:position]
            )
        return False

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.spec.page_size) if self._needs_pages else 0

    def _reserve_pages(self, request: Request, capacity_tokens: int) -> int:
        """Pages past `capacity_tokens` for the tokens that the request is likely to need soon."""
        target = min(len(request.token_ids) + self._config.decode_reserve_tokens, request.max_computed_tokens)
        return max(self._num_pages(target) - self._num_pages(capacity_tokens), 0)
