"""Growth of draft trees against the best set of nodes found by looking at all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turnkeep.engine.speculation.tree_growth import Frontier, TreeGrowth
from turnkeep.scheduler.drafts import DraftTree, TreeGrant

VOCAB = 50


class Guesses:
    """Children of any path, as a function of the path: what a draft head would say."""

    def __init__(self, seed: int, num_children: int) -> None:
        self.seed = seed
        self.num_children = num_children

    def children(self, request: int, path: tuple[int, ...]) -> tuple[list[int], list[float]]:
        rng = np.random.default_rng([self.seed, request, *path, len(path)])
        token_ids = rng.choice(VOCAB, self.num_children, replace=False)
        mass = np.sort(rng.exponential(size=self.num_children + 1) ** 3)[::-1]
        return token_ids.tolist(), np.log(mass / mass.sum() + 1e-12)[: self.num_children].tolist()

    def grown(self, num_requests: int, grant: TreeGrant, least: float = 1e-9) -> list[DraftTree | None]:
        growth = TreeGrowth(num_requests, grant, least)
        paths: list[list[tuple[int, ...]]] = [[()] for _ in range(num_requests)]
        for depth in range(1, grant.max_depth + 1):
            found = [[self.children(r, path) for path in own] for r, own in enumerate(paths)]
            token_ids = np.array([[tokens for tokens, _ in own] for own in found])
            growth.add(token_ids, np.array([[edges for _, edges in own] for own in found], dtype=np.float32))
            frontier = growth.frontier() if depth < grant.max_depth else None
            if frontier is None:
                break
            paths = descended(paths, frontier)
        return growth.trees()

    def all_nodes(self, request: int, max_depth: int) -> dict[tuple[int, ...], float]:
        """The probability of every path of up to max_depth tokens."""
        found: dict[tuple[int, ...], float] = {}
        level: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(max_depth):
            deeper: dict[tuple[int, ...], float] = {}
            for path, probability in level.items():
                for token, edge in zip(*self.children(request, path), strict=True):
                    deeper[(*path, token)] = probability * float(np.exp(edge))
            found |= deeper
            level = deeper
        return found


def descended(paths: list[list[tuple[int, ...]]], frontier: Frontier) -> list[list[tuple[int, ...]]]:
    return [
        [(*own[row], token) for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)]
        for own, rows, tokens in zip(paths, frontier.rows, frontier.token_ids, strict=True)
    ]


def paths_of(tree: DraftTree | None) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    if tree is None:
        return {}
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        assert -1 <= parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, tree.probabilities, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_requests=st.integers(1, 4),
    num_nodes=st.integers(1, 24),
    limit=st.integers(1, 12),
    max_depth=st.integers(1, 4),
)
def test_the_trees_of_all_requests_are_the_best_nodes_there_are(
    seed: int, num_requests: int, num_nodes: int, limit: int, max_depth: int
) -> None:
    guesses = Guesses(seed, num_children=3)
    # As many nodes of a level may have children as there are, so nothing is missed.
    grant = TreeGrant(num_nodes, limit, max_depth, max_children=27)
    trees = guesses.grown(num_requests, grant)
    candidates: list[float] = []
    for request, tree in enumerate(trees):
        expected = guesses.all_nodes(request, max_depth)
        candidates += sorted(expected.values(), reverse=True)[:limit]
        for path, probability in paths_of(tree).items():
            assert probability == pytest.approx(expected[path], rel=1e-4)
        assert tree is None or list(tree.probabilities) == sorted(tree.probabilities, reverse=True)
        assert tree is None or tree.num_nodes <= limit
    best = sorted(candidates, reverse=True)[:num_nodes]
    chosen = sorted((p for tree in trees if tree for p in tree.probabilities), reverse=True)
    assert chosen == pytest.approx(best, rel=1e-4)


def test_any_number_of_first_nodes_is_the_best_tree_of_that_size() -> None:
    guesses = Guesses(5, num_children=3)
    (tree,) = guesses.grown(1, TreeGrant(20, 20, 4, 27))
    assert tree is not None
    for count in range(1, 20):
        (small,) = guesses.grown(1, TreeGrant(count, count, 4, 27))
        assert paths_of(small).keys() == paths_of(tree.first(count)).keys()


def test_nodes_that_cannot_pay_are_neither_proposed_nor_given_children() -> None:
    growth = TreeGrowth(2, TreeGrant(32, 32, 7, 4), least_probability=0.1)
    edges = np.log([[[0.95, 0.03]], [[0.02, 0.01]]]).astype(np.float32)
    growth.add(np.array([[[7, 8]], [[5, 6]]]), edges)
    frontier = growth.frontier()
    assert frontier is not None
    assert frontier.token_ids.shape == (2, 1)
    assert frontier.token_ids[0, 0] == 7
    growth.add(np.array([[[3, 4]], [[3, 4]]]), np.log([[[0.05, 0.01]], [[0.9, 0.1]]]).astype(np.float32))
    assert growth.frontier() is None
    first, second = growth.trees()
    assert first == DraftTree((7,), (-1,), first.probabilities) if first else False
    assert second is None


def test_a_certain_child_stands_behind_its_parent() -> None:
    growth = TreeGrowth(1, TreeGrant(4, 4, 4, 2))
    for depth in range(1, 5):
        growth.add(np.array([[[1, 2]]]), np.array([[[0.0, -30.0]]], dtype=np.float32))
        frontier = growth.frontier()
        assert (frontier is None) == (depth == 4)  # four nodes are certain, others have no place beside them
        assert frontier is None or frontier.token_ids.tolist() == [[1]]
    (tree,) = growth.trees()
    assert tree is not None
    assert (tree.token_ids, tree.parents) == ((1, 1, 1, 1), (-1, 0, 1, 2))


def test_a_node_that_others_have_pushed_out_gets_no_children() -> None:
    growth = TreeGrowth(1, TreeGrant(num_nodes=2, max_nodes_per_request=2, max_depth=3, max_children=4))
    growth.add(np.array([[[1, 2, 3]]]), np.log([[[0.5, 0.3, 0.2]]]).astype(np.float32))
    frontier = growth.frontier()
    assert frontier is not None
    assert frontier.token_ids.tolist() == [[1]]  # children of 2 would be worth no more than 2, the last that is taken
