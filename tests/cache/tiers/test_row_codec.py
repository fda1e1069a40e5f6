"""Eight-bit snapshots: the bound that their module states, and what stays exact."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeep.cache.spec import StatePart
from turnkeep.cache.tiers.record import Bytes
from turnkeep.cache.tiers.row_codec import RowCodec, RowCodecError

TAIL = np.arange(10, dtype=np.uint8)


def row(part: StatePart, values: torch.Tensor) -> Bytes:
    flat: Bytes = values.to(getattr(torch, part.dtype)).contiguous().view(torch.uint8).numpy().reshape(-1)
    return flat


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-20, 1e-3, 1.0, 1e4, 1e30]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_error_is_at_most_half_a_step_of_its_head(seed: int, scale: float, dtype: str) -> None:
    part = StatePart("ssm", 2, (3, 4, 5), dtype)
    generator = torch.Generator().manual_seed(seed)
    heads = torch.logspace(-3, 3, 6).reshape(2, 3, 1, 1)  # one loud head must not silence the others
    values = torch.randn((2, 3, 4, 5), generator=generator) * heads * scale
    exact = values.to(getattr(torch, dtype)).float()
    codec = RowCodec((part,))
    content = np.concatenate([row(part, values), TAIL])
    encoded = codec.encode(content)
    assert len(encoded) == codec.encoded_bytes(len(content)) == 6 * 4 + 120 + len(TAIL)
    decoded = codec.decode(encoded)
    assert len(decoded) == codec.decoded_bytes(len(encoded)) == len(content)
    assert (decoded[-len(TAIL) :] == TAIL).all()
    found = torch.from_numpy(decoded[: -len(TAIL)].copy()).view(getattr(torch, dtype)).float().reshape(exact.shape)
    largest = exact.abs().amax(dim=(2, 3), keepdim=True)
    rounding = found.abs() * (2.0**-8 if dtype == "bfloat16" else 2.0**-22)
    assert ((found - exact).abs() <= largest / 254 * (1 + 1e-5) + rounding).all()


def test_windows_vectors_and_tails_stay_exact_and_zero_stays_zero() -> None:
    parts = (
        StatePart("conv", 2, (6, 3), "bfloat16"),
        StatePart("ssm", 1, (2, 3, 4), "float32"),
        StatePart("ssm_x", 1, (5, 2, 3), "bfloat16"),
    )
    conv, tail = row(parts[0], torch.randn(2, 6, 3)), row(parts[2], torch.randn(1, 5, 2, 3))
    content = np.concatenate([conv, row(parts[1], torch.zeros(1, 2, 3, 4)), tail])
    codec = RowCodec(parts)
    assert (codec.decode(codec.encode(content)) == content).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_refused(bad: float) -> None:
    part = StatePart("ssm", 1, (1, 2, 2), "float32")
    values = torch.ones(1, 1, 2, 2)
    values[0, 0, 0, 1] = bad
    with pytest.raises(RowCodecError, match="ssm"):
        RowCodec((part,)).encode(row(part, values))
