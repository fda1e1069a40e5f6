"""Definition of attention over draft trees, in plain PyTorch for any device.

A tree's keys are its request's pages and then its own nodes, under one mask that every layer of a step shares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.paged_attention.reference import decode_groups


def tree_attention_reference(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv: torch.Tensor,
    page_table: torch.Tensor,
    context_lens: Sequence[int],
    trees: DraftTrees,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """See `turnkeep.kernels.paged_attention.tree_attention`."""
    if not trees.num_trees:
        return torch.empty_like(q)
    num_kv_heads, head_dim = keys.shape[1:]
    own = trees.padded(torch.stack((keys, values), dim=1)).permute(2, 0, 1, 3, 4)  # [2, R, W, Hkv, D]
    # The query heads of a key head are the rows of one product: [R, Hkv, W * group, D].
    rows = trees.padded(q.view(q.shape[0], num_kv_heads, -1, head_dim)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    pieces: list[tuple[list[int], torch.Tensor]] = []
    for requests in decode_groups(context_lens, kv.shape[2]):
        is_all = len(requests) == trees.num_trees
        index = torch.tensor([] if is_all else requests, dtype=torch.int64, device=q.device)
        group_rows, table, nodes = (
            (rows, page_table, own) if is_all else (rows[index], page_table[index], own[:, index])
        )
        lens = context_lens if is_all else [context_lens[r] for r in requests]
        context = _context(kv, table, lens)  # [2, R', L, Hkv, D]
        mask = _mask(trees, requests, lens, context.shape[2], window, rows.shape[2] // trees.width, q)
        all_keys, all_values = torch.cat((context.to(q.dtype), nodes), dim=2).transpose(2, 3).unbind(0)
        found = functional.scaled_dot_product_attention(group_rows, all_keys, all_values, attn_mask=mask, scale=scale)
        pieces.append((requests, found))
    out = pieces[0][1]
    if len(pieces) > 1:
        out = torch.empty_like(rows)
        for requests, piece in pieces:
            out[requests] = piece
    by_node = out.view(trees.num_trees, num_kv_heads, trees.width, -1, head_dim).permute(0, 2, 1, 3, 4)
    return trees.packed(by_node).reshape(q.shape)


def _context(kv: torch.Tensor, page_table: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    """Keys and values of several requests, padded to the longest: [2, R, L, Hkv, D]."""
    page_size, length = kv.shape[2], max(lens)
    num_pages = -(-length // page_size)
    if page_table.shape[1] < num_pages:
        raise ValueError(f"tree_attention: {length} tokens need {num_pages} pages, not {page_table.shape[1]}")
    if len(lens) == 1:
        own = kv.index_select(1, page_table[0, :num_pages])  # [2, pages, page_size, Hkv, D]
        return own.flatten(1, 2)[:, None, :length]
    offsets = torch.arange(length, device=kv.device)
    slots = page_table[:, offsets // page_size] * page_size + offsets % page_size  # [R, L]
    # Slots past a request's length may hold anything, and weight zero times NaN is NaN: read page 0 there instead.
    slots = slots.where(offsets < torch.tensor(lens, device=kv.device)[:, None], 0)
    found = kv.flatten(1, 2).index_select(1, slots.flatten())
    return found.view(2, *slots.shape, *kv.shape[3:])


def _mask(
    trees: DraftTrees,
    requests: Sequence[int],
    lens: Sequence[int],
    length: int,
    window: int | None,
    group: int,
    q: torch.Tensor,
) -> torch.Tensor:
    """0 where a row sees a key, else -inf: [R, 1, W * group, L + W] in the dtype of q; made once a step."""

    def make() -> torch.Tensor:
        ancestors = trees.ancestors if len(requests) == trees.num_trees else trees.ancestors[list(requests)]
        width = trees.width
        starts = torch.tensor(lens, device=q.device)[:, None, None]  # [R, 1, 1], positions of the roots
        offsets = torch.arange(length, device=q.device)
        before = (offsets < starts).expand(-1, width, -1)  # [R, W, L]
        own = ancestors > 0
        if window is not None:
            depths = ancestors.sum(-1, dtype=torch.int64) - 1  # [R, W]
            before = before & (offsets > starts + depths[:, :, None] - window)
            own = own & (depths[:, None, :] > depths[:, :, None] - window)
        seen = torch.cat((before, own), dim=2).repeat_interleave(group, dim=1)[:, None]
        return torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)

    return trees.remembered(("mask", *requests, length, window, group, q.dtype), make)
