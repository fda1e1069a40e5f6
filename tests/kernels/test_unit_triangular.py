"""The inverse of unit lower triangular matrices against float64, where similar rows make powers explode."""

from __future__ import annotations

import pytest
import torch

from turnkeep.kernels.unit_triangular import unit_lower_inverse


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("kind", ["random", "ones", "near two"])
def test_inverse_matches_float64(size: int, kind: str) -> None:
    full = {
        "random": torch.rand(3, 2, size, size) * 2 - 1,
        "ones": torch.ones(3, 2, size, size),
        "near two": 1.9 - 0.01 * torch.rand(3, 2, size, size),
    }[kind]
    lower = full.tril(-1) / (8 if kind == "random" else 1)
    exact = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + lower.double())
    inverse = unit_lower_inverse(lower)
    assert inverse.dtype == torch.float32
    assert ((inverse.double() - exact).abs().max() / exact.abs().max()) < 5e-6


def test_a_row_does_not_see_rows_that_it_does_not_refer_to() -> None:
    lower = torch.rand(1, 32, 32).tril(-1)
    lower[:, 20, 5:20] = 0.0
    changed = lower.clone()
    changed[:, 5:20] = (torch.rand(1, 15, 32) * 9).tril(4)
    assert torch.equal(unit_lower_inverse(changed)[:, 20], unit_lower_inverse(lower)[:, 20])


@pytest.mark.parametrize("shape", [(4, 20, 20), (4, 16, 32)])
def test_other_sizes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="unit_lower_inverse"):
        unit_lower_inverse(torch.zeros(shape))
