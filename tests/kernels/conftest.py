"""Memory that a kernel allocates without filling holds NaN in these tests, so that reading it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

# Imported here, so that every kernel module is known before the first test.
from turnkeep.kernels import (
    causal_conv1d,
    draft_tree,
    gated_delta_scan,
    gated_delta_tree,
    norm,
    paged_attention,
    rotary,
    row_copy,
    sampling,
    ssd_scan,
    ssd_tree,
    unit_triangular,
)

PACKAGES = (
    causal_conv1d,
    draft_tree,
    gated_delta_scan,
    gated_delta_tree,
    norm,
    paged_attention,
    rotary,
    row_copy,
    sampling,
    ssd_scan,
    ssd_tree,
    unit_triangular,
)


class PoisonedTorch(ModuleType):
    """torch, except that `empty` and `empty_like` give NaN."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(torch.empty(*args, **kwargs))

    @staticmethod
    def empty_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(torch.empty_like(*args, **kwargs))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = tuple(package.__name__ for package in PACKAGES)
    for name, module in list(sys.modules.items()):
        if name.startswith(prefixes) and getattr(module, "torch", None) is torch:
            monkeypatch.setattr(module, "torch", PoisonedTorch("torch"))


@pytest.fixture(autouse=True)
def seeded_inference() -> Iterator[None]:
    torch.manual_seed(20)
    with torch.inference_mode():
        yield
