"""Definition of the causal convolution over draft trees, in plain PyTorch."""

from __future__ import annotations

from typing import Literal

import torch

from turnkeep.kernels.causal_conv1d.reference import silu
from turnkeep.kernels.draft_tree import DraftTrees


def causal_conv1d_tree_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    trees: DraftTrees,
    activation: Literal["silu"] | None = None,
) -> torch.Tensor:
    """See `turnkeep.kernels.causal_conv1d.causal_conv1d_tree`."""
    if not trees.num_trees:
        return torch.empty_like(x)
    tail = weight.shape[1] - 1
    inputs = torch.cat((windows.float(), trees.padded(x.float())), dim=1).flatten(0, 1)
    places = trees.inputs_at(tail)
    picked = inputs.index_select(0, places.flatten()).view(tail + 1, *x.shape)  # newest first
    products = picked.mul_(weight.T.flip(0)[:, None])
    y = products[tail]
    for m in range(tail - 1, -1, -1):  # the same order of sums as along a sequence
        y += products[m]
    if bias is not None:
        y += bias
    if activation == "silu":
        y = silu(y)
    return y.to(x.dtype)
