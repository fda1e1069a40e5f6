"""The tensors of the pools, and copies carried out on them."""

from __future__ import annotations

import torch

from turnkeep.cache.copies import PageCopy, RowCopy
from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec
from turnkeep.cache.storage import CacheStorage

KV = KVSpec(num_layers=2, num_kv_heads=3, head_dim=8, dtype="bfloat16")
STATE = StateSpec((StatePart("conv", 3, (10, 3), "bfloat16"), StatePart("ssm", 3, (2, 4, 5), "float32")))


def test_pools_have_the_shapes_of_the_spec_and_are_zero() -> None:
    spec = CacheSpec(4, KV, STATE)
    tensors = CacheStorage(spec, num_pages=6, num_state_rows=5).tensors
    assert [tuple(pool.shape) for pool in tensors.kv] == [(2, 6, 4, 3, 8)] * 2
    assert [tuple(pool.shape) for pool in tensors.states["conv"]] == [(5, 10, 3)] * 3
    assert [tuple(pool.shape) for pool in tensors.states["ssm"]] == [(5, 2, 4, 5)] * 3
    assert {pool.dtype for pool in tensors.kv} == {torch.bfloat16}
    assert {pool.dtype for pool in tensors.states["ssm"]} == {torch.float32}
    pools = [*tensors.kv, *tensors.states["conv"], *tensors.states["ssm"]]
    assert all(not pool.any() for pool in pools)
    num_bytes = sum(pool.element_size() * pool.numel() for pool in pools)
    assert num_bytes == 6 * spec.bytes_per_page + 5 * spec.bytes_per_row


def test_a_model_without_attention_or_without_state_has_no_such_pools() -> None:
    assert CacheStorage(CacheSpec(4, None, STATE), num_pages=6, num_state_rows=5).tensors.kv == []
    assert CacheStorage(CacheSpec(4, KV, None), num_pages=6, num_state_rows=5).tensors.states == {}


def test_copies_move_the_filled_slots_and_the_whole_row_and_nothing_else() -> None:
    storage = CacheStorage(CacheSpec(4, KV, STATE), num_pages=6, num_state_rows=5)
    generator = torch.Generator().manual_seed(0)
    for pool in (*storage.tensors.kv, *storage.tensors.states["conv"], *storage.tensors.states["ssm"]):
        pool.copy_(torch.randn(pool.shape, generator=generator).to(pool.dtype))
    kv = [pool.clone() for pool in storage.tensors.kv]
    states = {name: [pool.clone() for pool in pools] for name, pools in storage.tensors.states.items()}
    storage.apply_copies((PageCopy(1, 3, 2), PageCopy(1, 5, 4)), (RowCopy(2, 4), RowCopy(2, 1)))
    for before, after in zip(kv, storage.tensors.kv, strict=True):
        before[:, 3, :2] = before[:, 1, :2]
        before[:, 5] = before[:, 1]
        assert torch.equal(before, after)
    for name, pools in states.items():
        for before, after in zip(pools, storage.tensors.states[name], strict=True):
            before[4] = before[2]
            before[1] = before[2]
            assert torch.equal(before, after)


def test_no_copies_change_nothing() -> None:
    storage = CacheStorage(CacheSpec(4, None, None), num_pages=1, num_state_rows=1)
    storage.apply_copies((), ())
    assert storage.tensors.kv == []
