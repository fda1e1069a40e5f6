"""The dense forward: equal to transformers, to the plain recurrence, and in the checkpoint's layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from turnkeep.models.demo.dense import DemoModel, initialize, load_config, load_model, segment_sums, ssd_scan
from turnkeep.models.demo.rendering import DIRECTORY

WEIGHTS = DIRECTORY / "model.safetensors"


def test_segment_sums_do_not_cancel_under_strong_decays() -> None:
    decays = torch.full((64,), -20.0)
    decays[40] = -1e-4
    sums = segment_sums(decays)
    assert sums[40, 39].item() == pytest.approx(-1e-4, rel=1e-6)
    assert torch.isneginf(sums[3, 4])
    assert torch.equal(sums.diagonal(), torch.zeros(64))


def test_the_chunked_scan_equals_the_recurrence() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, b, c = draw(2, 256, 4, 8), draw(2, 256, 2, 16), draw(2, 256, 2, 16)
    dt, a_log = torch.rand(2, 256, 4, generator=generator) * 2, torch.tensor([0.0, 1.0, 2.0, 3.0])
    state, expected = torch.zeros(2, 4, 8, 16), []
    for t in range(256):
        keys, queries = b[:, t].repeat_interleave(2, 1), c[:, t].repeat_interleave(2, 1)
        decay = torch.exp(dt[:, t] * -torch.exp(a_log))[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * keys[:, :, None]
        expected.append((state * queries[:, :, None]).sum(-1))
    torch.testing.assert_close(ssd_scan(x, dt, a_log, b, c), torch.stack(expected, 1), rtol=1e-4, atol=1e-4)


def test_transformers_loads_the_backbone_and_gives_the_same_logits(recwarn: pytest.WarningsRecorder) -> None:
    transformers = pytest.importorskip("transformers", reason="the comparison needs transformers")
    reference = transformers.NemotronHForCausalLM.from_pretrained(str(DIRECTORY), dtype=torch.float32).eval()
    model = load_model(DIRECTORY)
    ids = torch.randint(11, 1280, (2, 320), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (model.lm_head(model(ids)[0]) - reference(ids).logits).abs().max().item()
    assert difference <= 1e-4


def test_the_checkpoint_has_the_expected_names_shapes_and_size() -> None:
    hidden, inner = 256, 640
    with safe_open(str(WEIGHTS), "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        dtypes = {file.get_slice(name).get_dtype() for name in shapes}
    mtp = {name: shape for name, shape in shapes.items() if name.startswith("mtp.")}
    assert mtp == {
        "mtp.layers.0.enorm.weight": (hidden,),
        "mtp.layers.0.hnorm.weight": (hidden,),
        "mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden),
        "mtp.layers.0.norm.weight": (hidden,),
        "mtp.layers.0.mixer.q_proj.weight": (256, hidden),
        "mtp.layers.0.mixer.k_proj.weight": (128, hidden),
        "mtp.layers.0.mixer.v_proj.weight": (128, hidden),
        "mtp.layers.0.mixer.o_proj.weight": (hidden, 256),
        "mtp.layers.1.norm.weight": (hidden,),
        "mtp.layers.1.mixer.up_proj.weight": (inner, hidden),
        "mtp.layers.1.mixer.down_proj.weight": (hidden, inner),
        "mtp.layers.1.final_layernorm.weight": (hidden,),
    }
    assert {"backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight"} <= shapes.keys()
    assert shapes["backbone.layers.0.mixer.conv1d.weight"] == (768, 1, 4)
    assert dtypes == {"BF16"}
    assert 3e6 <= sum(math.prod(shape) for shape in shapes.values()) <= 6e6
    assert WEIGHTS.stat().st_size < 15e6


def test_the_mtp_output_depends_on_the_next_token_and_on_nothing_later() -> None:
    model = DemoModel(load_config(Path(DIRECTORY)))
    initialize(model, 1)
    ids = torch.randint(11, 1280, (1, 64), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, 30] = 11 if int(ids[0, 30]) != 11 else 12
    with torch.no_grad():
        (main, ahead), (main_changed, ahead_changed) = model(ids), model(changed)
    assert torch.equal(main[0, :30], main_changed[0, :30])
    assert torch.equal(ahead[0, :29], ahead_changed[0, :29])
    assert not torch.allclose(ahead[0, 29], ahead_changed[0, 29])
