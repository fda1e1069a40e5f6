"""RMS norms against their formula in float64 and against the modules of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNorm, NemotronHRMSNormGated

from turnkeep.kernels.norm import gated_rms_norm, rms_norm


@pytest.mark.parametrize("shape", [(1, 7), (5, 48), (2, 3, 33)])
def test_rms_norm_matches_its_formula(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 3, torch.randn(shape[-1])
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_matches_transformers(dtype: torch.dtype) -> None:
    module = NemotronHRMSNorm(48, eps=1e-5).to(dtype)
    module.weight.copy_(torch.randn(48))
    x = torch.randn(6, 48).to(dtype)
    out = rms_norm(x, module.weight, 1e-5)
    assert out.dtype == dtype
    # The mean of squares is summed in another order there.
    torch.testing.assert_close(out, module(x), rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


def test_inputs_are_left_as_they_are() -> None:
    x, gate, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    before = x.clone(), gate.clone(), weight.clone()
    rms_norm(x, weight, 1e-5)
    gated_rms_norm(x, gate, weight, 1e-5, 16)
    gated_rms_norm(x, None, weight, 1e-5, 48)
    assert all(torch.equal(now, then) for now, then in zip((x, gate, weight), before, strict=True))


@pytest.mark.parametrize("group_size", [48, 16, 3])
@pytest.mark.parametrize("gated", [True, False])
def test_gated_norm_matches_its_formula(group_size: int, gated: bool) -> None:
    x, gate, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    wide = x.double() * (torch.nn.functional.silu(gate.double()) if gated else 1.0)
    groups = wide.reshape(5, -1, group_size)
    expected = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(5, 48) * weight.double()
    out = gated_rms_norm(x, gate if gated else None, weight, 1e-5, group_size)
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("gated", [True, False])
def test_gated_norm_matches_transformers(gated: bool) -> None:
    module = NemotronHRMSNormGated(48, group_size=16, eps=1e-5)
    module.weight.copy_(torch.randn(48))
    x, gate = torch.randn(6, 48), torch.randn(6, 48) if gated else None
    out = gated_rms_norm(x, gate, module.weight, 1e-5, 16)
    torch.testing.assert_close(out, module(x, gate), rtol=1e-6, atol=1e-6)


def test_gated_norm_reads_a_strided_gate_and_keeps_bfloat16() -> None:
    projected = torch.randn(5, 128).bfloat16()
    x, gate = projected[:, 48:96], projected[:, :48]
    out = gated_rms_norm(x, gate, torch.ones(48).bfloat16(), 1e-5, 16)
    expected = gated_rms_norm(x.float(), gate.float(), torch.ones(48), 1e-5, 16)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-3)


def test_sizes_that_do_not_fit_are_refused() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(x, torch.ones(7), 1e-5)
    for gate, weight, group_size in ((None, 7, 4), (torch.zeros(2, 7), 8, 4), (None, 8, 3), (None, 8, 0)):
        with pytest.raises(ValueError, match="gated_rms_norm"):
            gated_rms_norm(x, gate, torch.ones(weight), 1e-5, group_size)
