"""Definition of the gated delta scan (chunked, as matrix products) and of its single-token update, in plain PyTorch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from turnkeep.kernels.chunk_layout import ChunkLayout
from turnkeep.kernels.decay import BLOCK
from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.gated_delta_scan.span_deltas import SpanDeltas
from turnkeep.kernels.gated_delta_scan.unit_length import unit_length

# Wider chunks cost more in products within a chunk than they save in reads of the state.
MAX_WIDTH = 32


def gated_delta_scan_reference(
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
    """See `turnkeep.kernels.gated_delta_scan.gated_delta_scan`."""
    outputs = torch.empty_like(v)
    if not seq_lens:
        return outputs
    layout = ChunkLayout.of(seq_lens, max(min(chunk_size, MAX_WIDTH) // BLOCK, 1) * BLOCK)
    wanted = _wanted_states(layout, rows, exports)
    carried = _initial_states(layout, states, rows, context_lens)
    for span in layout.spans():
        deltas = SpanDeltas.of(span, q, k, v, g, beta)
        start = 0
        for index, count in enumerate(span.counts, span.first):
            deltas.solve(start, carried)
            for rank, token, row in wanted[index]:
                first = carried[rank : rank + 1]
                if states.dtype == torch.float32:
                    deltas.states_at(start + rank, token, first, out=states[row : row + 1])
                else:
                    states[row] = deltas.states_at(start + rank, token, first)[0].to(states.dtype)
            going_on = sum(length > (index + 1) * layout.width for length in seq_lens)
            carried = deltas.states_at(start, layout.width - 1, carried[:going_on])
            start += count
        span.from_chunks(deltas.outputs(), outputs)
    return outputs


def _wanted_states(
    layout: ChunkLayout, rows: torch.Tensor, exports: Sequence[StateExport]
) -> defaultdict[int, list[tuple[int, int, int]]]:
    """Chunk index -> (rank, token within the chunk, row) of every final and every exported state."""
    ranks = {sequence: rank for rank, sequence in enumerate(layout.order)}
    ends = [StateExport(sequence, layout.seq_lens[sequence], row) for sequence, row in enumerate(rows.tolist())]
    wanted: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for sequence, length, row in (*ends, *exports):
        index, token = divmod(length - 1, layout.width)
        wanted[index].append((ranks[sequence], token, row))
    return wanted


def _initial_states(
    layout: ChunkLayout, states: torch.Tensor, rows: torch.Tensor, context_lens: Sequence[int]
) -> torch.Tensor:
    """States before the first token, float32 [R, Hv, K, V], longest sequence first."""
    order = torch.tensor(layout.order, dtype=torch.int64, device=states.device)
    initial = states[rows[order]].to(torch.float32)
    # The row of a sequence without context may hold anything.
    fresh = [rank for rank, sequence in enumerate(layout.order) if context_lens[sequence] == 0]
    if fresh:
        initial[torch.tensor(fresh, dtype=torch.int64, device=states.device)] = 0.0
    return initial


def gated_delta_update_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor:
    """See `turnkeep.kernels.gated_delta_scan.gated_delta_update`."""
    num_sequences, num_heads, value_dim = v.shape
    key_dim = k.shape[2]
    # Both read the decayed state in one product; what the token writes reaches its own output as (q . k) u.
    both = unit_length(torch.stack((k, q), dim=2))  # [R, Hk, 2, K]
    products = (both[:, :, 0] * both[:, :, 1]).sum(-1, keepdim=True)  # [R, Hk, 1]
    if num_heads != k.shape[1]:
        both = both.repeat_interleave(num_heads // k.shape[1], dim=1)
        products = products.repeat_interleave(num_heads // k.shape[1], dim=1)
    # One request is stepped where it lies; several are gathered and put back.
    in_place = num_sequences == 1 and states.dtype == torch.float32
    state = states[int(rows)][None] if in_place else states.index_select(0, rows).to(torch.float32)
    state.mul_(g.to(torch.float32).exp()[..., None, None])
    flat = state.view(-1, key_dim, value_dim)
    read = (both.view(-1, 2, key_dim) @ flat).view(num_sequences, num_heads, 2, value_dim)
    deltas = (v - read[:, :, 0]).mul_(beta.to(torch.float32)[..., None])  # [R, Hv, V]
    state.addcmul_(both[:, :, 0, :, None], deltas[:, :, None, :])
    if not in_place:
        states.index_copy_(0, rows, state.to(states.dtype))
    return torch.addcmul(read[:, :, 1], products, deltas).mul_(key_dim**-0.5).to(v.dtype)
