"""A step's items as the tensors a model takes. Index arithmetic is numpy; each tensor is made once from its array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.forward_batch import ForwardBatch, StateExport, TreeBatch
from turnkeep.kernels.replay_history import HistorySpans, TreeTerms
from turnkeep.scheduler.step_plan import StepItem

Int64Array = npt.NDArray[np.int64]


class BatchBuilder:
    """`has_state`: there is a state, so every item carries a state row; history_capacity: tokens of a history slot."""

    def __init__(self, page_size: int, *, has_state: bool, has_pages: bool, history_capacity: int = 0) -> None:
        self._page_size = page_size
        self._history_capacity = history_capacity
        self._has_state = has_state
        self._has_pages = has_pages
        self._single_cu_seqlens = torch.tensor([0, 1], dtype=torch.int64)
        self._single_index = torch.zeros(1, dtype=torch.int64)

    def build(self, items: Sequence[StepItem]) -> ForwardBatch:
        """Pack the items in their order; those with one token and some context come first, trees after them."""
        first = items[0]
        if len(items) == 1 and _is_decode(first):
            return self._single_decode(first)
        if len(items) == 1 and first.replay is not None:
            return self._single_tree(first)
        return self._packed(items)

    def _single_decode(self, item: StepItem) -> ForwardBatch:
        """One request, one token: most of what a single conversation's decode needs is known beforehand."""
        start = item.start
        slot = 0
        if self._has_pages:
            slot = int(item.page_ids[start // self._page_size]) * self._page_size + start % self._page_size
        row = item.state_row if item.state_row is not None else 0
        values = torch.from_numpy(np.array((item.token_ids[0], start, start + 1, slot, row), dtype=np.int64))
        token_ids, positions, kv_lens, slots, rows = torch.split(values, 1)
        pages = item.page_ids if len(item.page_ids) else np.zeros(1, dtype=np.int32)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            seq_lens=(1,),
            context_lens=(start,),
            num_decodes=1,
            cu_seqlens=self._single_cu_seqlens,
            kv_lens=kv_lens,
            page_table=torch.from_numpy(pages.astype(np.int64)[None, :]),
            slot_mapping=slots,
            state_rows=rows if self._has_state else None,
            exports=(),
            logit_indices=self._single_index,
        )

    def _single_tree(self, item: StepItem) -> ForwardBatch:
        """One request, one tree: its few numbers make one array."""
        trees = _trees((item,))
        assert trees is not None
        start, width = item.start, trees.width
        token_ids = item.token_ids if item.draft is None else (*item.token_ids, *item.draft.token_ids)
        row = item.state_row if item.state_row is not None else 0
        positions = [start + depth for depth in trees.depths]
        numbers = (*token_ids, *positions, 0, width, start + width, row, *[0] * width, *range(width))
        values = torch.from_numpy(np.array(numbers, dtype=np.int64))
        sizes = [width, width, 2, 1, 1, width, width]
        tokens, places, bounds, kv_lens, rows, slots, indices = torch.split(values, sizes)
        pages = item.page_ids if len(item.page_ids) else np.zeros(1, dtype=np.int32)
        return ForwardBatch(
            token_ids=tokens,
            positions=places,
            seq_lens=(width,),
            context_lens=(start,),
            num_decodes=0,
            cu_seqlens=bounds,
            kv_lens=kv_lens,
            page_table=torch.from_numpy(pages.astype(np.int64)[None, :]),
            slot_mapping=slots,
            state_rows=rows if self._has_state else None,
            exports=(),
            logit_indices=indices,
            trees=TreeBatch(trees, self._history((item,)), TreeTerms()),
        )

    def _packed(self, items: Sequence[StepItem]) -> ForwardBatch:
        num_items = len(items)
        trees = _trees(items)
        tokens = [item.token_ids if item.draft is None else [*item.token_ids, *item.draft.token_ids] for item in items]
        lengths = np.fromiter((len(own) for own in tokens), dtype=np.int64, count=num_items)
        starts = np.fromiter((item.start for item in items), dtype=np.int64, count=num_items)
        ends = np.zeros(num_items + 1, dtype=np.int64)
        np.cumsum(lengths, out=ends[1:])
        token_ids = np.fromiter((token for own in tokens for token in own), dtype=np.int64, count=int(ends[-1]))
        owners = np.repeat(np.arange(num_items), lengths)  # [T]
        positions = np.arange(int(ends[-1]), dtype=np.int64) - ends[owners] + starts[owners]
        num_decodes = _num_decodes(items)
        nodes = slice(num_decodes, num_decodes + (len(trees.parents) if trees is not None else 0))
        if trees is not None:
            positions[nodes] = starts[owners[nodes]] + trees.depths
        page_table = self._page_table(items)
        slots = np.zeros(int(ends[-1]), dtype=np.int64)
        if self._has_pages:
            slots = page_table[owners, positions // self._page_size] * self._page_size + positions % self._page_size
            slots[nodes] = 0
        wanted = np.flatnonzero([item.sampling is not None for item in items])
        last = ends[wanted + 1] - 1
        num_others = num_decodes + (trees.num_trees if trees is not None else 0)
        logit_indices = np.concatenate(
            (last[wanted < num_decodes], np.arange(nodes.start, nodes.stop), last[wanted >= num_others])
        )
        rows = None
        if self._has_state:
            rows = torch.tensor([item.state_row for item in items], dtype=torch.int64)
        return ForwardBatch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            seq_lens=tuple(lengths.tolist()),
            context_lens=tuple(starts.tolist()),
            num_decodes=num_decodes,
            cu_seqlens=torch.from_numpy(ends),
            kv_lens=torch.from_numpy(starts + lengths),
            page_table=torch.from_numpy(page_table),
            slot_mapping=torch.from_numpy(slots),
            state_rows=rows,
            exports=tuple(
                StateExport(index, position - item.start, row)
                for index, item in enumerate(items)
                for position, row in item.exports
            ),
            logit_indices=torch.from_numpy(logit_indices),
            trees=None if trees is None else TreeBatch(trees, self._history(items), TreeTerms()),
        )

    def _history(self, items: Sequence[StepItem]) -> HistorySpans | None:
        if not self._has_state:
            return None
        replays = [item.replay for item in items if item.replay is not None]
        slots, lens = [replay.slot for replay in replays], [replay.num_tokens for replay in replays]
        return HistorySpans(slots, lens, self._history_capacity)

    def _page_table(self, items: Sequence[StepItem]) -> Int64Array:
        width = max(1, max(len(item.page_ids) for item in items))
        table = np.zeros((len(items), width), dtype=np.int64)
        for index, item in enumerate(items):
            table[index, : len(item.page_ids)] = item.page_ids
        return table


def _is_decode(item: StepItem) -> bool:
    return len(item.token_ids) == 1 and item.start > 0 and not item.exports and item.replay is None


def _num_decodes(items: Sequence[StepItem]) -> int:
    count = 0
    for item in items:
        if not _is_decode(item):
            break
        count += 1
    return count


def _trees(items: Sequence[StepItem]) -> DraftTrees | None:
    """The trees of a step, each an item's token with its draft below it."""
    num_nodes: list[int] = []
    parents: list[int] = []
    for item in items:
        if item.replay is not None:
            own = item.draft.parents if item.draft is not None else ()
            num_nodes.append(1 + len(own))
            parents.append(-1)
            parents += [parent + 1 for parent in own]
    return DraftTrees(num_nodes, parents) if num_nodes else None
