"""Inputs of the gated delta rule in every regime of decays, keys and strengths, and the rule itself in float64."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

DECAYS = ("mild", "strong", "mixed", "zero")
KEYS = ("random", "close", "same")


@dataclass(frozen=True)
class DeltaInputs:
    """Packed tokens: q, k [T, Hk, K], v [T, Hv, V], g, beta [T, Hv]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor

    def part(self, start: int, end: int) -> DeltaInputs:
        return DeltaInputs(*(tensor[start:end] for tensor in self.tensors()))

    def picked(self, tokens: list[int]) -> DeltaInputs:
        return DeltaInputs(*(tensor[tokens] for tensor in self.tensors()))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def random_state(self) -> torch.Tensor:
        return torch.randn(self.v.shape[1], self.k.shape[2], self.v.shape[2])

    def poisoned_states(self, num_rows: int = 24) -> torch.Tensor:
        return torch.full((num_rows, self.v.shape[1], self.k.shape[2], self.v.shape[2]), torch.nan)


def log_decays(regime: str, *shape: int) -> torch.Tensor:
    draws = torch.rand(shape)
    return -{
        "mild": draws * 0.2,
        "strong": draws * 20,
        "zero": draws * 1e-7,
        "mixed": torch.where(torch.rand(shape) < 0.5, torch.tensor(20.0), draws * 1e-3),
    }[regime]


def make_inputs(
    num_tokens: int,
    key_heads: int = 2,
    value_heads: int = 4,
    key_dim: int = 12,
    value_dim: int = 10,
    decay: str = "mild",
    keys: str = "random",
    max_beta: float = 1.0,
) -> DeltaInputs:
    k = torch.randn(num_tokens, key_heads, key_dim)
    if keys != "random":
        k = k[:1] + (0.01 * k if keys == "close" else 0.0 * k)
    return DeltaInputs(
        q=torch.randn(num_tokens, key_heads, key_dim),
        k=k,
        v=torch.randn(num_tokens, value_heads, value_dim),
        g=log_decays(decay, num_tokens, value_heads),
        beta=torch.rand(num_tokens, value_heads) * max_beta,
    )


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Token by token in float64: outputs, what every token wrote (u), and the state after every token."""
    q, k, v, g, beta = (tensor.double() for tensor in inputs.tensors())
    per_key = v.shape[1] // k.shape[1]
    q, k = (unit(t).repeat_interleave(per_key, dim=1) for t in (q, k))
    state, outputs, written, states = state.double(), [], [], []
    for t in range(v.shape[0]):
        state = state * g[t].exp()[:, None, None]
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * k.shape[2] ** -0.5)
        written.append(u)
        states.append(state)
    return torch.stack(outputs), torch.stack(written), states


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max |actual - expected| / max(1, max |expected|); NaN when anything read poison."""
    assert actual.shape == expected.shape
    gap = (actual.double() - expected.double()).abs().max()
    return float(gap / expected.double().abs().max().clamp(min=1.0))
