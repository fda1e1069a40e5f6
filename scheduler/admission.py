"""Who enters, who waits, who is refused and why.

A request enters when a live place is free and the pools can serve its uncached tokens plus a decode reserve, for it
and for everything that runs, evicting if that suffices. Knows the cache's counts, never its contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from turnkeep.scheduler.cold_prefixes import ColdPrefixes
from turnkeep.scheduler.config import SchedulerConfig
from turnkeep.scheduler.request import Request
from turnkeep.scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from turnkeep.cache.cache_manager import CacheManager
    from turnkeep.cache.prefix_match import PrefixMatch

Verdict = Literal["admitted", "blocked", "waits_for_prefix", "waits_for_load"]


class Admission:
    """Opens a request's cache when it may run. `waiting` is the scheduler's queue."""

    def __init__(self, cache: CacheManager, config: SchedulerConfig, waiting: WaitingQueue) -> None:
        self._cache = cache
        self._config = config
        self._waiting = waiting
        self._cold_prefixes = ColdPrefixes(cache)
        self._num_usable_pages = cache.stats().num_pages
        self.num_bypasses = 0
        self.num_prefix_waits = 0
        self.is_load_awaited = False  # the last round saw one that somebody waits for, or that takes room

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
        num_pages = self._cache.pages_for(request.max_computed_tokens)
        if num_pages > self._num_usable_pages:
            return f"pages: the request needs {num_pages} for {total} tokens, the pool has {self._num_usable_pages}"
        return self._unknown_token(request)

    def shortage(self) -> str:
        """Why a request ends that was admitted and cannot go on: nothing was left to be taken from others."""
        pools = self._cache.stats()
        return (
            f"the cache cannot provide for the request although nothing else runs: {pools.num_pages} pages of "
            f"{self._cache.page_size} tokens, {pools.num_rows} state rows"
        )

    def _unknown_token(self, request: Request) -> str | None:
        vocab_size = self._config.vocab_size
        if vocab_size is None:
            return None
        limits = {"prompt": (0, request.token_ids.largest())}
        biased = request.sampling.logit_bias
        if biased:
            limits["logit_bias"] = (min(biased), max(biased))
        for name, (smallest, largest) in limits.items():
            if smallest < 0 or largest >= vocab_size:
                return f"{name}: token id {smallest if smallest < 0 else largest} is not in [0, {vocab_size})"
        return None

    def can_go_back(self, request: Request, position: int) -> bool:
        """Whether no more than tokens of its answer would have to be computed for it to end at an earlier position."""
        if not self._cache.has_state:
            return False
        match = self._cache.match(request.cache_root, request.token_ids[:position], request.conversation_id)
        return match.num_tokens >= request.num_prompt_tokens

    def admit(self, running: list[Request]) -> list[Request]:
        """Take out of the queue what may run now, its cache opened; the caller puts it among `running`.

        One that does not fit does not stop smaller ones behind it, up to `max_bypassed` times; then everything
        behind it waits, and it fits at the latest when nothing runs. Looks at a bounded number of requests.
        """
        admitted: list[Request] = []
        blocked: list[Request] = []
        self.is_load_awaited = self._cold_prefixes.takes_room
        prefilling = [request for request in running if _is_prefilling(request)]
        reserved_pages = sum(self._reserve_pages(request) for request in running)
        index = 0
        while (
            index < min(len(self._waiting), self._config.max_candidates)
            and len(running) + len(admitted) < self._config.max_running
        ):
            request = self._waiting[index]
            is_alone = not running and not admitted
            verdict = self._try_admit(request, prefilling, reserved_pages, is_alone)
            if verdict == "admitted":
                self._waiting.remove(request)
                admitted.append(request)
                if _is_prefilling(request):
                    prefilling.append(request)
                reserved_pages += self._reserve_pages(request)
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

    def _try_admit(
        self, request: Request, prefilling: Sequence[Request], reserved_pages: int, is_alone: bool
    ) -> Verdict:
        cache = self._cache
        match = cache.match(request.cache_root, request.token_ids, request.conversation_id)
        if self._waits_for_prefix(request, match.num_tokens, prefilling):
            return "waits_for_prefix"
        improved = self._cold_prefixes.improved(request, match)
        if improved is None:
            self.is_load_awaited = True
            return "waits_for_load"
        match = improved
        if self._open(request, match, reserved_pages):
            return "admitted"
        # With nothing running everything can be evicted but what the match itself would hold on to.
        if is_alone and self._open(request, cache.cold_match(request.cache_root, request.token_ids), reserved_pages):
            if match.num_tokens and request.admitted_s is None:
                request.num_lost_tokens, request.loss_reason = match.num_tokens, "capacity"
            return "admitted"
        return "blocked"

    def _open(self, request: Request, match: PrefixMatch, reserved_pages: int) -> bool:
        """Open the cache for the request and give it pages for all its known tokens, or change nothing."""
        cache = self._cache
        num_pages = cache.num_new_pages(match, self._likely_tokens(request))
        if not cache.can_provide(num_pages + reserved_pages, int(cache.has_state), match):
            return False
        sequence = cache.open(
            match, request.token_ids, conversation_id=request.conversation_id, retention_s=request.kept_s
        )
        if sequence is None:
            return False
        if not cache.grow(sequence, len(request.token_ids)):
            cache.close(sequence)
            return False
        request.cache = sequence
        if request.admitted_s is None:
            request.num_cached_tokens = sequence.num_computed_tokens
            request.num_matched_tokens = max(match.num_matched_tokens, sequence.num_computed_tokens)
            request.num_lost_tokens, request.loss_reason = match.num_lost_tokens, match.loss_reason
        return True

    def _waits_for_prefix(self, request: Request, num_usable: int, prefilling: Sequence[Request]) -> bool:
        """A running request is about to compute a prefix of this one's prompt, up to a boundary of its own.

        Waiting is bounded: the other one makes progress while it is in `prefilling`, and only so many are waited for.
        """
        for leader in prefilling:
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
        if leader.cache_root != request.cache_root:
            return False
        computed = leader.cache.num_computed_tokens
        for boundary in leader.boundaries:
            position = boundary.position
            if position <= computed or position - num_usable < self._config.min_shared_tokens:
                continue
            # A match leaves at least the last token to be computed.
            if position >= len(request.token_ids):
                return False
            return leader.token_ids.starts_alike(request.token_ids, position)
        return False

    def _likely_tokens(self, request: Request) -> int:
        """Computed tokens that the request is likely to reach soon: what is known and the decode reserve."""
        return min(len(request.token_ids) + self._config.decode_reserve_tokens, request.max_computed_tokens)

    def _reserve_pages(self, request: Request) -> int:
        """Pages that a running request is likely to need soon and does not have yet."""
        assert request.cache is not None
        return max(self._cache.pages_for(self._likely_tokens(request)) - request.cache.num_pages, 0)


def _is_prefilling(request: Request) -> bool:
    assert request.cache is not None
    return request.cache.num_computed_tokens < request.num_prompt_tokens
