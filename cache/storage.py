"""The pools' tensors on one device: the only module of the cache that imports torch. It knows ids, not their owners."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from turnkeep.cache.copies import PageCopy, RowCopy
from turnkeep.cache.spec import CacheSpec, StatePart
from turnkeep.kernels.forward_batch import CacheTensors
from turnkeep.kernels.row_copy import copy_page_slots, copy_rows

ALIGNMENT_BYTES = 64  # of torch's own CPU tensors


class CacheStorage:
    """Pages and state rows, zero-filled: padding page 0 and row 0 must hold finite values.

    tensors.kv: one [2, num_pages, page_size, num_kv_heads, head_dim] per attention layer.
    tensors.states: part name -> one [num_state_rows, *part.shape] per recurrent layer.
    tensors.histories: part name -> one [num_history_slots, *part.shape] per recurrent layer.
    """

    def __init__(
        self,
        spec: CacheSpec,
        *,
        num_pages: int,
        num_state_rows: int,
        num_history_slots: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.history_capacity = spec.history.capacity if spec.history else 0
        self.tensors = CacheTensors(
            kv=_allocate_pages(spec, num_pages, device),
            states=_allocate_parts(spec.state.parts if spec.state else (), num_state_rows, device),
            histories=_allocate_parts(spec.history.parts if spec.history else (), num_history_slots, device),
        )
        self._row_pools = [pool for pools in self.tensors.states.values() for pool in pools]

    def apply_copies(self, page_copies: Sequence[PageCopy], row_copies: Sequence[RowCopy]) -> None:
        """Carry out a step's copies, before its forward pass."""
        if page_copies:
            copy_page_slots(
                self.tensors.kv,
                [copy.source for copy in page_copies],
                [copy.target for copy in page_copies],
                [copy.num_tokens for copy in page_copies],
            )
        if row_copies:
            copy_rows(self._row_pools, [copy.source for copy in row_copies], [copy.target for copy in row_copies])


def _allocate_pages(spec: CacheSpec, num_pages: int, device: torch.device | str) -> list[torch.Tensor]:
    if spec.kv is None:
        return []
    shape = (2, num_pages, spec.page_size, spec.kv.num_kv_heads, spec.kv.head_dim)
    dtype = getattr(torch, spec.kv.dtype)
    return [_zeros(shape, dtype, device) for _ in range(spec.kv.num_layers)]


def _allocate_parts(
    parts: Sequence[StatePart], length: int, device: torch.device | str
) -> dict[str, list[torch.Tensor]]:
    return {
        part.name: [_zeros((length, *part.shape), getattr(torch, part.dtype), device) for _ in range(part.num_layers)]
        for part in parts
    }


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Zeros that take memory only once they are written: torch.zeros touches every byte of a CPU tensor, numpy maps."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = prod(shape) * dtype.itemsize
    buffer = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT_BYTES, dtype=np.uint8))
    start = -buffer.data_ptr() % ALIGNMENT_BYTES
    return buffer[start : start + num_bytes].view(dtype).view(shape)
