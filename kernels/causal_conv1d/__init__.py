"""Causal depthwise convolution over packed sequences, with input windows kept in state rows.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from turnkeep.kernels.causal_conv1d.reference import causal_conv1d_reference, causal_conv1d_update_reference
from turnkeep.kernels.causal_conv1d.tree_reference import causal_conv1d_tree_reference
from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.forward_batch import StateExport

__all__ = ["causal_conv1d", "causal_conv1d_tree", "causal_conv1d_update"]


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
    activation: Literal["silu"] | None = None,
    exports: Sequence[StateExport] = (),
) -> torch.Tensor:
    """y[t] = activation(bias + sum over m of weight[:, m] * input[t - (W - 1) + m]) within each sequence.

    x [T, C] packed, weight [C, W] (the last column meets the newest input), bias [C]; windows [S, C, W - 1] is the
    pool of the last raw inputs, oldest first; rows [R] int64. A sequence with context continues from windows[row],
    one without starts from zeros whatever its row holds. Written in place: the final window of every sequence to its
    row, and for every export the window after `length` tokens of its sequence. Returns [T, C] in the dtype of x.

    The sum is taken in float32 in a fixed order, so a sequence computed whole, in chunks or token by token with
    `causal_conv1d_update` gives the same bits. Raises ValueError for shapes, lengths or exports that do not fit.
    """
    _check("causal_conv1d", x, weight, bias, windows)
    if len(seq_lens) != rows.shape[0] or len(context_lens) != rows.shape[0]:
        raise ValueError(
            f"causal_conv1d: {rows.shape[0]} rows, {len(seq_lens)} lengths, {len(context_lens)} context lengths"
        )
    if sum(seq_lens) != x.shape[0] or min(seq_lens, default=0) < 0:
        raise ValueError(f"causal_conv1d: lengths {list(seq_lens)} do not add up to {x.shape[0]} tokens")
    for export in exports:
        if not 0 <= export.sequence < len(seq_lens) or not 1 <= export.length <= seq_lens[export.sequence]:
            raise ValueError(f"causal_conv1d: {export} lies outside sequences of lengths {list(seq_lens)}")
    return causal_conv1d_reference(x, weight, bias, windows, rows, seq_lens, context_lens, activation, exports)


def causal_conv1d_update(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    rows: torch.Tensor,
    activation: Literal["silu"] | None = None,
) -> torch.Tensor:
    """One token for each of R sequences that have context: x [R, C] -> [R, C]; windows[rows] move on by one input.

    Arguments and bits as in `causal_conv1d`. Rows must differ. Raises ValueError for shapes that do not fit.
    """
    _check("causal_conv1d_update", x, weight, bias, windows)
    if rows.shape[0] != x.shape[0]:
        raise ValueError(f"causal_conv1d_update: {x.shape[0]} tokens but {rows.shape[0]} rows")
    return causal_conv1d_update_reference(x, weight, bias, windows, rows, activation)


def causal_conv1d_tree(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    trees: DraftTrees,
    activation: Literal["silu"] | None = None,
) -> torch.Tensor:
    """The convolution over R packed draft trees: every node sees its own input and those of its ancestors.

    x [N, C], the raw inputs of the nodes; windows [R, W - 1, C], the inputs before each root, oldest first. Other
    arguments as in `causal_conv1d`. Returns [N, C], the bits that a sequence along the node's path would get. Raises
    ValueError for what does not fit.
    """
    channels, width = weight.shape
    if x.shape != (len(trees.parents), channels) or windows.shape != (trees.num_trees, width - 1, channels):
        raise ValueError(
            f"causal_conv1d_tree: x {tuple(x.shape)}, windows {tuple(windows.shape)} and weight {tuple(weight.shape)} "
            f"for {trees.num_trees} trees of {len(trees.parents)} nodes"
        )
    return causal_conv1d_tree_reference(x, weight, bias, windows, trees, activation)


def _check(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, windows: torch.Tensor) -> None:
    channels, width = weight.shape
    if x.dim() != 2 or x.shape[1] != channels or windows.shape[1:] != (channels, width - 1):
        raise ValueError(
            f"{name}: x {tuple(x.shape)} and windows {tuple(windows.shape)} do not fit weight {tuple(weight.shape)}"
        )
    if bias is not None and bias.shape[0] != channels:
        raise ValueError(f"{name}: bias {tuple(bias.shape)} for {channels} channels")
