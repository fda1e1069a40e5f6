"""Draft trees of every shape, and the path of every node."""

from __future__ import annotations

import random

SHAPES = ("chain", "star", "random", "bushy", "deep")


def make_parents(shape: str, num_nodes: int, seed: int = 0) -> list[int]:
    """Parents of one tree, parents first; the root has -1."""
    rng = random.Random(f"{shape} {num_nodes} {seed}")
    parents = [-1]
    for node in range(1, num_nodes):
        parents.append(
            {
                "chain": node - 1,
                "star": 0,
                "random": rng.randrange(node),
                "bushy": (node - 1) // 4,
                "deep": rng.randrange(max(node - 3, 0), node),
            }[shape]
        )
    return parents


def path(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both counted."""
    nodes = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]
