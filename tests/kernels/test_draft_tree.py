"""Trees are looked at once, when they are made."""

from __future__ import annotations

import pytest
import torch
from draft_trees import SHAPES, make_parents, path

from turnkeep.kernels.draft_tree import DraftTrees


def test_ancestors_depths_and_padding_are_those_of_the_trees() -> None:
    own = [make_parents(shape, count) for shape, count in zip(SHAPES, (6, 9, 1, 17, 12), strict=True)]
    trees = DraftTrees([len(parents) for parents in own], [parent for parents in own for parent in parents])
    assert trees.depths == [len(path(parents, node)) - 1 for parents in own for node in range(len(parents))]
    for parents, ancestors in zip(own, trees.ancestors, strict=True):
        for node in range(len(parents)):
            assert ancestors[node].nonzero().flatten().tolist() == path(parents, node)
    packed = torch.randn(45, 3)
    assert torch.equal(trees.packed(trees.padded(packed)), packed)
    assert torch.equal(trees.padded(packed)[1, :9], packed[6:15])


@pytest.mark.parametrize(
    ("num_nodes", "parents"), [([3], [-1, 1, 0]), ([3], [-1, 0, -2]), ([1, 2], [-1, 0, 0]), ([2], [-1]), ([0], [])]
)
def test_what_is_no_tree_is_refused(num_nodes: list[int], parents: list[int]) -> None:
    with pytest.raises(ValueError, match=r"trees of|earlier node"):
        DraftTrees(num_nodes, parents)
