"""Accepted tokens that a state row does not contain yet: read as terms and windows, added to, folded into rows.

A history tensor has [slots, capacity, ...] for the terms of one layer, or [slots, tail + capacity, C] for the raw
inputs of a convolution, the window before the first token in front. A slot belongs to one running sequence; how many
of its tokens count is known outside, so nothing is ever cleared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

# State parts that are the last inputs of something: [rows, C, tail], oldest first.
WINDOW_PARTS = ("conv", "draft_hidden")


class HistorySpans:
    """The first lens[r] tokens in slot slots[r], for R sequences."""

    def __init__(self, slots: Sequence[int], lens: Sequence[int], capacity: int) -> None:
        if len(slots) != len(lens) or min(lens, default=0) < 0 or max(lens, default=0) > capacity:
            raise ValueError(f"histories of {list(lens)} tokens in slots {list(slots)} of {capacity}")
        self.slots = tuple(slots)
        self.lens = tuple(lens)
        self.capacity = capacity
        self._longest = max(lens, default=0)
        self._index = torch.tensor(self.slots, dtype=torch.int64)
        self._window_places: dict[int, torch.Tensor] = {}
        self._is_behind: torch.Tensor | None = None
        if min(lens, default=0) < self._longest:
            self._is_behind = torch.arange(self._longest) >= torch.tensor(self.lens)[:, None]

    def terms(self, history: torch.Tensor) -> torch.Tensor:
        """[slots, capacity, ...] -> [R, h, ...], h the longest span; zeros behind the end of a shorter one."""
        if len(self.slots) == 1:
            slot = self.slots[0]
            return history[slot : slot + 1, : self._longest]
        found = history[:, : self._longest].index_select(0, self._index)
        if self._is_behind is None:
            return found
        # Filled, not multiplied: what an earlier owner of the slot has left there may be NaN.
        return found.masked_fill_(self._is_behind.view(*self._is_behind.shape, *[1] * (found.dim() - 2)), 0.0)

    def windows(self, history: torch.Tensor) -> torch.Tensor:
        """[slots, tail + capacity, C] -> [R, tail, C]: the last inputs up to the end of each span."""
        length = history.shape[1]
        tail = length - self.capacity
        if len(self.slots) == 1:
            slot, end = self.slots[0], self.lens[0]
            return history[slot : slot + 1, end : end + tail]
        places = self._window_places.get(length)
        if places is None:
            first = self._index * length + torch.tensor(self.lens, dtype=torch.int64)
            places = (first[:, None] + torch.arange(tail)).flatten()
            self._window_places[length] = places
        return history.flatten(0, 1).index_select(0, places).view(len(self.slots), tail, *history.shape[2:])


@dataclass(slots=True, frozen=True)
class HistoryFolds:
    """states[targets[r]] = states[sources[r]] moved on by the tokens of span r; all sources are read first."""

    spans: HistorySpans
    sources: torch.Tensor  # [R] int64
    targets: torch.Tensor  # [R] int64, all different


class TreeTerms:
    """What the nodes of a step's trees will add to pages and histories, kept until it is known which are accepted."""

    def __init__(self) -> None:
        self._kv: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._terms: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep_kv(self, kv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keys and values [N, Hkv, D] of one layer's pages."""
        self._kv.append((kv, keys, values))

    def keep(self, history: torch.Tensor, terms: torch.Tensor) -> None:
        """Terms [N, ...] of one history tensor."""
        self._terms.append((history, terms))

    @property
    def num_bytes(self) -> int:
        """Memory of what is kept."""
        tensors = [t for _, keys, values in self._kv for t in (keys, values)] + [terms for _, terms in self._terms]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def write(
        self,
        nodes: Sequence[int],
        page_slots: Sequence[int],
        history_slots: Sequence[int],
        offsets: Sequence[int],
        capacity: int,
    ) -> None:
        """Add the accepted `nodes`: keys and values to page slots, terms at `offsets` of their history slots.

        All four have one entry a node. The slots are not looked at where there are no histories.
        """
        index = torch.tensor(nodes, dtype=torch.int64)
        # All nodes of the step, as where a single draft was right as a whole: nothing has to be picked.
        is_all = list(nodes) == list(range(self._num_nodes))
        if self._kv:
            slots = torch.tensor(page_slots, dtype=torch.int64)
            for kv, *own in self._kv:
                for pages, entries in zip(kv.flatten(1, 2), own, strict=True):
                    kept = entries if is_all else entries.index_select(0, index)
                    pages.index_copy_(0, slots, kept.to(kv.dtype))
        places: dict[int, torch.Tensor] = {}
        for history, terms in self._terms:
            length = history.shape[1]
            if length not in places:
                lead = length - capacity
                numbers = [slot * length + lead + offset for slot, offset in zip(history_slots, offsets, strict=True)]
                places[length] = torch.tensor(numbers, dtype=torch.int64)
            kept = terms if is_all else terms.index_select(0, index)
            history.flatten(0, 1).index_copy_(0, places[length], kept.to(history.dtype))

    @property
    def _num_nodes(self) -> int:
        found = self._terms[0][1] if self._terms else self._kv[0][1]
        return found.shape[0]


def load_windows(
    states: Mapping[str, Sequence[torch.Tensor]],
    histories: Mapping[str, Sequence[torch.Tensor]],
    rows: torch.Tensor,
    slots: torch.Tensor,
    capacity: int,
) -> None:
    """Begin empty histories: the windows of state rows [R] are put in front of slots [R]."""
    for name in WINDOW_PARTS:
        for windows, history in zip(states.get(name, ()), histories.get(name, ()), strict=True):
            tail = history.shape[1] - capacity
            found = windows.index_select(0, rows).transpose(1, 2)
            history[:, :tail].index_copy_(0, slots, found.to(history.dtype))


def fold_windows(
    states: Mapping[str, Sequence[torch.Tensor]], histories: Mapping[str, Sequence[torch.Tensor]], folds: HistoryFolds
) -> None:
    """The windows at the ends of the spans become those of the target rows."""
    for name in WINDOW_PARTS:
        for windows, history in zip(states.get(name, ()), histories.get(name, ()), strict=True):
            found = folds.spans.windows(history).transpose(1, 2)
            windows.index_copy_(0, folds.targets, found.to(windows.dtype))
