"""States in 16 bits: what a row holds then, and how packed sequences meet the grid on which such states are rounded.

A rounded state must not tell how its tokens were scheduled. So it is written at multiples of GRID tokens only, counted
from the start of the conversation, from exactly the tokens of one cell in one canonical product. A row at any other
position holds the state at the last grid line and, beside it, the inputs of the tokens since: its tail. Whoever goes
on from the row computes its cell again from the line, so a prompt that is cut anywhere, resumed or decoded token by
token is the same products of the same sizes as one that is computed whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from turnkeep.kernels.chunk_layout import ChunkLayout
from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.rounding_grid import GRID, TAIL_NAMES
from turnkeep.kernels.stochastic_round import stochastic_round


class GridStates(NamedTuple):
    """The rows of one layer. states [S, ...] in 16 bits; tails [S, GRID, ...] each, in the order of TAIL_NAMES."""

    states: torch.Tensor
    tails: tuple[torch.Tensor, ...]
    layer: int  # number of the recurrent layer

    @classmethod
    def of(cls, pools: dict[str, list[torch.Tensor]], part: str, layer: int) -> GridStates | None:
        """The rows of a layer whose states are kept in 16 bits; None where they are not."""
        if f"{part}_{TAIL_NAMES[part][0]}" not in pools:
            return None
        tails = tuple(pools[f"{part}_{name}"][layer] for name in TAIL_NAMES[part])
        return cls(pools[part][layer], tails, layer)


def keeps_tails(pools: dict[str, list[torch.Tensor]]) -> bool:
    """Whether states are kept on the grid."""
    return any(f"{part}_{names[0]}" in pools for part, names in TAIL_NAMES.items())


class _Row(NamedTuple):
    """A row to write: of the sequence at `rank`, `length` of its tokens behind its first grid line."""

    rank: int
    sequence: int
    length: int
    row: int


class GridCells:
    """One packed batch whose sequences are led by their tails, so that all of them begin on a grid line.

    Raises ValueError for lengths, rows or exports that do not fit.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        seq_lens: Sequence[int],
        context_lens: Sequence[int],
        exports: Sequence[StateExport],
    ) -> None:
        if not len(rows) == len(seq_lens) == len(context_lens) or min(seq_lens, default=1) < 1:
            raise ValueError(f"{len(rows)} rows, lengths {list(seq_lens)}, context lengths {list(context_lens)}")
        for export in exports:
            if not 0 <= export.sequence < len(seq_lens) or not 1 <= export.length <= seq_lens[export.sequence]:
                raise ValueError(f"{export} lies outside sequences of lengths {list(seq_lens)}")
        self.rows: list[int] = rows.tolist()
        self._own_lens = list(seq_lens)
        self._tail_lens = [length % GRID for length in context_lens]
        self._lines = [length - tail for length, tail in zip(context_lens, self._tail_lens, strict=True)]
        lengths = [tail + own for tail, own in zip(self._tail_lens, seq_lens, strict=True)]
        # Always of full width: products of other sizes may round otherwise.
        order = sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])
        self.layout = ChunkLayout(GRID, tuple(lengths), tuple(order))
        self._starts = [sum(lengths[:sequence]) for sequence in range(len(lengths))]
        ranks = {sequence: rank for rank, sequence in enumerate(order)}
        self._wanted: defaultdict[int, list[_Row]] = defaultdict(list)
        ends = [StateExport(sequence, length, self.rows[sequence]) for sequence, length in enumerate(seq_lens)]
        for sequence, length, row in (*exports, *ends):  # a live row is written last: it may lie before its line still
            behind = self._tail_lens[sequence] + length
            self._wanted[behind // GRID].append(_Row(ranks[sequence], sequence, behind, row))

    def led(self, packed: torch.Tensor, tail: torch.Tensor | None) -> torch.Tensor:
        """packed [T, ...] with every sequence behind its tail, or behind zeros where none is needed."""
        pieces = []
        for sequence, own in enumerate(torch.split_with_sizes(packed, self._own_lens)):
            if length := self._tail_lens[sequence]:
                lead = own.new_zeros((length, *own.shape[1:])) if tail is None else tail[self.rows[sequence], :length]
                pieces.append(lead)
            pieces.append(own)
        return torch.cat(pieces) if len(pieces) > 1 else packed

    def own(self, led: torch.Tensor) -> torch.Tensor:
        """The part of led [...] that belongs to the packed tokens themselves."""
        parts = torch.split_with_sizes(led, list(self.layout.seq_lens))
        pieces = [part[tail:] for part, tail in zip(parts, self._tail_lens, strict=True)]
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def first_states(self, grid: GridStates) -> torch.Tensor:
        """States at the first grid lines, float32 [R, ...], longest sequence first; zeros where nothing lies before."""
        first = torch.zeros((len(self.rows), *grid.states.shape[1:]), dtype=torch.float32, device=grid.states.device)
        for rank, sequence in enumerate(self.layout.order):
            if self._lines[sequence]:
                first[rank] = grid.states[self.rows[sequence]]
        return first

    def num_full(self, cell: int) -> int:
        """How many sequences, longest first, have all tokens of their cell number `cell`."""
        return sum(length >= (cell + 1) * GRID for length in self.layout.seq_lens)

    def round_states(self, states: torch.Tensor, cell: int, grid: GridStates) -> None:
        """Round, in place, states [n, ...] after cell number `cell`, which is full, of the longest n sequences."""
        positions = [self._lines[sequence] + (cell + 1) * GRID for sequence in self.layout.order[: states.shape[0]]]
        states.copy_(stochastic_round(states, grid.states.dtype, positions, grid.layer))

    def write_rows(self, cell: int, states: torch.Tensor, led_inputs: Sequence[torch.Tensor], grid: GridStates) -> None:
        """Write the rows whose tail begins with cell number `cell`; states [n, ...] are those before it."""
        for rank, sequence, length, row in self._wanted[cell]:
            grid.states[row] = states[rank]
            start, end = self._starts[sequence] + cell * GRID, self._starts[sequence] + length
            for pool, inputs in zip(grid.tails, led_inputs, strict=True):
                pool[row, : end - start] = inputs[start:end]
