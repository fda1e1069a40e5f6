"""Definition of the Mamba-2 scan (chunked, as matrix products) and of its single-token update, in plain PyTorch.

Letters: T tokens, R sequences, Q tokens of a chunk, c chunks of all sequences together, H heads, G groups of Hg = H / G
heads, P head dimension, N state dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.ssd_scan.chunk_layout import ChunkLayout
from turnkeep.kernels.ssd_scan.decay import segment_sums

# exp() of anything below is zero in float32; the bound keeps sums of log decays finite.
MIN_LOG_DECAY = -104.0


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
    if not seq_lens:
        return torch.zeros_like(x)
    num_groups = B.shape[1]
    layout = ChunkLayout.of(seq_lens, chunk_size)
    slots = _token_slots(layout, x.device)
    wide_x = x.to(torch.float32)
    wide_dt = dt.to(torch.float32)
    # Padding tokens are zero in every chunked tensor: decay 1, no term.
    log_decay = _to_chunks((wide_dt * A).clamp_(min=MIN_LOG_DECAY), layout, slots).transpose(1, 2).contiguous()
    terms = _to_chunks(wide_x * wide_dt[..., None], layout, slots)  # dt x: [c, Q, H, P]
    terms = terms.unflatten(2, (num_groups, -1)).permute(0, 2, 3, 4, 1)  # [c, G, Hg, P, Q]
    chunk_B = _to_chunks(B.to(torch.float32), layout, slots).transpose(1, 2)  # [c, G, Q, N]
    chunk_C = _to_chunks(C.to(torch.float32), layout, slots).transpose(1, 2)
    decay = segment_sums(log_decay).exp_()  # [c, H, Q (i), Q (j)], zero for j > i
    prefix = log_decay.cumsum(-1).exp_()  # [c, H, Q]: from the chunk's start up to and with i

    bounds = _start_bounds(layout, states, rows, context_lens)
    _add_terms(bounds[len(seq_lens) :], terms, decay[:, :, -1], chunk_B)
    _carry(layout, bounds, prefix[:, :, -1])
    starts = bounds.index_select(0, _start_index(layout, x.device))  # [c, H, P, N]
    _write_final(layout, bounds, states, rows)
    if exports:
        _write_exports(layout, starts, terms, decay, prefix, chunk_B, states, exports)

    scores = chunk_C @ chunk_B.transpose(-1, -2)  # [c, G, Q, Q], once for the heads of a group
    weights = decay.unflatten(1, (num_groups, -1)).mul_(scores[:, :, None])  # [c, G, Hg, Q, Q]
    inner = weights @ terms.transpose(-1, -2)  # [c, G, Hg, Q, P]
    outer = chunk_C @ starts.unflatten(1, (num_groups, -1)).flatten(2, 3).transpose(-1, -2)  # [c, G, Q, Hg * P]
    outer = outer.unflatten(3, (-1, x.shape[2])).transpose(2, 3)  # [c, G, Hg, Q, P]
    y = torch.addcmul(inner, outer, prefix.unflatten(1, (num_groups, -1))[..., None])
    y = _from_chunks(y.flatten(1, 2).transpose(1, 2), slots, x.shape[0])  # [T, H, P]
    if D is not None:
        y = torch.addcmul(y, wide_x, D[:, None].to(torch.float32))
    return y.to(x.dtype)


def _token_slots(layout: ChunkLayout, device: torch.device) -> torch.Tensor | None:
    """Slot of every packed token among all chunks' tokens, [T]; None where that is simply 0, 1, 2, ..."""
    if len(layout.seq_lens) == 1:
        return None
    shifts, counts = zip(*layout.shifts(), strict=True)
    repeats = torch.tensor(counts, dtype=torch.int64, device=device)
    slots = torch.tensor(shifts, dtype=torch.int64, device=device).repeat_interleave(repeats)
    return slots + torch.arange(slots.shape[0], device=device)


def _to_chunks(packed: torch.Tensor, layout: ChunkLayout, slots: torch.Tensor | None) -> torch.Tensor:
    """[T, ...] -> [c, Q, ...], padding with zeros."""
    size = layout.num_chunks * layout.width
    if slots is None and size == packed.shape[0]:
        chunks = packed
    else:
        chunks = packed.new_zeros((size, *packed.shape[1:]))
        if slots is None:
            chunks[: packed.shape[0]] = packed
        else:
            chunks.index_copy_(0, slots, packed)
    return chunks.unflatten(0, (-1, layout.width))


