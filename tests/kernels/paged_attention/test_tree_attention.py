"""Attention over trees against causal attention along the path of every node."""

from __future__ import annotations

import pytest
import torch
from draft_trees import SHAPES, make_parents, path

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.paged_attention import paged_attention, tree_attention, write_kv

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 6, 2, 10, 4
TOLERANCE = 2e-6


def random_pages(context_lens: list[int], spare: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages whose contexts are filled; everything else is NaN but page 0. Each request has room for `spare` more."""
    counts = [-(-(length + spare) // PAGE_SIZE) for length in context_lens]
    order = torch.randperm(sum(counts)) + 1
    table = torch.zeros(len(counts), max(counts), dtype=torch.int64)
    kv = torch.full((2, sum(counts) + 1, PAGE_SIZE, KV_HEADS, HEAD_DIM), torch.nan)
    kv[:, 0] = 0.0
    start = 0
    for request, (count, length) in enumerate(zip(counts, context_lens, strict=True)):
        table[request, :count] = order[start : start + count]
        start += count
        positions = torch.arange(length)
        slots = table[request, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        write_kv(kv, torch.randn(length, KV_HEADS, HEAD_DIM), torch.randn(length, KV_HEADS, HEAD_DIM), slots)
    return kv, table


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("context_lens", [[5, 1, 18, 33, 12], [7] * 5, [0, 3, 700, 900, 0]])
def test_nodes_attend_as_the_last_token_of_their_path(window: int | None, context_lens: list[int]) -> None:
    own = [make_parents(shape, count) for shape, count in zip(SHAPES, (6, 9, 1, 17, 12), strict=True)]
    num_nodes = [len(parents) for parents in own]
    kv, table = random_pages(context_lens, 17)
    q = torch.randn(sum(num_nodes), HEADS, HEAD_DIM)
    keys, values = torch.randn(2, sum(num_nodes), KV_HEADS, HEAD_DIM)
    before = kv.clone()
    trees = DraftTrees(num_nodes, [parent for parents in own for parent in parents])
    mixed = tree_attention(q, keys, values, kv, table, context_lens, trees, 0.3, window)
    assert torch.equal(kv.nan_to_num(), before.nan_to_num())
    for request, (start, parents) in enumerate(zip(trees.starts, own, strict=True)):
        for node in range(len(parents)):
            along = [start + other for other in path(parents, node)]
            positions = context_lens[request] + torch.arange(len(along))
            slots = table[request, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
            pages = kv.clone()
            write_kv(pages, keys[along], values[along], slots)
            lens = ([len(along)], [context_lens[request]])
            chain = paged_attention(q[along], pages, table[request : request + 1], *lens, 0, 0.3, window)
            assert (mixed[start + node] - chain[-1]).abs().max() < TOLERANCE


def test_what_does_not_fit_is_refused() -> None:
    kv, table = random_pages([5], 4)
    q, keys = torch.randn(2, HEADS, HEAD_DIM), torch.randn(2, KV_HEADS, HEAD_DIM)
    trees = DraftTrees([2], [-1, 0])
    for bad in (
        (q, keys[:1], keys, kv, table, [5], trees, 1.0),
        (q[:1], keys[:1], keys[:1], kv, table, [5], trees, 1.0),
        (q, keys, keys, kv, table, [5, 5], trees, 1.0),
        (q, keys, keys, kv, table, [50], trees, 1.0),
        (q, keys, keys, kv, table, [5], trees, 1.0, 0),
    ):
        with pytest.raises(ValueError, match="tree_attention"):
            tree_attention(*bad)
