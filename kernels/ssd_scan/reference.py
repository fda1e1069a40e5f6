"""Definition of the Mamba-2 scan (chunked, as matrix products) and of its single-token update, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.chunk_layout import ChunkLayout
from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.ssd_scan.span_inputs import SpanInputs

# Wider chunks cost more exponentials than they save in products between chunks, and an exported state is a product
# over half of a chunk on average.
MAX_WIDTH = 48


def ssd_scan_reference(
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
    """See `turnkeep.kernels.ssd_scan.ssd_scan`."""
    y = torch.empty_like(x)
    if not seq_lens:
        return y
    layout = ChunkLayout.of(seq_lens, min(chunk_size, MAX_WIDTH))
    carried = _initial_states(layout, states, rows, context_lens)
    # A final state is an export at the last token: the same products, hence the same bits as any export there.
    ends = [StateExport(sequence, seq_lens[sequence], row) for sequence, row in enumerate(rows.tolist())]
    for span in layout.spans():
        chunks = SpanInputs.of(span, x, dt, A, B, C)
        bounds = chunks.bound_states(carried, is_last=max(seq_lens) <= span.end)
        carried = bounds[bounds.shape[0] - span.counts[-1] :]
        _write_states(layout, chunks, bounds, states, (*ends, *exports))
        span.from_chunks(chunks.outputs(bounds, D), y)
    return y


def _initial_states(
    layout: ChunkLayout, states: torch.Tensor, rows: torch.Tensor, context_lens: Sequence[int]
) -> torch.Tensor:
    """States before the first token, float32 [R, H, P, N], longest sequence first."""
    initial = torch.zeros((len(layout.order), *states.shape[1:]), dtype=torch.float32, device=states.device)
    # The row of a sequence without context may hold anything and is not read.
    resumed = [rank for rank, sequence in enumerate(layout.order) if context_lens[sequence] > 0]
    if resumed:
        sequences = torch.tensor([layout.order[rank] for rank in resumed], dtype=torch.int64, device=states.device)
        ranks = torch.tensor(resumed, dtype=torch.int64, device=states.device)
        initial[ranks] = states[rows[sequences]].to(torch.float32)
    return initial


def _write_states(
    layout: ChunkLayout,
    chunks: SpanInputs,
    bounds: torch.Tensor,
    states: torch.Tensor,
    wanted: Sequence[StateExport],
) -> None:
    """Write the wanted states that lie in the span of `chunks` to their rows."""
    span = chunks.span
    for sequence, length, row in wanted:
        if not span.first * span.width < length <= span.end:
            continue
        chunk = span.chunk(layout.order.index(sequence), length - 1)
        token = (length - 1) % span.width
        if states.dtype == torch.float32:
            chunks.state_at(chunk, token, bounds, out=states[row])
        else:
            state = torch.empty_like(bounds[0])
            chunks.state_at(chunk, token, bounds, out=state)
            states[row] = state


def ssd_update_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """See `turnkeep.kernels.ssd_scan.ssd_update`."""
    num_sequences, num_heads, head_dim = x.shape
    num_groups, state_dim = B.shape[1:]
    wide_x = x.to(torch.float32)
    wide_dt = dt.to(torch.float32)
    # One request is stepped where it lies; several are gathered and put back.
    in_place = num_sequences == 1 and states.dtype == torch.float32
    state = states[int(rows)][None] if in_place else states.index_select(0, rows).to(torch.float32)
    state.mul_((wide_dt * A).exp_()[..., None, None])
    grouped = state.view(num_sequences, num_groups, -1, state_dim)  # [R, G, Hg * P, N]
    terms = (wide_x * wide_dt[..., None]).view(num_sequences, num_groups, -1, 1)
    grouped.addcmul_(terms, B.to(torch.float32)[:, :, None, :])
    if not in_place:
        states.index_copy_(0, rows, state.to(states.dtype))
    # C is the left operand, as one row: several times faster on CPUs than a batch of matrix-vector products.
    y = C.to(torch.float32)[:, :, None, :] @ grouped.transpose(-1, -2)  # [R, G, 1, Hg * P]
    y = y.view(num_sequences, num_heads, head_dim)
    if D is not None:
        y = torch.addcmul(y, wide_x, D[:, None].to(torch.float32))
    return y.to(x.dtype)
