"""Mixtures of experts: routing against a slow definition, experts without tokens, and every layout of their weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from model_families import FAMILIES
from torch.nn import functional

from turnkeep.models.checkpoint_files import TensorsInMemory
from turnkeep.models.config import MLPConfig, ModelConfig, MoEConfig
from turnkeep.models.decoder import Decoder
from turnkeep.models.mixers.moe import MoEMixer
from turnkeep.models.weights import WeightsError, fill_decoder, random_tensors

HIDDEN_SIZE = 12
SIGMOID = MoEConfig(
    num_experts=8,
    num_chosen=3,
    expert_size=10,
    activation="relu2",
    is_gated=False,
    scores="sigmoid",
    normalises=True,
    weight_scale=2.5,
    num_groups=4,
    num_chosen_groups=2,
    has_correction_bias=True,
)
SOFTMAX = MoEConfig(
    num_experts=7,
    num_chosen=2,
    expert_size=10,
    activation="silu",
    is_gated=True,
    scores="softmax",
    normalises=False,
    shared=MLPConfig(14, "silu", is_gated=True, has_bias=False),
    has_shared_gate=True,
)
CONFIGS = {
    "sigmoid-grouped": SIGMOID,
    "sigmoid-latent": replace(SIGMOID, latent_size=6, has_latent_bias=True, num_groups=1, num_chosen_groups=1),
    "softmax-shared-gate": SOFTMAX,
    "softmax-normalised": replace(SOFTMAX, normalises=True, has_shared_gate=False),
    "all-experts": replace(SOFTMAX, num_chosen=7, shared=None, has_shared_gate=False),
}


@pytest.fixture
def make_mixer() -> Callable[[MoEConfig], MoEMixer]:
    def make(config: MoEConfig) -> MoEMixer:
        generator = torch.Generator().manual_seed(1)
        mixer = MoEMixer(config, HIDDEN_SIZE, torch.float32)
        for parameter in mixer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul(0.4))
        return mixer

    return make


def slow_experts(mixer: MoEMixer, x: torch.Tensor) -> torch.Tensor:
    """One token at a time, one expert at a time, every step in Python."""
    config, outputs = mixer.config, []
    for token in x:
        logits = mixer.router_weight @ token
        scores = logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(0)
        ranks = scores if mixer.correction_bias is None else scores + mixer.correction_bias
        size = config.num_experts // config.num_groups
        strengths = [sum(sorted(ranks[g * size : (g + 1) * size].tolist())[-2:]) for g in range(config.num_groups)]
        kept = sorted(range(config.num_groups), key=lambda g: -strengths[g])[: config.num_chosen_groups]
        allowed = range(config.num_experts) if config.num_groups == 1 else [e for e in range(8) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -ranks[e].item())[: config.num_chosen]
        total = sum(scores[e].item() for e in chosen) if config.normalises else 1.0
        inner = token
        if mixer.latent_down_weight is not None:
            inner = functional.linear(token, mixer.latent_down_weight, mixer.latent_down_bias)
        mixed = torch.zeros_like(inner)
        for expert in chosen:
            wide = mixer.experts_up_weight[expert] @ inner
            if config.is_gated:
                gate, up = wide.split(config.expert_size)
                wide = gate * gate.sigmoid() * up
            else:
                wide = wide.clamp(min=0) ** 2
            mixed += config.weight_scale * scores[expert] / total * (mixer.experts_down_weight[expert] @ wide)
        if mixer.latent_up_weight is not None:
            mixed = functional.linear(mixed, mixer.latent_up_weight, mixer.latent_up_bias)
        outputs.append(mixed)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_token_gets_the_weighted_sum_of_its_experts(name: str, make_mixer: Any) -> None:
    mixer = make_mixer(CONFIGS[name])
    x = torch.randn(37, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    expected = slow_experts(mixer, x)
    if mixer.shared is not None:
        shared = mixer.shared(x, None)
        if mixer.shared_gate_weight is not None:
            shared = shared * (x @ mixer.shared_gate_weight.T).sigmoid()
        expected = expected + shared
    with torch.inference_mode():
        torch.testing.assert_close(mixer(x, None), expected, atol=1e-5, rtol=1e-5)


def test_a_token_alone_gets_what_it_gets_in_a_batch(make_mixer: Any) -> None:
    mixer = make_mixer(SIGMOID)
    x = torch.randn(21, HIDDEN_SIZE, generator=torch.Generator().manual_seed(3))
    together = mixer(x, None)
    alone = torch.cat([mixer(x[i : i + 1], None) for i in range(21)])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)


def test_the_correction_bias_steers_the_choice_and_not_the_weights(make_mixer: Any) -> None:
    mixer = make_mixer(replace(SIGMOID, num_groups=1, num_chosen_groups=1))
    x = torch.randn(9, HIDDEN_SIZE, generator=torch.Generator().manual_seed(4))
    mixer.correction_bias.fill_(0.0)
    mixer.correction_bias[5] = 100.0
    weights, chosen = mixer.route(x)
    assert (chosen == 5).any(dim=1).all()
    torch.testing.assert_close(weights.sum(1), torch.full((9,), 2.5))


def test_an_expert_without_tokens_is_not_touched(make_mixer: Any) -> None:
    mixer = make_mixer(SIGMOID)
    x = torch.randn(1, HIDDEN_SIZE, generator=torch.Generator().manual_seed(5))
    expected, chosen = mixer(x, None), mixer.route(x)[1][0].tolist()
    for expert in set(range(8)) - set(chosen):
        mixer.experts_up_weight[expert] = torch.nan
        mixer.experts_down_weight[expert] = torch.nan
    assert torch.equal(mixer(x, None), expected)


def loaded(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(fill_decoder(config, TensorsInMemory(tensors), dtype="float32").named_parameters())


def assert_same(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    assert [name for name in ours if not torch.equal(ours[name], expected[name])] == []


def test_experts_stored_one_by_one_load_like_those_stored_together() -> None:
    config = ModelConfig.from_dict(FAMILIES["nemotron_h"][2])
    tensors = random_tensors(config, 1)
    apart = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".experts.")
        if stem:
            apart |= {f"{stem}.experts.{e}.{last}.weight": one for e, one in enumerate(tensor)}
        else:
            apart[name.replace("backbone.", "model.")] = tensor
    assert sum(".experts." in name for name in apart) == 2 * 5
    assert_same(loaded(config, apart), loaded(config, tensors))
    lost = next(name for name in apart if ".experts.3." in name)
    del apart[lost]
    with pytest.raises(WeightsError, match=r"missing \(1\): .*experts\.up_proj; unexpected \(4\)"):
        loaded(config, apart)


def test_published_granite_names_and_separate_gates_load_like_the_renamed_ones() -> None:
    config = ModelConfig.from_dict(FAMILIES["granitemoehybrid"][0])
    tensors = random_tensors(config, 1)
    expected = loaded(config, tensors)
    renamed = {
        "experts.gate_up_proj": "input_linear.weight",
        "experts.down_proj": "output_linear.weight",
        "router.weight": "router.layer.weight",
    }
    published = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition("block_sparse_moe.")
        published[f"{stem}block_sparse_moe.{renamed[last]}" if stem else name] = tensor
    assert published.keys() != tensors.keys()
    assert_same(loaded(config, published), expected)
    apart = {}
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                apart[name.replace("gate_up_proj", part)] = half
        else:
            apart[name] = tensor
    assert_same(loaded(config, apart), expected)


def test_multipliers_are_folded_into_the_weights_once() -> None:
    plain = FAMILIES["falcon_h1"][0]
    config = ModelConfig.from_dict(plain)
    tensors = random_tensors(config, 1)
    model = fill_decoder(config, TensorsInMemory(tensors), dtype="float32")
    assert isinstance(model, Decoder)
    prefix = "model.layers.0."
    k_rows = slice(6 * 8, 6 * 8 + 3 * 8)
    folded = dict(model.named_parameters())["layers.0.mixer.attention.qkv_proj_weight"][k_rows]
    torch.testing.assert_close(folded, tensors[f"{prefix}self_attn.k_proj.weight"] * 0.9 * 0.39)
    norm = tensors["model.final_layernorm.weight"] * 0.039
    torch.testing.assert_close(model.norm_weight.data, norm)
