"""Counter-based random bits (Philox4x32-10) and the Gumbel noise made of them.

Key: the request's 64-bit seed. Counter: (token >> 2, position, position >> 32, 0), word token & 3. Nothing else enters,
so any subset of tokens, in any batch, gets the same noise. Logarithms are taken in float64 and rounded once, which
makes the float32 noise the same whichever vector instructions or device computed it.
"""

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


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of (seed, position, token), float32; the three int64 tensors broadcast.

    seeds hold the bits of the 64-bit seed (negative for seeds of 2^63 and above).
    """
    words = _random_words(seeds, positions, token_ids >> 2)
    lane = (token_ids & 3).expand(words[0].shape)
    return _gumbel(torch.stack(words).gather(0, lane[None]).squeeze(0))


def gumbel_noise_rows(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise of tokens 0 .. vocab_size - 1 for seeds, positions [K]: float32 [K, vocab_size], four tokens a draw."""
    blocks = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=seeds.device)
    words = _random_words(seeds[:, None], positions[:, None], blocks)
    return _gumbel(torch.stack(words, dim=-1).flatten(1)[:, :vocab_size])


def _random_words(
    seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    counter = (blocks, positions & MASK, (positions >> 32) & MASK, torch.zeros_like(positions))
    return philox4x32(counter, (seeds & MASK, (seeds >> 32) & MASK))


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """-log(-log(1 - v)) with v = (bits + 1/2) / 2^32: the winners are decided where v is small and finely spaced."""
    v = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return torch.log1p(v.neg_()).neg_().log_().neg_().to(torch.float32)
