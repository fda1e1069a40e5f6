"""Sorted prefixes of rows of logits, and how many of their tokens the filters keep.

min_p, top_k and top_p each keep the first few tokens of the order "largest logit first, lowest id first among equal
ones", so a row's kept set is a number. It depends on the row alone, never on noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from turnkeep.kernels.sampling.sampling_batch import SamplingRow


def likeliest(logits: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first num_tokens values and ids of each row, largest first, lowest id first among equal ones: [K, n]."""
    if num_tokens < logits.shape[1]:
        values, ids = logits.topk(num_tokens, dim=-1)
        # topk picks any of several equal values at the cut, so it is trusted only where nothing equal was left out.
        if num_tokens == 0 or bool(((logits >= values[:, -1:]).sum(-1) == num_tokens).all()):
            ids, order = ids.sort(dim=-1)
            values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
            return values, ids.gather(1, order)
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :num_tokens], ids[:, :num_tokens]


def num_kept(scaled: torch.Tensor, prefix: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor | None:
    """How many tokens of the order each row keeps, int64 [K]; None where the prefix is too short to tell.

    scaled [K, V] is logits / temperature, shifted so that the largest of a row is 0; prefix [K, n] its largest values.
    """
    vocab_size, length = scaled.shape[1], prefix.shape[1]
    device = scaled.device
    limit = torch.tensor([min(row.top_k or vocab_size, vocab_size) for row in rows], device=device)
    if any(row.min_p > 0.0 for row in rows):
        floor = torch.tensor([math.log(row.min_p) if row.min_p > 0.0 else -torch.inf for row in rows], device=device)
        limit = torch.minimum(limit, (scaled >= floor[:, None]).sum(-1))  # [K] tokens left by min_p and top_k
    if all(row.top_p >= 1.0 for row in rows):
        return limit if bool((limit <= length).all()) else None

    mass = prefix.to(torch.float64).exp_()
    cumulative = mass.cumsum(-1)
    total = cumulative.gather(1, (limit - 1).clamp_(max=length - 1)[:, None]).squeeze(1)
    if any(row.top_k == 0 and row.min_p == 0.0 for row in rows):
        total = torch.where(limit == vocab_size, scaled.to(torch.float64).exp_().sum(-1), total)
    top_p = torch.tensor([row.top_p if row.top_p < 1.0 else torch.inf for row in rows], dtype=torch.float64)
    # A token stays while the mass before it is short of top_p: the one that crosses the line is kept.
    inside = cumulative - mass < (top_p.to(device) * total)[:, None]
    inside &= torch.arange(length, device=device) < limit[:, None]
    counts = inside.sum(-1).clamp(min=1)
    decided = (limit <= length) | ((limit == vocab_size) & (counts < length))
    return counts if bool(decided.all()) else None
