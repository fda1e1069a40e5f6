"""Random operations in tiny pools: conservation, contents and matches are checked after every one of them."""

from __future__ import annotations

import pytest
from cache_driver import MODEL_KINDS, ModelKind
from cache_machine import CacheMachine, run_machine


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_any_order_of_operations_keeps_contents_and_counts(kind: ModelKind) -> None:
    run_machine(CacheMachine, kind)
