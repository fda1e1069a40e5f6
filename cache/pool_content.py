"""Bytes of pages and state rows out of the pools' tensors and back, for the colder tiers. Beside storage.py.

Generic over what the pools are made of: every tensor of `kv` is a part of a page, every one of `states` of a row. On an
accelerator copies run on the stream of the steps, so they see what steps before them wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import torch

from turnkeep.cache.spec import StatePart
from turnkeep.cache.tiers.record import Bytes
from turnkeep.kernels.forward_batch import CacheTensors


class TensorPoolContent:
    """PoolContent of these tensors. A page's bytes: layer by layer its keys, then its values; a row's: part by part.

    settle: carries out what was put off for rows and pages, called before any is read or written.
    """

    def __init__(self, tensors: CacheTensors, settle: Callable[[], None] = lambda: None) -> None:
        self._kv = tensors.kv
        # Keys and values of every layer as [pages, words]: whole rows are copied, whatever their elements are.
        self._halves = [_words(half) for pool in self._kv for half in pool]
        self._settle = settle
        self._states = [pool for pools in tensors.states.values() for pool in pools]
        self.slot_bytes = sum(pool[:, 0, 0].numel() * pool.element_size() for pool in self._kv)
        self.page_bytes = sum(pool[:, 0].numel() * pool.element_size() for pool in self._kv)
        self.row_bytes = sum(pool[0].numel() * pool.element_size() for pool in self._states)
        self.row_parts = tuple(
            StatePart(name, len(pools), tuple(pools[0].shape[1:]), _dtype_name(pools[0]))
            for name, pools in tensors.states.items()
        )

    def describe(self) -> str:
        pages = [[_dtype_name(pool), pool.shape[0], *pool.shape[2:]] for pool in self._kv]
        rows = [[part.name, part.num_layers, list(part.shape), part.dtype] for part in self.row_parts]
        device = (self._kv or self._states)[0].device.type
        return json.dumps({"pages": pages, "rows": rows, "device": device, "torch": torch.__version__})

    @torch.inference_mode()
    def read_pages(self, pages: Sequence[int]) -> Bytes:
        self._settle()
        content = np.empty((len(pages), self.page_bytes), dtype=np.uint8)
        at = 0
        for half in self._halves:
            rows = half.index_select(0, torch.tensor(pages, dtype=torch.int64, device=half.device)).cpu()
            flat = rows.view(torch.uint8).numpy()
            content[:, at : at + flat.shape[1]] = flat
            at += flat.shape[1]
        return content.reshape(-1)

    @torch.inference_mode()
    def write_pages(self, pages: Sequence[int], content: Bytes) -> None:
        self._settle()
        source = content.reshape(len(pages), self.page_bytes)
        at = 0
        for half in self._halves:
            size = half.shape[1] * half.element_size()
            rows = torch.from_numpy(np.ascontiguousarray(source[:, at : at + size])).view(half.dtype)
            half.index_copy_(0, torch.tensor(pages, dtype=torch.int64, device=half.device), rows.to(half.device))
            at += size

    @torch.inference_mode()
    def read_snapshot(self, row: int, page: int, num_slots: int) -> Bytes:
        self._settle()
        parts = [pool[row] for pool in self._states]
        parts += [pool[:, page, :num_slots] for pool in self._kv] if num_slots else []
        return np.concatenate([_to_bytes(part) for part in parts])

    @torch.inference_mode()
    def write_snapshot(self, row: int, page: int, num_slots: int, content: Bytes) -> None:
        self._settle()
        parts = [pool[row] for pool in self._states]
        parts += [pool[:, page, :num_slots] for pool in self._kv] if num_slots else []
        at = 0
        for part in parts:
            size = part.numel() * part.element_size()
            source = torch.from_numpy(content[at : at + size].copy()).view(part.dtype).reshape(part.shape)
            part.copy_(source)
            at += size


def _words(pages: torch.Tensor) -> torch.Tensor:
    """A pool's keys or values [P, ...] as a matrix of the widest words that fit: several times as fast to copy."""
    rows = pages.reshape(pages.shape[0], -1)
    assert rows.data_ptr() == pages.data_ptr(), "a pool is contiguous"
    fits = rows.shape[1] * rows.element_size() % 8 == 0 and rows.data_ptr() % 8 == 0
    return rows.view(torch.int64) if fits else rows


def _to_bytes(tensor: torch.Tensor) -> Bytes:
    flat: Bytes = tensor.contiguous().view(-1).cpu().view(torch.uint8).numpy()
    return flat


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
