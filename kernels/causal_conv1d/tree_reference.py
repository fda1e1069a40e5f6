"""Definition of the causal convolution over draft trees and of the window after an accepted path, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from turnkeep.kernels.causal_conv1d.reference import silu


def causal_conv1d_tree_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    rows: torch.Tensor,
    num_nodes: Sequence[int],
    parents: torch.Tensor,
    activation: Literal["silu"] | None = None,
) -> torch.Tensor:
    """See `turnkeep.kernels.causal_conv1d.causal_conv1d_tree`."""
    if not num_nodes:
        return torch.empty_like(x)
    width = weight.shape[1]
    tail = width - 1
    inputs = _behind_windows(x, windows, rows, num_nodes).to(torch.float32)
    # A window is a chain, and a root follows its last input: that many steps back never leave a request's own inputs.
    parent = torch.arange(-1, inputs.shape[0] - 1, device=x.device)
    nodes = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    start = 0
    for request, count in enumerate(num_nodes):
        first = start + (request + 1) * tail
        own = torch.arange(first, first + count, device=x.device)
        nodes[start : start + count] = own
        parent[own] = first + parents[start : start + count]  # -1 is the place before the first node
        start += count
    places = [nodes]
    for _ in range(tail):
        places.append(parent[places[-1]])
    taps = weight.to(torch.float32).unbind(1)
    y = inputs[places[tail]] * taps[0]
    for m in range(1, width):  # the same order of sums as along a sequence
        y += inputs[places[tail - m]] * taps[m]
    if bias is not None:
        y += bias
    if activation == "silu":
        y = silu(y)
    return y.to(x.dtype)


def causal_conv1d_fold_reference(
    x: torch.Tensor, windows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, seq_lens: Sequence[int]
) -> None:
    """See `turnkeep.kernels.causal_conv1d.causal_conv1d_fold`."""
    tail = windows.shape[2]
    if not seq_lens or not tail:
        return
    inputs = _behind_windows(x, windows, sources, seq_lens)
    ends, start = [], 0
    for length in seq_lens:
        start += tail + length
        ends.append(inputs[start - tail : start])
    windows.index_copy_(0, targets, torch.stack(ends).transpose(1, 2).to(windows.dtype))


def _behind_windows(x: torch.Tensor, windows: torch.Tensor, rows: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    """Every request's inputs behind its window: [window | inputs | window | inputs | ...]."""
    starting = windows.index_select(0, rows).transpose(1, 2)  # [R, W - 1, C]
    pieces: list[torch.Tensor] = []
    for window, own in zip(starting, torch.split(x, list(lens)), strict=True):
        pieces += (window, own)
    return torch.cat(pieces)
