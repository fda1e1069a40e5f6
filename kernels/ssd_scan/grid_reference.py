"""Definition of the Mamba-2 scan over rows whose states are rounded on the grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.grid_cells import GridCells, GridStates
from turnkeep.kernels.ssd_scan.span_inputs import SpanInputs


def ssd_grid_scan_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    grid: GridStates,
    rows: torch.Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    exports: Sequence[StateExport] = (),
) -> torch.Tensor:
    """See `turnkeep.kernels.ssd_scan.ssd_grid_scan`."""
    if not seq_lens:
        return torch.empty_like(x)
    cells = GridCells(rows, seq_lens, context_lens, exports)
    led = tuple(cells.led(own, tail) for own, tail in zip((x, dt, B), grid.tails, strict=True))
    led_x, led_dt, led_B = led
    reads = cells.led(C, None)  # nobody asks for the outputs of a tail again
    y = torch.empty_like(led_x)
    carried = cells.first_states(grid)
    cells.write_rows(0, carried, led, grid)
    for span in cells.layout.spans():
        chunks = SpanInputs.of(span, led_x, led_dt, A, led_B, reads)

        def finish(index: int, states: torch.Tensor, first: int = span.first) -> None:
            full = states[: cells.num_full(first + index)]
            cells.round_states(full, first + index, grid)
            cells.write_rows(first + index + 1, full, led, grid)

        bounds = chunks.bound_states(carried, is_last=False, finish=finish)
        carried = bounds[bounds.shape[0] - span.counts[-1] :]
        span.from_chunks(chunks.outputs(bounds, D), y)
    return cells.own(y)
