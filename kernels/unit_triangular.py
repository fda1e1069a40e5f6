"""Inverse of unit lower triangular matrices, by substitution in blocks of 16 rows.

Never by powers of the strictly lower part: with similar keys those grow like binomials, up to 1e17 for 64 rows,
although the inverse is bounded by 1, and in float32 the result is noise.
"""

from __future__ import annotations

import torch

from turnkeep.kernels.decay import BLOCK


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """(I + lower)^-1 of strictly lower triangular matrices [..., n, n], n a multiple of 16, in their dtype.

    A row of the result depends on its own row of `lower` and on rows it refers to with a factor other than zero.
    """
    size = lower.shape[-1]
    if size % BLOCK or lower.shape[-2] != size:
        raise ValueError(f"unit_lower_inverse: {tuple(lower.shape)} are not square matrices of a multiple of {BLOCK}")
    flat = lower.reshape(-1, size, size)
    num_blocks = size // BLOCK
    inverse = torch.zeros_like(flat)
    tiles = flat.view(-1, num_blocks, BLOCK, num_blocks, BLOCK)
    own = inverse.view(tiles.shape).diagonal(dim1=1, dim2=3)  # [b, 16, 16, blocks]
    own.copy_(_block_inverses(tiles.diagonal(dim1=1, dim2=3)))
    for start in range(BLOCK, size, BLOCK):  # rows above are done
        block = slice(start, start + BLOCK)
        carried = flat[:, block, :start] @ inverse[:, :start, :start]
        inverse[:, block, :start] = torch.bmm(inverse[:, block, block], carried).neg_()
    return inverse.view(lower.shape)


def _block_inverses(blocks: torch.Tensor) -> torch.Tensor:
    """(I + block)^-1 for blocks [b, 16, 16, n].

    Row after row is subtracted from those below, over all blocks at once. Products and differences are operations of
    their own, each exactly rounded, so that a block's result does not depend on where it lies in memory.
    """
    rows = blocks.permute(1, 2, 0, 3).contiguous()  # [16 (i), 16 (j), b, n]
    inverse = torch.zeros_like(rows)
    inverse.diagonal(dim1=0, dim2=1).fill_(1.0)
    for row in range(BLOCK - 1):
        known = inverse[row, : row + 1]
        inverse[row + 1 :, : row + 1].sub_(rows[row + 1 :, row, None] * known)
    return inverse.permute(2, 0, 1, 3)