def _from_chunks(chunks: torch.Tensor, slots: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    """[c, Q, ...] -> [T, ...], without the padding."""
    flat = chunks.flatten(0, 1)
    return flat[:num_tokens] if slots is None else flat.index_select(0, slots)


def _start_bounds(
    layout: ChunkLayout, states: torch.Tensor, rows: torch.Tensor, context_lens: Sequence[int]
) -> torch.Tensor:
    """Room for all states at chunk bounds, [R + c, H, P, N]; the first R are the initial states, longest first."""
    num_sequences = len(layout.seq_lens)
    bounds = torch.empty(
        (num_sequences + layout.num_chunks, *states.shape[1:]), dtype=torch.float32, device=states.device
    )
    initial = bounds[:num_sequences].zero_()
    # The row of a sequence without context may hold anything and is not read.
    resumed = [rank for rank, sequence in enumerate(layout.order) if context_lens[sequence] > 0]
    if resumed:
        sequences = torch.tensor([layout.order[rank] for rank in resumed], dtype=torch.int64, device=states.device)
        ranks = torch.tensor(resumed, dtype=torch.int64, device=states.device)
        initial.index_copy_(0, ranks, states.index_select(0, rows[sequences]).to(torch.float32))
    return bounds


def _add_terms(out: torch.Tensor, terms: torch.Tensor, weights: torch.Tensor, B: torch.Tensor) -> None:
    """out[c, H, P, N] = sum over j of weights[c, H, j] terms[c, G, Hg, P, j] B[c, G, j, N]."""
    num_groups = B.shape[1]
    weighted = terms * weights.unflatten(1, (num_groups, -1))[..., None, :]  # [c, G, Hg, P, Q]
    torch.matmul(weighted.flatten(2, 3), B, out=out.unflatten(1, (num_groups, -1)).flatten(2, 3))


def _carry(layout: ChunkLayout, bounds: torch.Tensor, chunk_decay: torch.Tensor) -> None:
    """Turn what each chunk adds (bounds[R:]) into the state at its end, chunk index by chunk index, in place."""
    previous = 0
    start = len(layout.seq_lens)
    for offset, count in zip(layout.offsets, layout.counts, strict=True):
        decay = chunk_decay[offset : offset + count, :, None, None]
        bounds[start : start + count].addcmul_(bounds[previous : previous + count], decay)
        previous, start = start, start + count


def _start_index(layout: ChunkLayout, device: torch.device) -> torch.Tensor:
    """For every chunk, the row of `bounds` that holds the state at its start."""
    firsts = (0, *(len(layout.seq_lens) + offset for offset in layout.offsets))
    index = [first + rank for first, count in zip(firsts, layout.counts, strict=False) for rank in range(count)]
    return torch.tensor(index, dtype=torch.int64, device=device)


def _write_final(layout: ChunkLayout, bounds: torch.Tensor, states: torch.Tensor, rows: torch.Tensor) -> None:
    ends = [0] * len(layout.seq_lens)
    for rank, sequence in enumerate(layout.order):
        ends[sequence] = len(ends) + layout.chunk(rank, layout.seq_lens[sequence])
    index = torch.tensor(ends, dtype=torch.int64, device=bounds.device)
    states.index_copy_(0, rows, bounds.index_select(0, index).to(states.dtype))


def _write_exports(
    layout: ChunkLayout,
    starts: torch.Tensor,
    terms: torch.Tensor,
    decay: torch.Tensor,
    prefix: torch.Tensor,
    B: torch.Tensor,
    states: torch.Tensor,
    exports: Sequence[StateExport],
) -> None:
    """State at a position inside a chunk: that position's row of the decay matrix in place of the last row."""
    place = {sequence: rank for rank, sequence in enumerate(layout.order)}
    chunks = [layout.chunk(place[export.sequence], export.length) for export in exports]
    chunk = torch.tensor(chunks, dtype=torch.int64, device=starts.device)
    token = torch.tensor([(e.length - 1) % layout.width for e in exports], dtype=torch.int64, device=starts.device)
    saved = torch.empty((len(exports), *starts.shape[1:]), dtype=torch.float32, device=starts.device)
    _add_terms(saved, terms[chunk], decay[chunk, :, token], B[chunk])
    saved.addcmul_(starts[chunk], prefix[chunk, :, token][..., None, None])
    rows = torch.tensor([export.row for export in exports], dtype=torch.int64, device=starts.device)
    states.index_copy_(0, rows, saved.to(states.dtype))


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
    y = (grouped @ C.to(torch.float32)[..., None]).view(num_sequences, num_heads, head_dim)
    if D is not None:
        y = torch.addcmul(y, wide_x, D[:, None].to(torch.float32))
    return y.to(x.dtype)
