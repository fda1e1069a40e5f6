"""Drafts of a draft head: it takes over what the target computed, and grows the next trees.

Owns neither weights nor pages: the head's entries lie in the engine's, as `drafter.py` says. Where nothing is drafted
the entries of single tokens are put off (plain_run.py): `settle` makes them before anything else looks at pages, a
request that was not in the last step among it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from turnkeep.engine.speculation.child_choice import ChildChoice
from turnkeep.engine.speculation.drafter import DraftRequest
from turnkeep.engine.speculation.plain_run import Pending, PlainRun
from turnkeep.engine.speculation.tree_growth import TreeGrowth
from turnkeep.models.decoder import Decoder
from turnkeep.models.draft_heads.draft_head import DraftAttention, DraftHead
from turnkeep.models.draft_heads.growing_entries import GrowingEntries
from turnkeep.models.draft_heads.paged_entries import FIRST_ENTRY, PagedEntries
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import StepItem

# Computed tokens are taken over in the first pass of a growth, where all requests are padded to the longest of them;
# longer runs (prompts) have a pass of their own before.
MAX_PENDING = 16
MAX_PUT_OFF = 64  # single tokens of a request: a pass costs little more for many than for one

Int64Array = npt.NDArray[np.int64]


class HeadDrafter:
    """Trees of one model's draft head."""

    needs_hidden = True

    def __init__(
        self,
        decoder: Decoder,
        head: DraftHead,
        kv: Sequence[torch.Tensor],
        page_size: int,
        num_threads: int | None = None,
    ) -> None:
        """kv: the pools of the head's attention layers, behind those of the model; num_threads: compute threads of
        growth, whose products are as small as those of decode steps; None: as many as torch has then."""
        self._decoder = decoder
        self._num_threads = num_threads
        self._head = head
        self._kv = kv
        self._page_size = page_size
        self._run: PlainRun | None = None  # what is put off
        self._ends: dict[str, tuple[int, torch.Tensor]] = {}  # of requests that may go on with one, as in PlainRun.ends
        self._of_step: list[str] = []  # requests of the last step

    def settle(self, going_on: Sequence[StepItem] | None = None) -> bool:
        """See `Drafter.settle`."""
        if going_on is None:
            self._end_run()
            return False
        request_ids = [item.request_id for item in going_on]
        is_same, self._of_step = request_ids == self._of_step, request_ids
        if is_same and self._run is not None and self._run.goes_on_in(going_on, self._page_size):
            return True
        self._end_run()
        self._ends = {name: self._ends[name] for name in request_ids if name in self._ends}
        return False

    def put_off(self, items: Sequence[StepItem], normed: torch.Tensor) -> bool:
        """See `Drafter.put_off`."""
        run = self._run
        if run is not None and run.num_requests == len(items):
            run.add(items, normed)
            if len(run) >= MAX_PUT_OFF:
                self._end_run()
            return True
        self._end_run()
        before: list[torch.Tensor] = []
        for item in items:
            num_tokens, hidden = self._ends.get(item.request_id, (0, normed))
            if num_tokens != item.start:
                return False
            before.append(hidden)
        self._run = PlainRun(torch.cat(before), items, normed)
        return True

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._take_over(run.pending())
            self._ends |= run.ends()

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest], grant: TreeGrant) -> list[DraftTree | None]:
        """See `Drafter.propose`."""
        if self._run is not None and any(request.request_id in self._run for request in requests):
            self._end_run()
        may_grow = min(grant.num_nodes, grant.max_nodes_per_request, grant.max_depth, grant.max_children) > 0
        staying: list[Pending] = []
        growing: list[int] = []
        pending: list[Pending] = []
        for index, request in enumerate(requests):
            own = self._pending(request)
            grows = may_grow and request.next_token is not None
            if not grows or len(own.token_ids) > MAX_PENDING:
                staying.append(own)
                own = Pending([], own.end, [], own.page_ids)
            if grows:
                self._ends.pop(request.request_id, None)
                growing.append(index)
                pending.append(own)
            elif request.next_token is not None:
                # What follows may be put off.
                assert request.hidden is not None
                self._ends[request.request_id] = (own.end, request.hidden[-1:].clone())
        self._take_over(staying)
        trees: list[DraftTree | None] = [None] * len(requests)
        if growing:
            if self._num_threads is not None and self._num_threads != torch.get_num_threads():
                torch.set_num_threads(self._num_threads)  # the next step chooses its own
            grown = self._grow([requests[index] for index in growing], pending, grant)
            for index, tree in zip(growing, grown, strict=True):
                trees[index] = tree
        return trees

    def _pending(self, request: DraftRequest) -> Pending:
        """What a step computed of a request, as pairs; the first token of a sequence has none."""
        hidden, previous = request.hidden, request.previous_hidden
        if hidden is None:
            raise ValueError(f"request {request.request_id}: a draft head needs the hidden states of the step")
        if request.start < FIRST_ENTRY:
            return Pending(list(request.token_ids[1:]), FIRST_ENTRY, [hidden[:-1]], request.page_ids)
        if previous is None:
            raise ValueError(f"request {request.request_id}: a draft head needs the hidden state before the step")
        before = [previous[None].to(hidden.dtype), hidden[:-1]]
        return Pending(list(request.token_ids), request.start, before, request.page_ids)

    @torch.inference_mode()
    def _take_over(self, pending: list[Pending]) -> None:
        """Put the entries of computed tokens into their pages."""
        pending = [own for own in pending if own.token_ids]
        if not pending:
            return
        pending = sorted(pending, key=lambda own: len(own.token_ids) != 1)  # single ones first
        seq_lens = [len(own.token_ids) for own in pending]
        positions = np.concatenate([np.arange(own.start, own.end) for own in pending])
        table = _page_table([own.page_ids for own in pending])
        attention = PagedEntries(
            kv=self._kv,
            page_table=torch.from_numpy(table),
            seq_lens=seq_lens,
            context_lens=[own.start for own in pending],
            num_decodes=seq_lens.count(1),
            slot_mapping=torch.from_numpy(self._slots(table, np.repeat(np.arange(len(pending)), seq_lens), positions)),
        )
        token_ids = np.array([token for own in pending for token in own.token_ids], dtype=np.int64)
        hidden = torch.cat([piece for own in pending for piece in own.hidden])
        self._head.take_over(*self._inputs(token_ids, hidden, positions), attention)

    def _grow(self, requests: list[DraftRequest], pending: list[Pending], grant: TreeGrant) -> list[DraftTree | None]:
        width = max(len(own.token_ids) for own in pending) + 1
        table = _page_table([own.page_ids for own in pending])
        roots = np.array([own.end for own in pending], dtype=np.int64)
        frontier_width = min(grant.max_children, grant.max_nodes_per_request)
        entries = GrowingEntries(
            self._kv,
            torch.from_numpy(table),
            [own.start for own in pending],
            width + (grant.max_depth - 1) * frontier_width,
            self._head.dtype,
        )
        hidden = self._root_pass(requests, pending, table, entries, width)
        choice = ChildChoice([_sampling(request) for request in requests], roots, grant)
        growth = TreeGrowth(len(requests), grant, ends=[_ends(request) for request in requests])
        for depth in range(1, grant.max_depth + 1):
            logits = self._decoder.logits(hidden.to(self._decoder.dtype))
            logits = logits.view(len(requests), -1, self._decoder.config.vocab_size)
            growth.add(*choice.children(logits, depth))
            frontier = growth.frontier() if depth < grant.max_depth else None
            if frontier is None:
                break
            parents = frontier.rows + np.arange(len(requests))[:, None] * logits.shape[1]
            parents_index = torch.from_numpy(parents.ravel())
            entries.descend(parents_index, parents.shape[1])
            positions = np.repeat(roots + depth, parents.shape[1])
            before = hidden.index_select(0, parents_index)
            hidden = self._pass(frontier.token_ids.ravel(), before, positions, entries)
            entries.end()
        return growth.trees()

    def _root_pass(
        self,
        requests: list[DraftRequest],
        pending: list[Pending],
        table: Int64Array,
        entries: GrowingEntries,
        width: int,
    ) -> torch.Tensor:
        """The pending tokens and the root of every request, padded at the end: hidden states [R, hidden_size] after
        the roots."""
        num_requests = len(requests)
        token_ids = np.zeros((num_requests, width), dtype=np.int64)
        lens = np.array([len(own.token_ids) for own in pending])
        rows: list[torch.Tensor] = []
        for own, request, row in zip(pending, requests, token_ids, strict=True):
            assert request.hidden is not None
            assert request.next_token is not None
            row[: len(own.token_ids)] = own.token_ids
            row[len(own.token_ids)] = request.next_token
            known = torch.cat((*own.hidden, request.hidden[-1:]))
            rows.append(known if len(known) == width else functional.pad(known, (0, 0, 0, width - len(known))))
        starts = np.array([own.start for own in pending])
        positions = starts[:, None] + np.arange(width)
        owners, offsets = np.nonzero(np.arange(width) < lens[:, None])  # of what stays
        staying = None
        if len(owners):
            slots = self._slots(table, owners, starts[owners] + offsets)
            staying = (torch.from_numpy(owners * width + offsets), torch.from_numpy(slots))
        entries.begin(width, staying)
        hidden = self._pass(token_ids.ravel(), torch.cat(rows), positions.ravel(), entries)
        root_rows = torch.from_numpy(np.arange(num_requests) * width + lens)
        entries.end(root_rows)
        return hidden.index_select(0, root_rows)

    def _pass(
        self, token_ids: Int64Array, hidden: torch.Tensor, positions: Int64Array, attention: DraftAttention
    ) -> torch.Tensor:
        after: torch.Tensor = self._head(*self._inputs(token_ids, hidden, positions), attention)
        return after

    def _inputs(
        self, token_ids: Int64Array, hidden: torch.Tensor, positions: Int64Array
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        embedded, dtype = self._decoder.embed(torch.from_numpy(token_ids)), self._head.dtype
        return embedded.to(dtype), hidden.to(dtype), torch.from_numpy(positions)

    def _slots(self, table: Int64Array, owners: Int64Array, positions: Int64Array) -> Int64Array:
        slots: Int64Array = table[owners, positions // self._page_size] * self._page_size + positions % self._page_size
        return slots


def _sampling(request: DraftRequest) -> SamplingParams:
    assert request.sampling is not None
    return request.sampling


def _ends(request: DraftRequest) -> tuple[int, ...]:
    """Tokens that end the request, so that nothing is drafted after them."""
    sampling = _sampling(request)
    return () if sampling.ignore_eos else sampling.stop_token_ids


def _page_table(page_ids: Sequence[npt.NDArray[np.int32]]) -> Int64Array:
    table = np.zeros((len(page_ids), max(1, *(len(own) for own in page_ids))), dtype=np.int64)
    for row, own in zip(table, page_ids, strict=True):
        row[: len(own)] = own
    return table
