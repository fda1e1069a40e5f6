"""Definition of the gated delta scan over rows whose states are rounded on the grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.gated_delta_scan.span_deltas import SpanDeltas
from turnkeep.kernels.grid_cells import GridCells, GridStates
from turnkeep.kernels.rounding_grid import GRID


def gated_delta_grid_scan_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    grid: GridStates,
    rows: torch.Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    exports: Sequence[StateExport] = (),
) -> torch.Tensor:
    """See `turnkeep.kernels.gated_delta_scan.gated_delta_grid_scan`."""
    if not seq_lens:
        return torch.empty_like(v)
    cells = GridCells(rows, seq_lens, context_lens, exports)
    led = tuple(cells.led(own, tail) for own, tail in zip((k, v, g, beta), grid.tails, strict=True))
    reads = cells.led(q, None)  # nobody asks for the outputs of a tail again
    outputs = torch.empty_like(led[1])
    carried = cells.first_states(grid)
    cells.write_rows(0, carried, led, grid)
    for span in cells.layout.spans():
        # What a cell's tokens write is solved anew whenever it is gone on with: always the same system.
        deltas = SpanDeltas.of(span, reads, *led)
        start = 0
        for cell, count in enumerate(span.counts, span.first):
            deltas.solve(start, carried)
            carried = deltas.states_at(start, GRID - 1, carried[: cells.num_full(cell)])
            cells.round_states(carried, cell, grid)
            cells.write_rows(cell + 1, carried, led, grid)
            going_on = sum(length > (cell + 1) * GRID for length in cells.layout.seq_lens)
            carried = carried[:going_on]
            start += count
        span.from_chunks(deltas.outputs(), outputs)
    return cells.own(outputs)
