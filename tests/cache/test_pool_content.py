"""Bytes out of the pools' tensors and back, for every kind of model and type, other pages and rows untouched."""

from __future__ import annotations

import pytest
import torch

from turnkeep.cache.pool_content import TensorPoolContent
from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec
from turnkeep.cache.storage import CacheStorage

KV = KVSpec(num_layers=3, num_kv_heads=2, head_dim=6, dtype="bfloat16")
STATE = StateSpec((StatePart("conv", 2, (5, 3), "bfloat16"), StatePart("ssm", 2, (2, 3, 4), "float32")))


def make_storage(kv: KVSpec | None, state: StateSpec | None, seed: int) -> CacheStorage:
    storage = CacheStorage(CacheSpec(4, kv, state), num_pages=7, num_state_rows=5)
    generator = torch.Generator().manual_seed(seed)
    for pool in [*storage.tensors.kv, *(one for pools in storage.tensors.states.values() for one in pools)]:
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return storage


@pytest.mark.parametrize(("kv", "state"), [(KV, STATE), (KV, None), (None, STATE)])
def test_content_moves_whole_from_one_cache_to_another(kv: KVSpec | None, state: StateSpec | None) -> None:
    source, target = make_storage(kv, state, 1), make_storage(kv, state, 2)
    before = make_storage(kv, state, 2)
    reader, writer = TensorPoolContent(source.tensors), TensorPoolContent(target.tensors)
    spec = CacheSpec(4, kv, state)
    assert (reader.page_bytes, reader.row_bytes) == (spec.bytes_per_page, spec.bytes_per_row)
    assert reader.slot_bytes * 4 == reader.page_bytes
    if kv is not None:
        content = reader.read_pages([5, 2, 3])
        assert len(content) == 3 * reader.page_bytes
        # Pages lie one after another: any run of them can be taken alone.
        writer.write_pages([1, 6], content[reader.page_bytes :])
        for ours, theirs, old in zip(target.tensors.kv, source.tensors.kv, before.tensors.kv, strict=True):
            assert torch.equal(ours[:, [1, 6]], theirs[:, [2, 3]])
            assert torch.equal(ours[:, [0, 2, 3, 4, 5]], old[:, [0, 2, 3, 4, 5]])
    if state is not None:
        num_slots = 3 if kv is not None else 0
        writer.write_snapshot(4, 5, num_slots, reader.read_snapshot(2, 4, num_slots))
        for name, pools in target.tensors.states.items():
            for ours, theirs, old in zip(pools, source.tensors.states[name], before.tensors.states[name], strict=True):
                assert torch.equal(ours[4], theirs[2])
                assert torch.equal(ours[:4], old[:4])
        for ours, theirs, old in zip(target.tensors.kv, source.tensors.kv, before.tensors.kv, strict=True):
            assert torch.equal(ours[:, 5, :3], theirs[:, 4, :3])
            assert torch.equal(ours[:, 5, 3:], old[:, 5, 3:])


def test_what_was_read_does_not_change_with_the_pools() -> None:
    storage = make_storage(KV, STATE, 1)
    content = TensorPoolContent(storage.tensors)
    pages, snapshot = content.read_pages([1]), content.read_snapshot(1, 1, 2)
    copies = pages.copy(), snapshot.copy()
    for pool in [*storage.tensors.kv, *(one for pools in storage.tensors.states.values() for one in pools)]:
        pool.zero_()
    assert (pages == copies[0]).all()
    assert (snapshot == copies[1]).all()


def test_description_tells_layouts_apart() -> None:
    described = {TensorPoolContent(make_storage(kv, state, 0).tensors).describe()
                 for kv, state in [(KV, STATE), (KV, None), (None, STATE)]}  # fmt: skip
    assert len(described) == 3
    assert TensorPoolContent(make_storage(KV, STATE, 5).tensors).row_parts == STATE.parts
