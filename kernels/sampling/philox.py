"""Counter-based random bits: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3")."""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random 32-bit words for each counter: int64 tensors that hold unsigned 32-bit values and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # The 64-bit product may wrap to a negative int64; its bits are right, so both halves are masked out of it.
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        c0 = ((product1 >> 32) ^ c1 ^ k0) & MASK
        c2 = ((product0 >> 32) ^ c3 ^ k1) & MASK
        c1 = product1 & MASK
        c3 = product0 & MASK
        k0 = (k0 + KEY_STEPS[0]) & MASK
        k1 = (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3
