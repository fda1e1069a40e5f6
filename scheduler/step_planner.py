"""What the next step computes: decodes first, then prefill chunks in order of service, within the token budget.

A chunk carries the exports of the boundaries inside it and is never cut for them. Where pages are short, the
youngest running requests give way; the oldest never does, so it always finishes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from turnkeep.scheduler.request import Request
from turnkeep.scheduler.step_plan import Replay, SamplingHistory, StepItem

if TYPE_CHECKING:
    from turnkeep.cache.cache_manager import CacheManager

NO_REPLAY = Replay(0, 0)  # of models without state


class StepPlanner:
    """Turns the running requests into the items of one step."""

    def __init__(self, cache: CacheManager, max_step_tokens: int, *, drafts_from_tokens: bool = False) -> None:
        self._cache = cache
        self._max_step_tokens = max_step_tokens
        self._drafts_from_tokens = drafts_from_tokens

    def make_room(self, running: list[Request], suspend: Callable[[Request], None]) -> Request | None:
        """Give each running request pages for its next token, suspending the youngest where there are none. A draft
        for whose accepted tokens there are none is let go.

        `running` is in order of service and `suspend` removes a request from it. Returns the oldest request when not
        even suspending all others gives it a page: admission keeps that from happening.
        """
        index = 0
        while index < len(running):
            request = running[index]
            sequence = request.cache
            assert sequence is not None
            needed = sequence.num_computed_tokens + 1
            draft = request.draft
            if draft is not None:
                wanted = needed + draft.depth
                if wanted > sequence.capacity_tokens and not self._cache.grow(sequence, wanted):
                    request.draft = None
            while needed > sequence.capacity_tokens and not self._cache.grow(sequence, needed):
                if len(running) == 1:
                    return request
                youngest = running[-1]
                suspend(youngest)
                if youngest is request:
                    break
            index += 1
        return None

    def plan_items(self, running: list[Request]) -> tuple[StepItem, ...]:
        """Items for `running` (in order of service), which all have pages for their known tokens.

        Every request that decodes gets its token: in its live row where no request of the step has a draft, else as
        the root of a tree, so that all are verified by replay. What is left of the budget, and one token in any case,
        goes to the requests that have more to compute, oldest first.
        """
        items: list[StepItem] = []
        trees: list[StepItem] = []
        chunks: list[StepItem] = []
        prefills: list[Request] = []
        has_trees = any(request.draft is not None for request in running)
        num_tokens = 0
        for request in running:
            if not request.is_decoding:
                prefills.append(request)
                continue
            exports = () if has_trees else self._page_end(request)
            if exports:
                start = exports[0][0] - 1
                chunks.append(self._chunk_item(request, start, start + 1, exports))
            else:
                (trees if has_trees else items).append(self._decode_item(request, is_tree=has_trees))
            num_tokens += 1 if request.draft is None else 1 + request.draft.num_nodes
        budget = max(self._max_step_tokens - num_tokens, 1)
        for request in prefills:
            if budget <= 0:
                break
            sequence = request.cache
            assert sequence is not None
            start = sequence.num_computed_tokens
            end = min(len(request.token_ids), start + budget)
            exports = self._exports(request, start, end)
            # One token after some context is computed like a decode, except where its state is exported.
            is_decode = end - start == 1 and start > 0 and not exports
            (items if is_decode else chunks).append(self._chunk_item(request, start, end, exports))
            budget -= end - start
        return (*items, *trees, *chunks)

    def _decode_item(self, request: Request, *, is_tree: bool) -> StepItem:
        """The last known token, in the live row or as the root of a tree. There are many of these in a step."""
        sequence, draft, cache = request.cache, request.draft, self._cache
        assert sequence is not None
        num_tokens = 1 if draft is None else 1 + draft.depth
        start = sequence.num_computed_tokens
        replay = None
        if is_tree:
            replay = Replay(*cache.history_room(sequence, num_tokens)) if cache.has_history else NO_REPLAY
        elif cache.has_history:
            cache.fold(sequence)
        return StepItem(
            request.request_id,
            [request.token_ids.last],
            start,
            sequence.table[: cache.pages_for(start + num_tokens)],
            sequence.state_row,
            (),
            request.sampling,
            start + 1 - request.num_prompt_tokens,
            _history(request) if request.needs_history else None,
            replay,
            draft,
            self._context_ids(request, start) if request.is_just_opened else None,
        )

    def _page_end(self, request: Request) -> tuple[tuple[int, int], ...]:
        """The export of the next token's state, if it fills a page where the turn may have to end."""
        sequence = request.cache
        assert sequence is not None
        if not sequence.may_end_early or (sequence.num_computed_tokens + 1) % self._cache.page_size:
            return ()
        position = sequence.num_computed_tokens + 1
        row = self._cache.reserve_export(sequence, position, "page_end")
        return () if row is None else ((position, row),)

    def _exports(self, request: Request, start: int, end: int) -> tuple[tuple[int, int], ...]:
        if not self._cache.has_state:
            return ()
        sequence = request.cache
        assert sequence is not None
        exports: list[tuple[int, int]] = []
        # Ascending: whether a snapshot is worth its row depends on the ones before it.
        wanted = {boundary.position: boundary for boundary in (*sequence.boundaries, *request.boundaries)}
        for position in sorted(wanted):
            if start < position <= end:
                row = self._cache.reserve_export(sequence, position, wanted[position].kind)
                if row is not None:
                    exports.append((position, row))
        return tuple(exports)

    def _chunk_item(self, request: Request, start: int, end: int, exports: tuple[tuple[int, int], ...]) -> StepItem:
        """Known tokens from the live row on, which must then have everything computed."""
        sequence = request.cache
        assert sequence is not None
        if self._cache.has_history:
            self._cache.fold(sequence)
        num_known = len(request.token_ids)
        is_last = end == num_known and not request.is_stopped
        return StepItem(
            request_id=request.request_id,
            token_ids=request.token_ids[start:end],
            start=start,
            page_ids=sequence.page_ids[: self._cache.pages_for(end)],
            state_row=sequence.state_row,
            exports=exports,
            sampling=request.sampling if is_last else None,
            num_output_tokens=num_known - request.num_prompt_tokens,
            history=_history(request) if is_last and request.needs_history else None,
            context_ids=self._context_ids(request, start) if request.is_just_opened else None,
        )

    def _context_ids(self, request: Request, start: int) -> tuple[int, ...] | None:
        return tuple(request.token_ids[:start]) if self._drafts_from_tokens else None


def _history(request: Request) -> SamplingHistory:
    looks_at_prompt = request.sampling.repetition_penalty != 1.0  # a prompt can be long
    return SamplingHistory(
        prompt_ids=request.token_ids[: request.num_prompt_tokens] if looks_at_prompt else [],
        output_ids=request.token_ids[request.num_prompt_tokens :],
    )
