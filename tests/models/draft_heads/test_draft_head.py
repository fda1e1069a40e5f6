"""The draft heads against plain formulas: the demo model's against its training code, the others against a formula
written out over whole sequences in float64. Pools start as NaN, so that reading what nobody wrote shows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from model_families import FAMILIES
from torch.nn import functional

from turnkeep.models.checkpoint_files import SafetensorsFolder, TensorsInMemory
from turnkeep.models.config import ModelConfig
from turnkeep.models.demo.dense import load_config, load_model
from turnkeep.models.demo.rendering import DIRECTORY
from turnkeep.models.draft_heads.draft_head import DraftHead
from turnkeep.models.draft_heads.loading import fill_draft_head, random_draft_tensors
from turnkeep.models.draft_heads.paged_entries import FIRST_ENTRY, PagedEntries
from turnkeep.models.tiny import tiny_config

PAGE_SIZE = 8
NEMOTRON = FAMILIES["nemotron_h"][0] | {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}
QWEN_NEXT = FAMILIES["qwen3_next"][0] | {"rope_parameters": None, "rope_theta": 500.0}
QWEN_DENSE = FAMILIES["qwen3_5_text"][0] | {"mtp_num_hidden_layers": 1}

Weights = Mapping[str, torch.Tensor]


class HeadDriver:
    """Runs packed passes over hand-made pools; sequence i has pages of its own, in no order."""

    def __init__(self, head: DraftHead, num_sequences: int, max_tokens: int) -> None:
        self.head = head
        config, pages_each = head.config, -(-max_tokens // PAGE_SIZE)
        ids = torch.randperm(num_sequences * pages_each, generator=torch.Generator().manual_seed(1)) + 1
        self.page_table = ids.view(num_sequences, pages_each)
        shape = (2, len(ids) + 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.kv = [torch.full(shape, torch.nan, dtype=head.dtype) for _ in range(config.num_attention_layers)]
        for pool in self.kv:
            pool[:, 0] = 0

    def step(
        self, work: Sequence[tuple[int, int, int]], embedded: torch.Tensor, hidden: torch.Tensor
    ) -> list[torch.Tensor]:
        """Entries [start, end) of each (sequence, start, end), decodes first; embedded and hidden [S, n, size] of
        whole sequences."""
        chosen = torch.tensor([sequence for sequence, _, _ in work])
        owners = torch.tensor([r for r, (_, start, end) in enumerate(work) for _ in range(start, end)])
        positions = torch.tensor([position for _, start, end in work for position in range(start, end)])
        table = self.page_table[chosen]
        seq_lens = [end - start for _, start, end in work]
        attention = PagedEntries(
            kv=self.kv,
            page_table=table,
            seq_lens=seq_lens,
            context_lens=[start for _, start, _ in work],
            num_decodes=next((r for r, length in enumerate(seq_lens) if length != 1), len(work)),
            slot_mapping=table[owners, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE,
        )
        own = chosen[owners]
        return list(
            self.head(embedded[own, positions], hidden[own, positions - 1], positions, attention).split(seq_lens)
        )


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] each; key heads are repeated for their query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[2] ** -0.5
    scores = scores.masked_fill(torch.ones(len(q), len(q)).triu(1).bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)


def rotated(x: torch.Tensor, theta: float, width: int) -> torch.Tensor:
    """The first `width` channels of every head turned, pairs half a width apart; positions count from 1."""
    angles = torch.arange(1, len(x) + 1)[:, None] * theta ** -(torch.arange(0, width, 2) / width).double()
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x[..., : width // 2], x[..., width // 2 : width], x[..., width:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def qwen_experts(x: torch.Tensor, w: Weights, prefix: str, num_chosen: int) -> torch.Tensor:
    scores, chosen = (x @ w[prefix + "gate.weight"].T).softmax(-1).topk(num_chosen)
    scores = scores / scores.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for t, token in enumerate(x):
        for score, expert in zip(scores[t], chosen[t].tolist(), strict=True):
            gate, up = (w[prefix + "experts.gate_up_proj"][expert] @ token).chunk(2)
            out[t] += score * (w[prefix + "experts.down_proj"][expert] @ (functional.silu(gate) * up))
    return out + qwen_mlp(x, w, prefix + "shared_expert.") * (x @ w[prefix + "shared_expert_gate.weight"].T).sigmoid()


def qwen_mlp(x: torch.Tensor, w: Weights, prefix: str) -> torch.Tensor:
    wide = functional.silu(x @ w[prefix + "gate_proj.weight"].T) * (x @ w[prefix + "up_proj.weight"].T)
    return wide @ w[prefix + "down_proj.weight"].T


def qwen_formula(values: Mapping[str, Any], w: Weights, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """One Qwen3-Next block over pairs [T, size] in float64; every norm of it is stored around 0."""
    eps, heads, dim = values["rms_norm_eps"], values["num_attention_heads"], values["head_dim"]
    stored = lambda name: w[f"mtp.{name}.weight"] + 1.0  # noqa: E731
    joined = (
        norm(embedded, stored("pre_fc_norm_embedding"), eps),
        norm(hidden, stored("pre_fc_norm_hidden"), eps),
    )
    residual = torch.cat(joined, -1) @ w["mtp.fc.weight"].T
    x = norm(residual, stored("layers.0.input_layernorm"), eps)
    q, k, v = (x @ w[f"mtp.layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
    q, gate = q.view(len(x), heads, 2 * dim).chunk(2, -1)  # head by head: its query, its gate
    q = norm(q, stored("layers.0.self_attn.q_norm"), eps)
    k = norm(k.view(len(x), -1, dim), stored("layers.0.self_attn.k_norm"), eps)
    theta, width = values.get("rope_theta") or 10000.0, dim // 4
    mixed = causal(rotated(q, theta, width), rotated(k, theta, width), v.view(len(x), -1, dim))
    residual = residual + (mixed * gate.flatten(1).sigmoid()) @ w["mtp.layers.0.self_attn.o_proj.weight"].T
    x = norm(residual, stored("layers.0.post_attention_layernorm"), eps)
    if "num_experts" in values:
        residual = residual + qwen_experts(x, w, "mtp.layers.0.mlp.", values["num_experts_per_tok"])
    else:
        residual = residual + qwen_mlp(x, w, "mtp.layers.0.mlp.")
    return norm(residual, stored("norm"), eps)


def nemotron_formula(
    values: Mapping[str, Any], w: Weights, embedded: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """An attention layer that joins, then experts with a squared ReLU, over pairs [T, size] in float64."""
    eps, dim = values["layer_norm_epsilon"], values["head_dim"]
    names = ("enorm", "hnorm")
    both = [norm(x, w[f"mtp.layers.0.{n}.weight"], eps) for x, n in zip((embedded, hidden), names, strict=True)]
    residual = torch.cat(both, -1) @ w["mtp.layers.0.eh_proj.weight"].T
    x = norm(residual, w["mtp.layers.0.norm.weight"], eps)
    q, k, v = ((x @ w[f"mtp.layers.0.mixer.{name}_proj.weight"].T).view(len(x), -1, dim) for name in "qkv")
    residual = residual + causal(q, k, v) @ w["mtp.layers.0.mixer.o_proj.weight"].T
    x = norm(residual, w["mtp.layers.1.norm.weight"], eps)
    prefix = "mtp.layers.1.mixer."
    scores = (x @ w[prefix + "gate.weight"].T).sigmoid()
    chosen = (scores + w[prefix + "gate.e_score_correction_bias"]).topk(values["num_experts_per_tok"]).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * values["routed_scaling_factor"]
    shared = (x @ w[prefix + "shared_experts.up_proj.weight"].T).relu().square()
    out = shared @ w[prefix + "shared_experts.down_proj.weight"].T
    for t, token in enumerate(x):
        for weight, expert in zip(weights[t], chosen[t].tolist(), strict=True):
            wide = (w[prefix + "experts.up_proj"][expert] @ token).relu().square()
            out[t] += weight * (w[prefix + "experts.down_proj"][expert] @ wide)
    return norm(residual + out, w["mtp.layers.1.final_layernorm.weight"], eps)


FORMULAS = {
    "nemotron_h": (NEMOTRON, nemotron_formula),
    "qwen3_next": (QWEN_NEXT, qwen_formula),
    "qwen3_5_text": (QWEN_DENSE, qwen_formula),
}


def random_cuts(seed: int, start: int, end: int) -> list[int]:
    inner = random.Random(seed).sample(range(start + 1, end), k=5)
    return [start, *sorted(inner), end]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_head_equals_its_formula_however_its_tokens_are_cut_and_packed(name: str) -> None:
    values, formula = FORMULAS[name]
    config = ModelConfig.from_dict(values)
    tensors = random_draft_tensors(config, 3)
    head = fill_draft_head(config, TensorsInMemory(tensors), dtype="float32")
    length, size = 41, config.hidden_size
    generator = torch.Generator().manual_seed(4)
    embedded, hidden = torch.randn(2, 3, length, size, generator=generator).unbind(0)
    wide = {key: tensor.double() for key, tensor in tensors.items()}
    expected = torch.stack(
        [formula(values, wide, e[1:].double(), h[:-1].double()) for e, h in zip(embedded, hidden, strict=True)]
    )
    driver = HeadDriver(head, 3, length)
    (whole,) = driver.step([(0, FIRST_ENTRY, length)], embedded, hidden)
    torch.testing.assert_close(whole.double(), expected[0], atol=2e-5, rtol=2e-5)
    cuts = random_cuts(5, FIRST_ENTRY, length)
    for start, end in pairwise(cuts):
        (piece,) = driver.step([(1, start, end)], embedded, hidden)
        torch.testing.assert_close(piece.double(), expected[1, start - 1 : end - 1], atol=2e-5, rtol=2e-5)
    driver.step([(2, FIRST_ENTRY, 20)], embedded, hidden)
    driver.step([(1, FIRST_ENTRY, 30)], embedded, hidden)
    for position in range(20, 25):
        work = [(2, position, position + 1), (1, position + 10, position + 11), (0, 30, length)]
        for (sequence, start, end), piece in zip(work, driver.step(work, embedded, hidden), strict=True):
            torch.testing.assert_close(piece.double(), expected[sequence, start - 1 : end - 1], atol=2e-5, rtol=2e-5)


def test_the_demo_models_head_equals_the_one_it_was_trained_as() -> None:
    dense = load_model(DIRECTORY)
    config = ModelConfig.from_dict(load_config(DIRECTORY))
    head = fill_draft_head(config, SafetensorsFolder(DIRECTORY), dtype="float32")
    ids = torch.tensor([random.Random(6).choices(range(config.vocab_size), k=64)])
    with torch.inference_mode():
        hidden, ahead = dense(ids)
        embedded = dense.backbone.embeddings(ids)
    driver = HeadDriver(head, 1, 64)
    for start, end in ((1, 30), (30, 31), (31, 64)):
        (piece,) = driver.step([(0, start, end)], embedded, hidden)
        torch.testing.assert_close(piece, ahead[0, start - 1 : end - 1], atol=1e-4, rtol=1e-4)


def test_an_entry_depends_on_the_tokens_up_to_its_own_alone() -> None:
    values = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "mlp"]}
    config = ModelConfig.from_dict(tiny_config("hybrid") | values)
    head = fill_draft_head(config, TensorsInMemory(random_draft_tensors(config, 3)), dtype="float32")
    embedded, hidden = torch.randn(2, 2, 24, config.hidden_size, generator=torch.Generator().manual_seed(1)).unbind(0)
    embedded[1, :11], hidden[1, :10] = embedded[0, :11], hidden[0, :10]
    driver = HeadDriver(head, 2, 24)
    driver.step([(0, FIRST_ENTRY, 24)], embedded, hidden)
    driver.step([(1, FIRST_ENTRY, 24)], embedded, hidden)
    first, second = (driver.kv[0][:, driver.page_table[s]].flatten(1, 2) for s in (0, 1))
    torch.testing.assert_close(first[:, 1:11], second[:, 1:11], atol=1e-6, rtol=1e-6)
    assert not torch.isclose(first[:, 11], second[:, 11]).any()
