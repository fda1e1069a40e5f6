"""The joint law of two tokens that come out of verified trees, against the target's own distribution.

Trees have depth two and three children a node, drafted with the target's noise from a disturbed distribution over a
vocabulary of twelve: a test with no more support than children would let wrong rules pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from turnkeep.kernels.sampling import SamplingRow, TreeToVerify, gumbel_noise_rows, verify_trees

VOCAB_SIZE = 12
NUM_CHILDREN = 3
BATCH = 2048
MIN_EXPECTED = 5.0  # rarer cells are counted together

_PARENTS = [-1, 0, 0, 0, *(1 + child // NUM_CHILDREN for child in range(NUM_CHILDREN**2))]


def _target() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the first token [V], and of the second after each first one [V, V]."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(VOCAB_SIZE, generator=generator) * 1.3, torch.randn(
        VOCAB_SIZE, VOCAB_SIZE, generator=generator
    ) * 1.3


def _own_row(rows: list[SamplingRow], path: Sequence[int]) -> SamplingRow | None:
    """Of the token after so many drafted ones; none beyond the second."""
    return rows[len(path)] if len(path) < len(rows) else None


def verified_pairs(num_draws: int, *, temperature: float, top_p: float, seed: int) -> tuple[torch.Tensor, float]:
    """First and second token of each draw [num_draws, 2], and the share of draws whose first draft was accepted."""
    first, second = _target()
    generator = torch.Generator().manual_seed(4)
    draft_first = first + 0.5 * torch.randn(first.shape, generator=generator)
    draft_second = second + 0.5 * torch.randn(second.shape, generator=generator)
    pairs, num_accepted = [], 0
    for begin in range(0, num_draws, BATCH):
        seeds = seed + torch.arange(begin, min(begin + BATCH, num_draws))
        count = len(seeds)
        noise = [gumbel_noise_rows(seeds, torch.full_like(seeds, position), VOCAB_SIZE) for position in (1, 2)]
        children = (draft_first / temperature + noise[0]).topk(NUM_CHILDREN).indices  # [n, 3]
        scores = draft_second[children] / temperature + noise[1][:, None]
        grandchildren = scores.topk(NUM_CHILDREN).indices.flatten(1)  # [n, 9]
        logits = torch.zeros(count, len(_PARENTS), VOCAB_SIZE)
        logits[:, 0] = first
        logits[:, 1 : 1 + NUM_CHILDREN] = second[children]
        nodes = torch.cat((torch.zeros(count, 1, dtype=torch.int64), children, grandchildren), dim=1).tolist()
        rows = [
            [SamplingRow(position=position, seed=own, temperature=temperature, top_p=top_p) for position in (1, 2)]
            for own in seeds.tolist()
        ]
        trees = [TreeToVerify(own, _PARENTS, partial(_own_row, row)) for own, row in zip(nodes, rows, strict=True)]
        tokens = [found.token_ids for found in verify_trees(logits.flatten(0, 1), trees)]
        # Draws whose first token was not drafted get their second one from a plain decode.
        short = [index for index, own in enumerate(tokens) if len(own) == 1]
        num_accepted += count - len(short)
        plain = [TreeToVerify([tokens[index][0]], [-1], partial(_own_row, rows[index][1:])) for index in short]
        decoded = verify_trees(second[[tokens[index][0] for index in short]], plain) if short else []
        for index, found in zip(short, decoded, strict=True):
            tokens[index] = [*tokens[index], *found.token_ids]
        pairs.append(torch.tensor(tokens))
    return torch.cat(pairs), num_accepted / num_draws


def _law(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Probabilities after temperature and top_p, by their definitions, in float64: [..., V]."""
    probs = (logits.double() / temperature).softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True)
    kept = ordered.cumsum(-1) - ordered < top_p
    probs = torch.zeros_like(probs).scatter_(-1, order, torch.where(kept, ordered, 0.0))
    return probs / probs.sum(-1, keepdim=True)


def deviation_from_law(pairs: torch.Tensor, *, temperature: float, top_p: float) -> tuple[float, int]:
    """Chi-square of the pairs as standard deviations of a normal law (Wilson-Hilferty), and its freedom.

    Infinite when a pair of probability zero was drawn.
    """
    first, second = _target()
    joint = _law(first, temperature, top_p)[:, None] * _law(second, temperature, top_p)
    expected = joint.flatten() * len(pairs)
    counts = (pairs[:, 0] * VOCAB_SIZE + pairs[:, 1]).bincount(minlength=VOCAB_SIZE**2).double()
    if counts[expected == 0].sum() > 0:
        return math.inf, 0
    rare = expected < MIN_EXPECTED
    cells = list(zip(counts[~rare].tolist(), expected[~rare].tolist(), strict=True))
    if float(expected[rare].sum()) >= MIN_EXPECTED:
        cells.append((float(counts[rare].sum()), float(expected[rare].sum())))
    statistic = sum((count - want) ** 2 / want for count, want in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread), freedom
