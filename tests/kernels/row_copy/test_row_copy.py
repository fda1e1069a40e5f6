"""Pool copies act as if done one after another, whatever overlaps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turnkeep.kernels.row_copy import copy_page_slots, copy_rows

ROWS = 7
copies = st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)), max_size=8)


@given(copies)
def test_rows_are_copied_as_if_one_after_another(pairs: list[tuple[int, int]]) -> None:
    pools = [torch.randn(ROWS, 3, 5), torch.randn(ROWS, 2).bfloat16()]
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        for source, target in pairs:
            pool[target] = pool[source].clone()
    copy_rows(pools, [source for source, _ in pairs], [target for _, target in pairs])
    assert all(torch.equal(pool, other) for pool, other in zip(pools, expected, strict=True))


@given(copies, st.data())
def test_page_slots_are_copied_as_if_one_after_another(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, 4)) for _ in pairs]
    pools = [torch.randn(2, ROWS, 4, 2, 3) for _ in range(2)]
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        for (source, target), count in zip(pairs, counts, strict=True):
            pool[:, target, :count] = pool[:, source, :count].clone()
    copy_page_slots(pools, [source for source, _ in pairs], [target for _, target in pairs], counts)
    assert all(torch.equal(pool, other) for pool, other in zip(pools, expected, strict=True))


def test_without_pools_nothing_happens() -> None:
    copy_rows([], [1], [2])
    copy_page_slots([], [], [], [])


@pytest.mark.parametrize(("sources", "targets"), [([1], [1, 2]), ([ROWS], [1]), ([1], [ROWS]), ([-1], [1])])
def test_rows_that_do_not_exist_are_refused(sources: list[int], targets: list[int]) -> None:
    pool = torch.zeros(ROWS, 2)
    with pytest.raises(ValueError, match="copy_rows"):
        copy_rows([pool], sources, targets)


@pytest.mark.parametrize(
    ("sources", "targets", "counts"),
    [([1], [2, 3], [1]), ([1], [2], []), ([1], [2], [5]), ([1], [2], [-1]), ([ROWS], [1], [1]), ([1], [-1], [1])],
)
def test_slots_that_do_not_exist_are_refused(sources: list[int], targets: list[int], counts: list[int]) -> None:
    pool = torch.zeros(2, ROWS, 4, 1, 2)
    with pytest.raises(ValueError, match="copy_page_slots"):
        copy_page_slots([pool], sources, targets, counts)
