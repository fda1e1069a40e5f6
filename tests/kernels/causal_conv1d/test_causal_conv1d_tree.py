"""The convolution over trees: the bits of the sequence along every node's path, and the window that follows."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from draft_trees import SHAPES, make_parents, path

from turnkeep.kernels.causal_conv1d import causal_conv1d, causal_conv1d_fold, causal_conv1d_tree

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
    before = windows.clone()
    x = torch.randn(sum(num_nodes), CHANNELS)
    parents = torch.tensor([parent for own in trees for parent in own])
    y = causal_conv1d_tree(x, weight, bias, windows, torch.tensor(rows), num_nodes, parents, activation)
    assert torch.equal(windows.nan_to_num(), before.nan_to_num())
    for row, own, nodes, outputs in zip(rows, trees, x.split(num_nodes), y.split(num_nodes), strict=True):
        for node in range(len(own)):
            along = nodes[path(own, node)]
            chain = causal_conv1d(
                along, weight, bias, windows.clone(), torch.tensor([row]), [len(along)], [9], activation
            )
            assert torch.equal(outputs[node], chain[-1])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_window_after_an_accepted_path_is_that_of_the_sequence(width: int) -> None:
    lens = [1, 2, 7, 0, 3]  # shorter than the window, longer, nothing
    sources, targets = torch.tensor([3, 1, 7, 2, 5]), torch.tensor([3, 8, 7, 6, 1])
    windows = torch.randn(9, CHANNELS, width - 1)
    x = torch.randn(sum(lens), CHANNELS)
    joined = [torch.cat((windows[s].T, own)) for s, own in zip(sources.tolist(), x.split(lens), strict=True)]
    before = windows.clone()
    causal_conv1d_fold(x, windows, sources, targets, lens)
    for target, inputs in zip(targets.tolist(), joined, strict=True):
        assert torch.equal(windows[target], inputs[len(inputs) - (width - 1) :].T)
    untouched = [row for row in range(9) if row not in targets.tolist()]
    assert torch.equal(windows[untouched], before[untouched])


def test_bfloat16_inputs_give_bfloat16() -> None:
    x, weight = torch.randn(3, CHANNELS).bfloat16(), torch.randn(CHANNELS, 4)
    windows = torch.zeros(2, CHANNELS, 3)
    y = causal_conv1d_tree(x, weight, None, windows, torch.tensor([1]), [3], torch.tensor([-1, 0, 0]))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y[0], (x[0].float() * weight[:, 3]).bfloat16())


def test_no_trees_give_nothing() -> None:
    empty, rows = torch.randn(0, CHANNELS), torch.tensor([], dtype=torch.int64)
    windows = torch.zeros(2, CHANNELS, 3)
    assert causal_conv1d_tree(empty, torch.randn(CHANNELS, 4), None, windows, rows, [], rows).shape == (0, CHANNELS)
    causal_conv1d_fold(empty, windows, rows, rows, [])
    assert not windows.any()


@pytest.mark.parametrize(
    ("parents", "num_nodes", "rows"),
    [([-1, 1], [2], [1]), ([-1, 0], [1], [1]), ([-1, 0], [1, 1], [1, 2]), ([-1, 0], [2], [1, 2]), ([-1], [2], [1])],
)
def test_trees_that_do_not_fit_are_refused(parents: list[int], num_nodes: list[int], rows: list[int]) -> None:
    x, weight, windows = torch.randn(2, CHANNELS), torch.randn(CHANNELS, 4), torch.zeros(4, CHANNELS, 3)
    with pytest.raises(ValueError, match="causal_conv1d_tree"):
        causal_conv1d_tree(x, weight, None, windows, torch.tensor(rows), num_nodes, torch.tensor(parents))


@pytest.mark.parametrize(
    ("channels", "targets", "lens"), [(CHANNELS + 1, [1], [2]), (CHANNELS, [1, 2], [2]), (CHANNELS, [1], [3])]
)
def test_folds_that_do_not_fit_are_refused(channels: int, targets: list[int], lens: list[int]) -> None:
    with pytest.raises(ValueError, match="causal_conv1d_fold"):
        causal_conv1d_fold(
            torch.randn(2, channels), torch.zeros(4, CHANNELS, 3), torch.tensor([1]), torch.tensor(targets), lens
        )
