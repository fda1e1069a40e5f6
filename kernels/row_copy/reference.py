"""Definition of the pool copies, in plain PyTorch for any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch


def copy_rows_reference(pools: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int]) -> None:
    """See `turnkeep.kernels.row_copy.copy_rows`."""
    for start, end in _independent_runs(sources, targets):
        if end - start == 1:
            for pool in pools:
                pool[targets[start]].copy_(pool[sources[start]])
            continue
        device = pools[0].device
        source_index = torch.tensor(sources[start:end], dtype=torch.int64, device=device)
        target_index = torch.tensor(targets[start:end], dtype=torch.int64, device=device)
        for pool in pools:
            pool.index_copy_(0, target_index, pool.index_select(0, source_index))


def copy_page_slots_reference(
    kv_pools: Sequence[torch.Tensor], sources: Sequence[int], targets: Sequence[int], num_tokens: Sequence[int]
) -> None:
    """See `turnkeep.kernels.row_copy.copy_page_slots`."""
    for source, target, count in zip(sources, targets, num_tokens, strict=True):
        for pool in kv_pools:
            pool[:, target, :count].copy_(pool[:, source, :count])


def _independent_runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut the copies into runs [start, end) inside which no copy reads or overwrites what an earlier one wrote.

    A run can then read all its sources before it writes: the result is that of one copy after another.
    """
    written: set[int] = set()
    start = 0
    for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source in written or target in written:
            yield start, index
            start = index
            written.clear()
        written.add(target)
    if start < len(sources):
        yield start, len(sources)
