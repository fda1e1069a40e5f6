"""Gumbel noise made of counter-based random bits.

Key: the request's 64-bit seed. Counter: (token >> 2, position, position >> 32, 0), word token & 3. Nothing else enters,
so any subset of tokens, in any batch, gets the same noise. Logarithms are taken in float64 and rounded once, which
makes the float32 noise the same whichever vector instructions or device computed it.
"""

from __future__ import annotations

import torch

from turnkeep.kernels.sampling.philox import MASK, philox4x32
from turnkeep.kernels.sampling.philox_numpy import random_words


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of (seed, position, token), float32; the three int64 tensors broadcast.

    seeds hold the bits of the 64-bit seed (negative for seeds of 2^63 and above).
    """
    words = _random_words(seeds, positions, token_ids >> 2)
    lane = (token_ids & 3).expand(words.shape[:-1])
    return _gumbel(words.gather(-1, lane[..., None]).squeeze(-1))


def gumbel_noise_rows(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise of tokens 0 .. vocab_size - 1 for seeds, positions [K]: float32 [K, vocab_size], four tokens a draw."""
    blocks = torch.arange(-(-vocab_size // 4), dtype=torch.int64, device=seeds.device)
    words = _random_words(seeds[:, None], positions[:, None], blocks)
    return _gumbel(words.flatten(1)[:, :vocab_size])


def _random_words(seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[..., 4] int64 for the three int64 tensors, which broadcast."""
    if seeds.device.type == "cpu":
        return torch.from_numpy(random_words(seeds.numpy(), positions.numpy(), blocks.numpy()))
    counter = (blocks, positions & MASK, (positions >> 32) & MASK, torch.zeros_like(positions))
    words = philox4x32(counter, (seeds & MASK, (seeds >> 32) & MASK))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)  # type: ignore[no-untyped-call]


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """-log(-log(1 - v)) with v = (bits + 1/2) / 2^32: the winners are decided where v is small and finely spaced."""
    v = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return torch.log1p(v.neg_()).neg_().log_().neg_().to(torch.float32)
