"""Definition of the causal convolution, in plain PyTorch for any device.

Products and sums are separate operations in the order of the taps, bias last: no fused multiply-add, no reduction
whose order depends on shapes, so every way to cut a sequence gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch

from turnkeep.kernels.forward_batch import StateExport


def causal_conv1d_reference(
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
    """See `turnkeep.kernels.causal_conv1d.causal_conv1d`."""
    num_tokens, width = x.shape[0], weight.shape[1]
    tail = width - 1
    # Each sequence stands in `inputs` behind the window it starts from: [window | tokens | window | tokens | ...].
    starts = [0, *accumulate(length + tail for length in seq_lens)]
    inputs = _with_windows(x, windows, rows, seq_lens, context_lens)
    taps = weight.to(torch.float32).unbind(1)
    wide = inputs.to(torch.float32)
    total = max(inputs.shape[0] - tail, 0)
    y = wide[:total] * taps[0]
    product = torch.empty_like(y)
    for m in range(1, width):
        y += torch.mul(wide[m : m + total], taps[m], out=product)
    if len(seq_lens) != 1:  # drop the rows that start inside a window
        kept = [y[start : start + length] for start, length in zip(starts, seq_lens, strict=False)]
        y = torch.cat(kept) if kept else y[:num_tokens]
    if bias is not None:
        y += bias
    if activation == "silu":
        y = silu(y)

    # The window after p tokens of a sequence is the `tail` inputs from p on, counted from its own start.
    ends = [start + length for start, length in zip(starts, seq_lens, strict=False)]
    ends += [starts[export.sequence] + export.length for export in exports]
    if tail and ends:
        first = torch.tensor(ends, dtype=torch.int64, device=x.device)
        picks = first[:, None] + torch.arange(tail, device=x.device)  # [R + E, W - 1]
        export_rows = torch.tensor([export.row for export in exports], dtype=torch.int64, device=x.device)
        saved = inputs[picks].transpose(1, 2).to(windows.dtype)  # [R + E, C, W - 1]
        windows.index_copy_(0, torch.cat((rows, export_rows)) if exports else rows, saved)
    return y.to(x.dtype)


def _with_windows(
    x: torch.Tensor,
    windows: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: Sequence[int],
    context_lens: Sequence[int],
) -> torch.Tensor:
    """Put the starting window in front of every sequence: [sum of (W - 1 + length), C]."""
    starting = windows.index_select(0, rows).transpose(1, 2)  # [R, W - 1, C]
    pieces: list[torch.Tensor] = []
    for window, tokens, context_len in zip(starting, torch.split(x, list(seq_lens)), context_lens, strict=True):
        pieces.append(window if context_len > 0 else torch.zeros_like(window))
        pieces.append(tokens)
    return torch.cat(pieces) if pieces else x


def silu(y: torch.Tensor) -> torch.Tensor:
    """y / (1 + exp(-y)), in place. The fused silu rounds an element by where it lies in memory; these steps do not."""
    return y.div_(y.neg().exp_().add_(1.0))


def causal_conv1d_update_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    windows: torch.Tensor,
    rows: torch.Tensor,
    activation: Literal["silu"] | None = None,
) -> torch.Tensor:
    """See `turnkeep.kernels.causal_conv1d.causal_conv1d_update`."""
    inputs = torch.cat((windows.index_select(0, rows), x.unsqueeze(-1)), dim=-1)  # [R, C, W]
    windows.index_copy_(0, rows, inputs[..., 1:].to(windows.dtype))
    products = (inputs.to(torch.float32) * weight).unbind(-1)
    y = products[0]
    for product in products[1:]:
        y = y + product
    if bias is not None:
        y = y + bias
    if activation == "silu":
        y = silu(y)
    return y.to(x.dtype)
