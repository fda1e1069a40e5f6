"""Every public operation has a reference of the same signature, which the kernels of a device will share."""

from __future__ import annotations

import importlib
import inspect

import pytest

OPERATIONS = {
    "causal_conv1d": ["causal_conv1d", "causal_conv1d_update"],
    "gated_delta_scan": ["gated_delta_scan", "gated_delta_update"],
    "gated_delta_tree": ["gated_delta_tree", "gated_delta_fold"],
    "norm": ["rms_norm", "gated_rms_norm"],
    "paged_attention": ["paged_attention", "write_kv"],
    "rotary": ["apply_rotary"],
    "row_copy": ["copy_rows", "copy_page_slots"],
    "sampling": ["sample", "top_logprobs"],
    "ssd_scan": ["ssd_scan", "ssd_update"],
    "stochastic_round": ["stochastic_round"],
    "ssd_tree": ["ssd_tree", "ssd_fold"],
}


@pytest.mark.parametrize(("package", "name"), [(p, name) for p, names in OPERATIONS.items() for name in names])
def test_reference_has_the_signature_of_the_public_function(package: str, name: str) -> None:
    public = getattr(importlib.import_module(f"turnkeep.kernels.{package}"), name)
    reference = getattr(importlib.import_module(f"turnkeep.kernels.{package}.reference"), f"{name}_reference")
    assert inspect.signature(public) == inspect.signature(reference)


@pytest.mark.parametrize("package", sorted(OPERATIONS))
def test_public_names_are_exactly_the_exported_ones(package: str) -> None:
    module = importlib.import_module(f"turnkeep.kernels.{package}")
    assert set(OPERATIONS[package]) <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
