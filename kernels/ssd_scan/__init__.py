"""State space recurrence of Mamba-2: a chunked scan over packed sequences and a single-token update.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.grid_cells import GridStates
from turnkeep.kernels.ssd_scan.grid_reference import ssd_grid_scan_reference
from turnkeep.kernels.ssd_scan.reference import ssd_scan_reference, ssd_update_reference

__all__ = ["ssd_grid_scan", "ssd_scan", "ssd_update"]


def ssd_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    chunk_size: int,
    exports: Sequence[StateExport] = (),
) -> torch.Tensor:
    """S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T and y_t = S_t C_t + D x_t, within each packed sequence.

    x [T, H, P]; dt [T, H] after softplus and clamp, >= 0; A [H] < 0; B, C [T, G, N], head h uses group h // (H / G);
    D [H]; states [S, H, P, N] is the pool, rows [R] int64. A sequence with context continues from states[row], one
    without starts from zero whatever its row holds. Written in place: the final state of every sequence to its row,
    and for every export the state after `length` tokens of its sequence, bit for bit what a run that stops there
    with the same chunk width leaves. float32 inside; returns y [T, H, P] in the dtype of x.

    chunk_size bounds the tokens that one matrix product covers; it moves results by rounding only. Raises ValueError
    for shapes, lengths or exports that do not fit.
    """
    num_sequences = rows.shape[0]
    _check("ssd_scan", x, dt, A, B, C, D, states)
    if chunk_size < 1:
        raise ValueError(f"ssd_scan: chunk_size must be positive, not {chunk_size}")
    if len(seq_lens) != num_sequences or len(context_lens) != num_sequences:
        raise ValueError(
            f"ssd_scan: {num_sequences} rows, {len(seq_lens)} lengths, {len(context_lens)} context lengths"
        )
    if sum(seq_lens) != x.shape[0] or min(seq_lens, default=1) < 1:
        raise ValueError(f"ssd_scan: lengths {list(seq_lens)} must be positive and add up to {x.shape[0]} tokens")
    for export in exports:
        if not 0 <= export.sequence < num_sequences or not 1 <= export.length <= seq_lens[export.sequence]:
            raise ValueError(f"ssd_scan: {export} lies outside sequences of lengths {list(seq_lens)}")
    return ssd_scan_reference(x, dt, A, B, C, D, states, rows, seq_lens, context_lens, chunk_size, exports)


def ssd_grid_scan(
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
    """`ssd_scan` over rows in 16 bits, rounded on the grid (see `turnkeep.kernels.grid_cells`); single tokens too.

    The tails of `grid` hold x, dt and B. Outputs and rows are the same bits however a sequence is cut into calls.
    """
    _check("ssd_grid_scan", x, dt, A, B, C, D, grid.states)
    if sum(seq_lens) != x.shape[0]:
        raise ValueError(f"ssd_grid_scan: lengths {list(seq_lens)} must add up to {x.shape[0]} tokens")
    return ssd_grid_scan_reference(x, dt, A, B, C, D, grid, rows, seq_lens, context_lens, exports)


def ssd_update(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """One token for each of R sequences that have context: y [R, H, P]; states[rows] move on by one token, in place.

    Arguments as in `ssd_scan` with T = R. Rows must differ. Raises ValueError for shapes that do not fit.
    """
    _check("ssd_update", x, dt, A, B, C, D, states)
    if rows.shape[0] != x.shape[0]:
        raise ValueError(f"ssd_update: {x.shape[0]} tokens but {rows.shape[0]} rows")
    return ssd_update_reference(x, dt, A, B, C, D, states, rows)


def _check(
    name: str,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    states: torch.Tensor,
) -> None:
    num_tokens, num_heads, _ = x.shape
    if dt.shape != (num_tokens, num_heads) or A.shape != (num_heads,) or (D is not None and D.shape != A.shape):
        raise ValueError(
            f"{name}: dt {tuple(dt.shape)}, A {tuple(A.shape)}, D {None if D is None else tuple(D.shape)} "
            f"do not fit x {tuple(x.shape)}"
        )
    if B.shape != C.shape or B.shape[0] != num_tokens or num_heads % B.shape[1]:
        raise ValueError(f"{name}: B {tuple(B.shape)} and C {tuple(C.shape)} do not fit x {tuple(x.shape)}")
    if states.shape[1:] != (*x.shape[1:], B.shape[2]):
        raise ValueError(f"{name}: states {tuple(states.shape)} do not fit x {tuple(x.shape)}, B {tuple(B.shape)}")
