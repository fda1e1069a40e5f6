"""Attention over keys and values stored in pages, and writing them there.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.paged_attention.reference import paged_attention_reference, write_kv_reference
from turnkeep.kernels.paged_attention.tree_reference import tree_attention_reference

__all__ = ["paged_attention", "tree_attention", "write_kv"]


def write_kv(kv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store keys and values [T, Hkv, D] in slots slot_mapping [T] (page_id * page_size + offset) of kv, in place.

    kv [2, P, page_size, Hkv, D]. Raises ValueError for shapes that do not fit.
    """
    if keys.shape != values.shape or keys.shape[1:] != kv.shape[3:] or slot_mapping.shape != keys.shape[:1]:
        raise ValueError(
            f"write_kv: keys {tuple(keys.shape)}, values {tuple(values.shape)}, slots {tuple(slot_mapping.shape)} "
            f"do not fit kv {tuple(kv.shape)}"
        )
    write_kv_reference(kv, keys, values, slot_mapping)


def paged_attention(
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
    """Causal attention of packed queries over their own request's pages; the step's keys are already written.

    q [T, Hq, D], Hq a multiple of Hkv (query head h reads key head h // (Hq / Hkv)); kv [2, P, page_size, Hkv, D];
    page_table [R, max_pages] int64, padded with page 0, whose slots hold finite values. The query at offset i of
    request r sees its positions [first, context_lens[r] + i], of these the last `window` where one is given; every
    query's own position is `first` or later. The first num_decodes requests have one token each.
    What lies in slots past a request's length never matters, NaN included. Returns [T, Hq, D] in the dtype of q.
    Raises ValueError for shapes and lengths that do not fit.
    """
    num_heads, num_kv_heads = q.shape[1], kv.shape[3]
    if q.dim() != 3 or kv.dim() != 5 or q.shape[2] != kv.shape[4] or num_heads % num_kv_heads:
        raise ValueError(f"paged_attention: q {tuple(q.shape)} does not fit kv {tuple(kv.shape)}")
    if len(seq_lens) != page_table.shape[0] or len(context_lens) != len(seq_lens) or sum(seq_lens) != q.shape[0]:
        raise ValueError(
            f"paged_attention: {q.shape[0]} tokens, page table {tuple(page_table.shape)}, lengths {list(seq_lens)}, "
            f"context lengths {list(context_lens)} do not fit together"
        )
    if not 0 <= num_decodes <= len(seq_lens) or any(length != 1 for length in seq_lens[:num_decodes]):
        raise ValueError(f"paged_attention: the first {num_decodes} of lengths {list(seq_lens)} are not all 1")
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: a window of {window} tokens")
    if first < 0 or min(context_lens, default=first) < first:
        raise ValueError(f"paged_attention: queries at positions {list(context_lens)} on, keys from {first} on")
    return paged_attention_reference(q, kv, page_table, seq_lens, context_lens, num_decodes, scale, window, first)


def tree_attention(
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
    """Attention of packed draft trees: a node sees its request's pages, its ancestors and itself.

    q [N, Hq, D], keys and values [N, Hkv, D] of the nodes, which lie in no page; kv and page_table as in
    `paged_attention`, of R requests, of which the first context_lens[r] positions are seen. A root has the position
    context_lens[r]; of what a node sees the last `window` positions count where one is given. Nothing is written.
    Returns [N, Hq, D] in the dtype of q. Raises ValueError for shapes and lengths that do not fit.
    """
    if q.shape[1] % kv.shape[3] or keys.shape != (q.shape[0], kv.shape[3], q.shape[2]) or values.shape != keys.shape:
        raise ValueError(
            f"tree_attention: q {tuple(q.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} do not fit "
            f"kv {tuple(kv.shape)}"
        )
    num_trees = trees.num_trees
    if q.shape[0] != len(trees.parents) or page_table.shape[0] != num_trees or len(context_lens) != num_trees:
        raise ValueError(
            f"tree_attention: {q.shape[0]} nodes, page table {tuple(page_table.shape)} and {len(context_lens)} "
            f"lengths for {num_trees} trees of {len(trees.parents)} nodes"
        )
    if window is not None and window < 1:
        raise ValueError(f"tree_attention: a window of {window} tokens")
    return tree_attention_reference(q, keys, values, kv, page_table, context_lens, trees, scale, window)
