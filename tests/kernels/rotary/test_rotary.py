"""Rotary embedding against complex rotation in float64 and against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from turnkeep.kernels.rotary import apply_rotary, rotary_cos_sin, rotary_frequencies

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_rotation_matches_complex_numbers(interleaved: bool, rotary_dim: int) -> None:
    x, positions = torch.randn(7, 3, 16), torch.tensor([0, 1, 5, 90, 91, 3, 2000])
    frequencies = rotary_frequencies(rotary_dim, 10000.0)
    out = apply_rotary(x, *rotary_cos_sin(positions, frequencies), interleaved)
    # The angle is a float32 product by definition, as in the checkpoints' own code.
    angles = (positions.float()[:, None] * frequencies).double()
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]  # [T, 1, F]
    rotated = x[..., :rotary_dim].double()
    half = rotary_dim // 2
    first, second = (
        (rotated[..., 0::2], rotated[..., 1::2]) if interleaved else (rotated[..., :half], rotated[..., half:])
    )
    product = torch.complex(first, second) * turns
    parts = torch.stack((product.real, product.imag), -1).flatten(-2)
    expected = parts if interleaved else torch.cat((product.real, product.imag), -1)
    torch.testing.assert_close(out[..., :rotary_dim].double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("scaling", [None, {"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_matches_transformers(scaling: dict[str, Any] | None, dtype: torch.dtype) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    config.rope_parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": 50000.0}
    positions = torch.tensor([0, 1, 17, 300, 511])
    q, k = torch.randn(5, 4, 16).to(dtype), torch.randn(5, 2, 16).to(dtype)
    cos, sin = LlamaRotaryEmbedding(config)(q.float(), positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(
        q.float().transpose(0, 1)[None], k.float().transpose(0, 1)[None], cos, sin
    )
    angles = rotary_cos_sin(positions, rotary_frequencies(16, 50000.0, scaling))
    for actual, expected in ((apply_rotary(q, *angles), expected_q), (apply_rotary(k, *angles), expected_k)):
        assert actual.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(actual.float(), expected[0].transpose(0, 1), rtol=tolerance, atol=tolerance)


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(ValueError, match="yarn"):
        rotary_frequencies(16, 10000.0, {"rope_type": "yarn"})
    with pytest.raises(ValueError, match="even"):
        rotary_frequencies(15, 10000.0)
    cos = torch.zeros(3, 8)
    for x, sin in ((torch.zeros(4, 2, 16), cos), (torch.zeros(3, 2, 14), cos), (torch.zeros(3, 2, 16), cos[:, :7])):
        with pytest.raises(ValueError, match="apply_rotary"):
            apply_rotary(x, cos, sin)
