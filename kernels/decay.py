"""Decay over every token range of a chunk, from sums of non-positive terms only.

Differences of long running sums lose up to 3e-4 in float32, and exp of a positive difference overflows, so neither is
formed. Inside blocks of 16 tokens, sums of log decays run forward from each start. Across blocks a decay is the
product of three factors in [0, 1]: the rest of the first block, the whole blocks between, the part of the last one;
such a product can only underflow, and then rightly so. The sums are products with a matrix of zeros and ones, which
must run in full float32 (PyTorch's default; not TF32).
"""

from __future__ import annotations

import torch
from torch.nn import functional

BLOCK = 16
# exp() of anything below is zero in float32; the bound keeps sums of log decays finite.
MIN_LOG_DECAY = -104.0


def decay_matrix(log_decay: torch.Tensor) -> torch.Tensor:
    """decay[..., i, j] = exp(sum of log_decay over (j, i]) for j <= i, 0 for j > i.

    log_decay [..., Q] finite and <= 0, any Q; returns [..., Q, Q] in its dtype.
    """
    lead, length = log_decay.shape[:-1], log_decay.shape[-1]
    num_blocks = -(-length // BLOCK)
    padded = functional.pad(log_decay, (0, num_blocks * BLOCK - length)) if length % BLOCK else log_decay
    blocks = padded.reshape(-1, num_blocks, BLOCK)  # [b, nb, 16]
    inside = _inside_blocks(blocks)  # [b, nb, 16 (i), 16 (j)]
    if num_blocks == 1:
        return inside.view(*lead, BLOCK, BLOCK)[..., :length, :length]
    to_row = blocks.cumsum(-1)  # from the block's start up to and with i
    between = _between_blocks(to_row[..., -1])  # [b, nb (i), nb (j)]
    heads = to_row.exp_().unsqueeze(-1) * between.unsqueeze(2)  # [b, nb, 16 (i), nb (j)]
    tails = blocks.new_zeros(blocks.shape[0], num_blocks, num_blocks, BLOCK)  # [b, nb, nb, 16 (j)], block diagonal
    tails.diagonal(dim1=1, dim2=2).copy_(inside[:, :, -1].transpose(1, 2))
    decay = heads.view(-1, num_blocks * BLOCK, num_blocks) @ tails.view(-1, num_blocks, num_blocks * BLOCK)
    # diagonal() moves the block dimension to the end: [b, 16, 16, nb]
    by_block = decay.view(-1, num_blocks, BLOCK, num_blocks, BLOCK)
    by_block.diagonal(dim1=1, dim2=3).copy_(inside.permute(0, 2, 3, 1))
    return decay.view(*lead, num_blocks * BLOCK, num_blocks * BLOCK)[..., :length, :length]


def _inside_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Decays inside each block, [b, nb, 16] -> [b, nb, 16 (i), 16 (j)]."""
    index = torch.arange(BLOCK, device=blocks.device)
    i, j = index[:, None], index[None, :]
    counted = (index[:, None, None] <= i) & (index[:, None, None] > j)  # [m, i, j]: j < m <= i
    sums = blocks @ counted.to(blocks.dtype).view(BLOCK, -1)  # [b, nb, 16 * 16]
    never = blocks.new_zeros(BLOCK, BLOCK).masked_fill_(j > i, -torch.inf)  # added before exp
    return sums.add_(never.view(-1)).exp_().view(*blocks.shape, BLOCK)


def _between_blocks(totals: torch.Tensor) -> torch.Tensor:
    """Decay over the blocks strictly between j and i, [b, nb] -> [b, nb (i), nb (j)], 0 unless j < i."""
    num_blocks = totals.shape[-1]
    index = torch.arange(num_blocks, device=totals.device)
    i, j = index[:, None], index[None, :]
    counted = (index[:, None, None] < i) & (index[:, None, None] > j)  # [m, i, j]: j < m < i
    sums = totals @ counted.to(totals.dtype).view(num_blocks, -1)
    return sums.view(-1, num_blocks, num_blocks).masked_fill_(j >= i, -torch.inf).exp_()
