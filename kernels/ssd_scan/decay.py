"""Sums of log decays over token ranges of a chunk, built from non-positive terms only.

Differences of long running sums lose up to 3e-4 in float32 and exp of a positive difference overflows, so neither is
formed: within blocks of 16 tokens sums run forward from each start, and blocks are joined by adding the rest of the
first block, the whole blocks between, and the part of the last one.
"""

from __future__ import annotations

import torch
from torch.nn import functional

BLOCK = 16


def segment_sums(log_decay: torch.Tensor) -> torch.Tensor:
    """seg[..., i, j] = sum of log_decay over (j, i] for j <= i, -inf for j > i.

    log_decay [..., Q] finite and <= 0, any Q; returns [..., Q, Q].
    """
    *lead, length = log_decay.shape
    num_blocks = -(-length // BLOCK)
    padded = functional.pad(log_decay, (0, num_blocks * BLOCK - length)) if length % BLOCK else log_decay
    blocks = padded.unflatten(-1, (num_blocks, BLOCK))  # [..., nb, 16]
    inside = _block_sums(blocks)  # [..., nb, 16 (i), 16 (j)]
    if num_blocks == 1:
        return inside.squeeze(-3)[..., :length, :length]
    to_row = blocks.cumsum(-1)  # block start up to and with i
    after_column = inside[..., -1, :]  # after j up to the block's end
    between = _block_gaps(to_row[..., -1])  # [..., nb (i), nb (j)]
    heads = between[..., :, None, :, None] + to_row[..., :, :, None, None]  # [..., nb, 16, nb, 1]
    sums = heads + after_column[..., None, None, :, :]  # [..., nb, 16, nb, 16]
    # diagonal() moves the block dimension to the end: [..., 16, 16, nb]
    sums.diagonal(dim1=-4, dim2=-2).copy_(inside.movedim(-3, -1))
    return sums.reshape(*lead, num_blocks * BLOCK, num_blocks * BLOCK)[..., :length, :length]


def _block_sums(blocks: torch.Tensor) -> torch.Tensor:
    """Segment sums inside each block, [..., nb, 16] -> [..., nb, 16, 16]: running sums that start after column j."""
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=blocks.device).triu(1)  # [j, m]: m > j
    terms = blocks.unsqueeze(-2) * later.to(blocks.dtype)  # [..., j, m]
    return terms.cumsum(-1).transpose(-1, -2).masked_fill(later.transpose(0, 1).logical_not().triu(1), -torch.inf)


def _block_gaps(totals: torch.Tensor) -> torch.Tensor:
    """gaps[..., a, b] = sum of the totals of the blocks strictly between b and a, -inf unless b < a."""
    num_blocks = totals.shape[-1]
    index = torch.arange(num_blocks, device=totals.device)
    between = (index[None, :, None] > index[None, None, :]) & (index[None, :, None] < index[:, None, None])  # [a, m, b]
    gaps = torch.einsum("...m,amb->...ab", totals, between.to(totals.dtype))
    return gaps.masked_fill(index[:, None] <= index[None, :], -torch.inf)
