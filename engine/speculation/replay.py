"""The replay of accepted tokens around a forward pass: folds before it, windows of new histories, what was accepted
after it.

Moves terms between histories, rows and pages as a plan says; knows neither how tokens are chosen nor who drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from turnkeep.cache.copies import HistoryFold
from turnkeep.kernels.forward_batch import CacheTensors, ForwardBatch
from turnkeep.kernels.replay_history import HistoryFolds, HistorySpans, load_windows
from turnkeep.scheduler.step_plan import StepItem


class FoldingModel(Protocol):
    """What replay needs of a model."""

    def fold(self, folds: HistoryFolds, cache: CacheTensors) -> None:
        """Move state rows on by accepted tokens, in every layer."""


class Replay:
    """Over the pools of one engine; capacity: tokens of a history slot."""

    def __init__(self, model: FoldingModel, tensors: CacheTensors, page_size: int, capacity: int) -> None:
        self._model = model
        self._tensors = tensors
        self._page_size = page_size
        self._capacity = capacity

    def fold(self, folds: Sequence[HistoryFold]) -> None:
        """Carry out a plan's folds, before anything else reads a row."""
        if folds:
            spans = HistorySpans([fold.slot for fold in folds], [fold.num_tokens for fold in folds], self._capacity)
            sources = torch.tensor([fold.source for fold in folds], dtype=torch.int64)
            targets = torch.tensor([fold.target for fold in folds], dtype=torch.int64)
            self._model.fold(HistoryFolds(spans, sources, targets), self._tensors)

    def begin(self, items: Sequence[StepItem]) -> None:
        """Put the windows of live rows in front of histories that are empty."""
        if self._capacity:
            empty = [item for item in items if item.replay is not None and item.replay.num_tokens == 0]
            if empty:
                rows = torch.tensor([item.state_row for item in empty], dtype=torch.int64)
                slots = torch.tensor([item.replay.slot for item in empty if item.replay], dtype=torch.int64)
                load_windows(self._tensors.states, self._tensors.histories, rows, slots, self._capacity)

    def accept(self, items: Sequence[StepItem], batch: ForwardBatch, accepted: Mapping[str, Sequence[int]]) -> None:
        """Add what was accepted to histories and pages: the root and the accepted nodes of its draft. A request that
        is not in `accepted` gave no token and adds nothing."""
        if batch.trees is None:
            return
        page_size = self._page_size
        nodes: list[int] = []
        page_slots: list[int] = []
        slots: list[int] = []
        offsets: list[int] = []
        trees = [item for item in items if item.replay is not None]
        for item, first in zip(trees, batch.trees.trees.starts, strict=True):
            own = accepted.get(item.request_id)
            replay = item.replay
            if own is None or replay is None:
                continue
            for offset, node in enumerate((0, *(node + 1 for node in own))):
                nodes.append(first + node)
                slots.append(replay.slot)
                offsets.append(replay.num_tokens + offset)
                if len(item.page_ids):
                    page, place = divmod(item.start + offset, page_size)
                    page_slots.append(int(item.page_ids[page]) * page_size + place)
        if nodes:
            batch.trees.terms.write(nodes, page_slots, slots, offsets, self._capacity)
