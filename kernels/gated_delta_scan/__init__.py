"""State recurrence of the gated delta net: a chunked scan over packed sequences and a single-token update.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.gated_delta_scan.grid_reference import gated_delta_grid_scan_reference
from turnkeep.kernels.gated_delta_scan.reference import gated_delta_scan_reference, gated_delta_update_reference
from turnkeep.kernels.grid_cells import GridStates

__all__ = ["gated_delta_grid_scan", "gated_delta_scan", "gated_delta_update"]


def gated_delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    chunk_size: int,
    exports: Sequence[StateExport] = (),
) -> torch.Tensor:
    """The gated delta rule within each packed sequence. With k and q brought to unit length and q times K^-1/2:

        S~ = exp(g_t) S_{t-1};  u_t = beta_t (v_t - S~^T k_t);  S_t = S~ + k_t u_t^T;  o_t = S_t^T q_t

    q, k [T, Hk, K] as the convolution leaves them: normalising, x / sqrt(sum x^2 + 1e-6), happens here. v [T, Hv, V],
    value head h uses key head h // (Hv / Hk); g [T, Hv] <= 0; beta [T, Hv] in [0, 2]. states [S, Hv, K, V] is the
    pool, rows [R] int64. A sequence with context continues from states[row], one without starts from zero whatever
    its row holds. Written in place: the final state of every sequence to its row, and for every export the state after
    `length` tokens of its sequence, bit for bit what a run that stops there with the same chunk width leaves. float32
    inside; returns o [T, Hv, V] in the dtype of v.

    chunk_size bounds the tokens that one matrix product covers (16 at least); it moves results by rounding only.
    Raises ValueError for shapes, lengths or exports that do not fit.
    """
    num_sequences = rows.shape[0]
    _check("gated_delta_scan", q, k, v, g, beta, states)
    if chunk_size < 1:
        raise ValueError(f"gated_delta_scan: chunk_size must be positive, not {chunk_size}")
    if len(seq_lens) != num_sequences or len(context_lens) != num_sequences:
        raise ValueError(
            f"gated_delta_scan: {num_sequences} rows, {len(seq_lens)} lengths, {len(context_lens)} context lengths"
        )
    if sum(seq_lens) != v.shape[0] or min(seq_lens, default=1) < 1:
        raise ValueError(f"gated_delta_scan: lengths {list(seq_lens)} must be positive, {v.shape[0]} tokens in all")
    for export in exports:
        if not 0 <= export.sequence < num_sequences or not 1 <= export.length <= seq_lens[export.sequence]:
            raise ValueError(f"gated_delta_scan: {export} lies outside sequences of lengths {list(seq_lens)}")
    return gated_delta_scan_reference(q, k, v, g, beta, states, rows, seq_lens, context_lens, chunk_size, exports)


def gated_delta_grid_scan(
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
    """`gated_delta_scan` over rows in 16 bits, rounded on the grid (see `turnkeep.kernels.grid_cells`); single tokens
    too.

    The tails of `grid` hold k, v, g and beta. Outputs and rows are the same bits however a sequence is cut into calls.
    """
    _check("gated_delta_grid_scan", q, k, v, g, beta, grid.states)
    if sum(seq_lens) != v.shape[0]:
        raise ValueError(f"gated_delta_grid_scan: lengths {list(seq_lens)} must add up to {v.shape[0]} tokens")
    return gated_delta_grid_scan_reference(q, k, v, g, beta, grid, rows, seq_lens, context_lens, exports)


def gated_delta_update(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """One token for each of R sequences that have context: o [R, Hv, V]; states[rows] move on by one token, in place.

    Arguments as in `gated_delta_scan` with T = R. Rows must differ. Raises ValueError for shapes that do not fit.
    """
    _check("gated_delta_update", q, k, v, g, beta, states)
    if rows.shape[0] != v.shape[0]:
        raise ValueError(f"gated_delta_update: {v.shape[0]} tokens but {rows.shape[0]} rows")
    return gated_delta_update_reference(q, k, v, g, beta, states, rows)


def _check(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
) -> None:
    if q.shape != k.shape or k.shape[0] != v.shape[0] or v.shape[1] % k.shape[1]:
        raise ValueError(f"{name}: q {tuple(q.shape)}, k {tuple(k.shape)} do not fit v {tuple(v.shape)}")
    if g.shape != v.shape[:2] or beta.shape != v.shape[:2]:
        raise ValueError(f"{name}: g {tuple(g.shape)}, beta {tuple(beta.shape)} do not fit v {tuple(v.shape)}")
    if states.shape[1:] != (v.shape[1], k.shape[2], v.shape[2]):
        raise ValueError(
            f"{name}: states {tuple(states.shape)} do not fit k {tuple(k.shape)} and v {tuple(v.shape)} (key-major)"
        )
