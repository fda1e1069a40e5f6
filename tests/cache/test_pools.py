"""Ids and reference counts of pages and state rows."""

from __future__ import annotations

import numpy as np
import pytest

from turnkeep.cache.page_pool import PagePool
from turnkeep.cache.state_pool import StatePool


def test_page_zero_is_never_handed_out() -> None:
    pool = PagePool(9)
    assert sorted(pool.allocate(8)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert pool.num_free == 0


def test_row_zero_is_never_handed_out() -> None:
    pool = StatePool(4)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.retain(page)
    pool.release(page)
    assert pool.num_free == 1
    pool.release(page)
    assert pool.num_free == 2


def test_a_table_of_pages_is_retained_and_released_at_once() -> None:
    pool = PagePool(6)
    table = np.array(pool.allocate(4), np.int32)
    pool.retain_all(table)
    pool.release_all(table[:2])
    assert pool.num_free == 1
    pool.release_all(table)
    assert pool.num_free == 3
    pool.release_all(table[2:])
    assert pool.num_free == 5
    assert len(set(pool.free_ids())) == 5


def test_asking_for_more_pages_than_are_free_takes_none() -> None:
    pool = PagePool(4)
    with pytest.raises(RuntimeError, match="4 pages asked for, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_page_released_twice_is_an_error() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.release(page)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(page)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release_all(np.array([page], np.int32))


def test_a_free_page_cannot_be_retained() -> None:
    pool = PagePool(3)
    with pytest.raises(RuntimeError, match="cannot be retained"):
        pool.retain(1)
    with pytest.raises(RuntimeError, match="cannot be retained"):
        pool.retain_all(np.array([1, 2], np.int32))


def test_a_row_released_twice_is_an_error() -> None:
    pool = StatePool(3)
    row = pool.allocate()
    pool.retain(row)
    pool.release(row)
    pool.release(row)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(row)
    with pytest.raises(RuntimeError, match="cannot be retained"):
        pool.retain(row)


def test_rows_run_out_with_an_error() -> None:
    pool = StatePool(2)
    pool.allocate()
    with pytest.raises(RuntimeError, match="no state row"):
        pool.allocate()
