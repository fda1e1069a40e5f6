"""The target's last hidden states where a draft head wants them: of every token of a step, and of the one before it.

The one before lies in the state row, or in the history while the row is behind, like the window of a convolution. Of
plain steps in a row only the last is written, when something is to read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from turnkeep.kernels.forward_batch import CacheTensors, ForwardBatch
from turnkeep.scheduler.step_plan import StepItem

PART = "draft_hidden"


class HiddenStates:
    """Over the pools of one engine that has a draft head."""

    def __init__(self, tensors: CacheTensors) -> None:
        (self._rows,) = tensors.states[PART]  # [rows, hidden_size, 1]
        (self._history,) = tensors.histories[PART]  # [slots, 1 + capacity, hidden_size]
        self._unwritten: tuple[torch.Tensor, torch.Tensor] | None = None  # rows [R], and what belongs there

    def settle(self) -> None:
        """Before anything reads rows, and before a step that does not move on all of those of the last: write them."""
        if self._unwritten is not None:
            rows, last = self._unwritten
            self._unwritten = None
            self._write(rows, last)

    def previous(self, items: Sequence[StepItem]) -> list[torch.Tensor | None]:
        """[hidden_size] of the token before each item; None at the start of a sequence. To be read before `store`."""
        self.settle()
        found: list[torch.Tensor | None] = []
        for item in items:
            if item.start == 0:
                found.append(None)
            elif item.replay is not None:
                found.append(self._history[item.replay.slot, item.replay.num_tokens])
            else:
                found.append(self._rows[item.state_row, :, 0].clone())
        return found

    def store(self, items: Sequence[StepItem], batch: ForwardBatch, normed: torch.Tensor) -> None:
        """Keep those of the last tokens, and of exported positions: normed [T, hidden_size] of the step. What trees
        accept is added to their histories with their other terms."""
        rows = batch.state_rows
        assert rows is not None
        if batch.num_decodes == len(items) and not batch.exports:
            self._unwritten = (rows, normed)
            return
        self.settle()
        rows, tokens = _last_places(items, batch)
        if len(rows):
            self._write(rows, normed.index_select(0, tokens))
        if batch.trees is not None:
            first = batch.num_decodes
            batch.trees.terms.keep(self._history, normed[first : first + batch.num_tree_nodes])

    def _write(self, rows: torch.Tensor, last: torch.Tensor) -> None:
        self._rows[:, :, 0].index_copy_(0, rows, last.to(self._rows.dtype))

    @staticmethod
    def of_items(
        items: Sequence[StepItem], batch: ForwardBatch, normed: torch.Tensor, accepted: Mapping[str, Sequence[int]]
    ) -> list[torch.Tensor]:
        """[m, hidden_size] for what the step computed of each of its last items: the tokens, and what is accepted of
        the draft."""
        found: list[torch.Tensor] = []
        num_before = len(batch.seq_lens) - len(items)
        start = sum(batch.seq_lens[:num_before])
        for item, length in zip(items, batch.seq_lens[num_before:], strict=True):
            own = normed[start : start + length]
            if item.replay is not None:
                nodes = [0, *(node + 1 for node in accepted.get(item.request_id, ()))]
                own = own[: len(nodes)] if nodes == list(range(len(nodes))) else own[nodes]
            found.append(own)
            start += length
        return found


def _last_places(items: Sequence[StepItem], batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that a step moves on or exports, and which of its tokens is the last before each. Trees move none."""
    rows: list[int] = []
    tokens: list[int] = []
    start = 0
    for item, length in zip(items, batch.seq_lens, strict=True):
        if item.replay is None:
            assert item.state_row is not None
            for position, row in (*item.exports, (item.start + length, item.state_row)):
                rows.append(row)
                tokens.append(start + position - item.start - 1)
        start += length
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(tokens, dtype=torch.int64)
