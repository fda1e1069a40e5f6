"""Copies inside the pools: state rows (snapshot, restore) and the filled slots of a page (copy-on-write).

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.row_copy.reference import copy_page_slots_reference, copy_rows_reference

__all__ = ["copy_page_slots", "copy_rows"]


def copy_rows(pools: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copy row sources[i] to row targets[i] in every pool [S, ...], in place, as if one after another.

    Raises ValueError when the two lists differ in length or name a row that a pool lacks.
    """
    _check_ids("copy_rows", sources, targets, min((pool.shape[0] for pool in pools), default=0))
    if len(pools) and len(sources):
        copy_rows_reference(pools, sources, targets)


def copy_page_slots(
    kv_pools: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int], num_tokens: Sequence[int]
) -> None:
    """Copy the first num_tokens[i] slots of page sources[i] to page targets[i] in every pool, in place.

    kv_pools: [2, P, page_size, Hkv, D] each. As if one copy came after another; slots past num_tokens stay as they
    are. Raises ValueError for lists of unequal length, unknown pages, or more slots than a page has.
    """
    num_pages = min((pool.shape[1] for pool in kv_pools), default=0)
    _check_ids("copy_page_slots", sources, targets, num_pages)
    if len(num_tokens) != len(sources):
        raise ValueError(f"copy_page_slots: {len(sources)} copies but {len(num_tokens)} token counts")
    page_size = min((pool.shape[2] for pool in kv_pools), default=0)
    if any(not 0 <= count <= page_size for count in num_tokens):
        raise ValueError(f"copy_page_slots: token counts {list(num_tokens)} exceed the page size {page_size}")
    if len(kv_pools) and len(sources):
        copy_page_slots_reference(kv_pools, sources, targets, num_tokens)


def _check_ids(name: str, sources: Sequence[int], targets: Sequence[int], size: int) -> None:
    if len(sources) != len(targets):
        raise ValueError(f"{name}: {len(sources)} sources but {len(targets)} targets")
    if size and any(not 0 <= index < size for index in (*sources, *targets)):
        raise ValueError(f"{name}: ids {list(sources)} -> {list(targets)} outside a pool of {size}")
