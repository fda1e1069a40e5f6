"""Drafted trees over a small vocabulary: random ones, with a right path hidden in them, or drawn with the noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from turnkeep.kernels.sampling import SamplingRow, gumbel_noise_rows


def random_tree(
    root: int, num_nodes: int, vocab_size: int, right: Sequence[int], generator: torch.Generator
) -> tuple[list[int], list[int]]:
    """Token ids and parents of a random tree that contains the tokens `right` as a path below the root."""
    token_ids, parents = [root], [-1]
    at, remaining = 0, list(right)
    while len(token_ids) < num_nodes:
        parent = int(torch.randint(len(token_ids), (1,), generator=generator))
        token = int(torch.randint(vocab_size, (1,), generator=generator))
        if remaining and (parent == at or num_nodes - len(token_ids) <= len(remaining)):
            parent, token = at, remaining.pop(0)
            at = len(token_ids)
        if (parent, token) in zip(parents, token_ids, strict=True):
            continue
        token_ids.append(token)
        parents.append(parent)
    return token_ids, parents


def draft_from_noise(
    model: Callable[[Sequence[int]], torch.Tensor],
    known: list[int],
    row: SamplingRow,
    *,
    num_nodes: int,
    num_children: int,
    generator: torch.Generator,
) -> tuple[list[int], list[int]]:
    """A tree grown breadth first by a draft model that is nearly right, children by log q + the target's noise."""
    token_ids, parents, paths = [known[-1]], [-1], [list(known)]
    for parent in range(num_nodes):
        logits = model(paths[parent])
        scores = logits + 0.3 * torch.randn(logits.shape, generator=generator)
        if row.temperature > 0:
            position = torch.tensor([row.position + len(paths[parent]) - len(known)])
            scores = scores / row.temperature + gumbel_noise_rows(torch.tensor([row.seed]), position, len(logits))[0]
        for token in scores.topk(num_children).indices.tolist():
            if len(token_ids) < num_nodes:
                token_ids.append(token)
                parents.append(parent)
                paths.append([*paths[parent], token])
    return token_ids, parents
