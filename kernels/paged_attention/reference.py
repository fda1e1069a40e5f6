"""Definition of attention over pages, in plain PyTorch for any device.

Keys and values are gathered for one request (prefill) or for a group of requests of similar length (decode) at a
time. The softmax runs inside scaled_dot_product_attention, which never holds a whole score matrix on the devices
that matter; heads that share keys are expressed by strides, so keys are not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

# A prefill chunk with context needs an explicit mask: queries are cut so that a mask stays below this many elements.
MAX_MASK_ELEMENTS = 1 << 21
# Decodes with fewer tokens of context share one call with others of similar length.
MAX_GROUPED_TOKENS = 512


def write_kv_reference(kv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """See `turnkeep.kernels.paged_attention.write_kv`."""
    slots = kv.flatten(1, 2)  # [2, P * page_size, Hkv, D]
    slots[0].index_copy_(0, slot_mapping, keys.to(kv.dtype))
    slots[1].index_copy_(0, slot_mapping, values.to(kv.dtype))


def paged_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    num_decodes: int,
    scale: float,
    window: int | None = None,
    first: int = 0,
) -> torch.Tensor:
    """See `turnkeep.kernels.paged_attention.paged_attention`."""
    if num_decodes == 1 and len(seq_lens) == 1:
        return _attend_one(q, kv, page_table[0], context_lens[0] + 1, scale, window, first)
    out = torch.empty_like(q)
    for requests in decode_groups(context_lens[:num_decodes], kv.shape[2]):
        if len(requests) == 1:
            (r,) = requests
            out[r] = _attend_one(q[r : r + 1], kv, page_table[r], context_lens[r] + 1, scale, window, first)[0]
        else:
            index = torch.tensor(requests, dtype=torch.int64, device=q.device)
            kv_lens = [context_lens[r] + 1 for r in requests]
            out[index] = _attend_group(q[index], kv, page_table[index], kv_lens, scale, window, first)
    start = num_decodes
    for r in range(num_decodes, len(seq_lens)):
        end = start + seq_lens[r]
        if end > start:
            out[start:end] = _attend_chunk(q[start:end], kv, page_table[r], context_lens[r], scale, window, first)
        start = end
    return out


def decode_groups(context_lens: Sequence[int], page_size: int) -> list[list[int]]:
    """Group decodes with short contexts whose page counts are within a factor of four; long ones stay alone.

    A group pays for copying and padding its keys, a request alone for its own calls.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for r, context_len in enumerate(context_lens):
        if context_len < MAX_GROUPED_TOKENS:
            key = ("short", ((context_len // page_size).bit_length() + 1) // 2)
        else:
            key = ("long", r)
        groups.setdefault(key, []).append(r)
    return list(groups.values())


def _request_kv(
    kv: torch.Tensor, pages: torch.Tensor, kv_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [Hkv, kv_len, D] of one request; a view of the pool where its pages follow one another."""
    page_size = kv.shape[2]
    num_pages = -(-kv_len // page_size)
    ids = pages[:num_pages].tolist()
    if len(ids) != num_pages:
        raise ValueError(f"paged_attention: {kv_len} tokens need {num_pages} pages of {page_size}, not {len(ids)}")
    if ids == list(range(ids[0], ids[0] + num_pages)):
        own = kv[:, ids[0] : ids[0] + num_pages]
    else:
        own = kv.index_select(1, pages[:num_pages])
    keys, values = own.flatten(1, 2)[:, :kv_len].transpose(1, 2).to(dtype)
    return keys, values


def _attend_one(
    q: torch.Tensor, kv: torch.Tensor, pages: torch.Tensor, kv_len: int, scale: float, window: int | None, first: int
) -> torch.Tensor:
    """One query token [1, Hq, D]: the query heads of a key head are the rows of one product."""
    keys, values = _request_kv(kv, pages, kv_len, q.dtype)
    start = first if window is None else max(first, kv_len - window)
    if start:
        keys, values = keys[:, start:], values[:, start:]
    num_kv_heads, _, head_dim = keys.shape
    rows = q.view(1, num_kv_heads, -1, head_dim)
    out = functional.scaled_dot_product_attention(rows, keys[None], values[None], scale=scale)
    return out.reshape(q.shape)


def _attend_group(
    q: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: Sequence[int],
    scale: float,
    window: int | None,
    first: int,
) -> torch.Tensor:
    """One query token for each of several requests, q [R, Hq, D], padded to the longest of them."""
    page_size, num_kv_heads, head_dim = kv.shape[2:]
    max_len = max(kv_lens)
    num_pages = -(-max_len // page_size)
    if page_table.shape[1] < num_pages:
        raise ValueError(f"paged_attention: {max_len} tokens need {num_pages} pages, not {page_table.shape[1]}")
    offsets = torch.arange(num_pages * page_size, device=q.device)
    lengths = torch.tensor(kv_lens, device=q.device)[:, None]
    valid = offsets < lengths  # [R, L]
    if first:
        valid &= offsets >= first
    if window is not None:
        valid &= offsets >= lengths - window
    slots = (page_table[:, :num_pages, None] * page_size + offsets[:page_size]).flatten(1)  # [R, L]
    # Slots past a request's length may hold anything, and weight zero times NaN is NaN: read page 0 there instead.
    slots = slots.where(valid, 0)
    own = kv.flatten(1, 2).index_select(1, slots.flatten())  # [2, R * L, Hkv, D]
    keys, values = own.view(2, *slots.shape, num_kv_heads, head_dim).transpose(2, 3).to(q.dtype)  # [R, Hkv, L, D] each
    rows = q.view(q.shape[0], num_kv_heads, -1, head_dim)
    mask = valid[:, None, None, :].expand(-1, num_kv_heads, rows.shape[2], -1)
    out = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(q.shape)


def _attend_chunk(
    q: torch.Tensor,
    kv: torch.Tensor,
    pages: torch.Tensor,
    context_len: int,
    scale: float,
    window: int | None,
    first: int,
) -> torch.Tensor:
    """All queries [n, Hq, D] of one request's chunk, which starts at position context_len."""
    num_tokens, num_heads, head_dim = q.shape
    keys, values = _request_kv(kv, pages, context_len + num_tokens, q.dtype)
    num_kv_heads = keys.shape[0]
    group = num_heads // num_kv_heads
    # [Hkv, group, ., D]: key heads take the place of the batch, and the group reads the same keys by stride 0.
    rows = q.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys = keys[:, None].expand(-1, group, -1, -1)
    values = values[:, None].expand(-1, group, -1, -1)
    if context_len == 0 and (window is None or num_tokens <= window):
        out = functional.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(q.shape)
    block = max(16, MAX_MASK_ELEMENTS // (context_len + num_tokens))
    pieces: list[torch.Tensor] = []
    for start in range(0, num_tokens, block):
        end = min(start + block, num_tokens)
        position = context_len + start  # of the block's first query
        # Later keys are masked for the whole block, and so are those before the window of its first query.
        visible = context_len + end
        earliest = first if window is None else max(position - window + 1, first)
        mask = _block_mask(end - start, visible - earliest, position - earliest, window, q)
        piece = functional.scaled_dot_product_attention(
            rows[:, :, start:end],
            keys[:, :, earliest:visible],
            values[:, :, earliest:visible],
            attn_mask=mask.expand(num_kv_heads, group, -1, -1),
            scale=scale,
        )
        pieces.append(piece.permute(2, 0, 1, 3))
    return torch.cat(pieces).reshape(q.shape)


def _block_mask(num_queries: int, num_keys: int, position: int, window: int | None, q: torch.Tensor) -> torch.Tensor:
    """0 where query i sees key j, j <= position + i and not before its window, else -inf: [num_queries, num_keys].

    Added to the scores, so it has their dtype, that of q.
    """
    mask = torch.full((num_queries, num_keys), -torch.inf, dtype=q.dtype, device=q.device)
    mask.triu_(position + 1)
    if window is not None:
        mask += torch.full_like(mask, -torch.inf).tril_(position - window)
    return mask
