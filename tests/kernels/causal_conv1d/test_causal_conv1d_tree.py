"""The convolution over trees: the bits of the sequence along every node's path, and the window that follows."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from draft_trees import SHAPES, make_parents, path

from turnkeep.kernels.causal_conv1d import causal_conv1d, causal_conv1d_tree
from turnkeep.kernels.draft_tree import DraftTrees

CHANNELS = 45  # no multiple of a vector width: elements fall on all places of a vector


@pytest.mark.parametrize("width", [1, 2, 4, 5])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
def test_nodes_get_the_bits_of_the_sequence_along_their_path(
    width: int, with_bias: bool, activation: Literal["silu"] | None
) -> None:
    trees = [make_parents(shape, count) for shape, count in zip(SHAPES, (6, 9, 1, 17, 12), strict=True)]
    num_nodes = [len(parents) for parents in trees]
    rows = [3, 1, 7, 2, 5]
    weight, bias = torch.randn(CHANNELS, width), torch.randn(CHANNELS) if with_bias else None
    windows = torch.full((9, CHANNELS, width - 1), torch.nan)
    windows[rows] = torch.randn(5, CHANNELS, width - 1)
    x = torch.randn(sum(num_nodes), CHANNELS)
    packed = DraftTrees(num_nodes, [parent for own in trees for parent in own])
    y = causal_conv1d_tree(x, weight, bias, windows[rows].transpose(1, 2), packed, activation)
    for row, own, nodes, outputs in zip(rows, trees, x.split(num_nodes), y.split(num_nodes), strict=True):
        for node in range(len(own)):
            along = nodes[path(own, node)]
            chain = causal_conv1d(
                along, weight, bias, windows.clone(), torch.tensor([row]), [len(along)], [9], activation
            )
            assert torch.equal(outputs[node], chain[-1])


def test_bfloat16_inputs_give_bfloat16() -> None:
    x, weight = torch.randn(3, CHANNELS).bfloat16(), torch.randn(CHANNELS, 4)
    y = causal_conv1d_tree(x, weight, None, torch.zeros(1, 3, CHANNELS), DraftTrees([3], [-1, 0, 0]))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y[0], (x[0].float() * weight[:, 3]).bfloat16())


def test_no_trees_give_nothing() -> None:
    empty, windows = torch.randn(0, CHANNELS), torch.zeros(0, 3, CHANNELS)
    assert causal_conv1d_tree(empty, torch.randn(CHANNELS, 4), None, windows, DraftTrees([], [])).shape == empty.shape


@pytest.mark.parametrize(("num_nodes", "shape"), [([2], (2, 3, CHANNELS)), ([1], (1, 3, CHANNELS)), ([2], (1, 3, 44))])
def test_trees_that_do_not_fit_are_refused(num_nodes: list[int], shape: tuple[int, ...]) -> None:
    x, weight, trees = torch.randn(2, CHANNELS), torch.randn(CHANNELS, 4), DraftTrees(num_nodes, [-1] * sum(num_nodes))
    with pytest.raises(ValueError, match="causal_conv1d_tree"):
        causal_conv1d_tree(x, weight, None, torch.zeros(shape), trees)
