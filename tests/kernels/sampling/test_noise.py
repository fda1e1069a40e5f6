"""The random bits against published vectors, the noise against its distribution and a scalar computation."""

from __future__ import annotations

import math

import pytest
import torch

from turnkeep.kernels.sampling import gumbel_noise, gumbel_noise_rows, philox4x32
from turnkeep.kernels.sampling.philox_numpy import random_words

FULL = 0xFFFFFFFF


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL, FULL, FULL, FULL), (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = words(*counter)
    k0, k1 = words(*key)
    assert tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def scalar_noise(seed: int, position: int, token: int) -> float:
    """The definition, in Python integers and floats."""
    c = [token >> 2, position & FULL, position >> 32, 0]
    k = [seed & FULL, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & FULL, (p0 >> 32) ^ c[3] ^ k[1], p0 & FULL]
        k = [(k[0] + 0x9E3779B9) & FULL, (k[1] + 0xBB67AE85) & FULL]
    return -math.log(-math.log1p(-(c[token & 3] + 0.5) / 2**32))


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 5, 2**31, 2**33 + 1])
def test_noise_is_the_scalar_definition(seed: int, position: int) -> None:
    tokens = [0, 1, 2, 3, 4, 129, 49_151, 200_000]
    signed = seed - 2**64 if seed >= 2**63 else seed
    noise = gumbel_noise(torch.tensor(signed), torch.tensor(position), torch.tensor(tokens))
    expected = torch.tensor([scalar_noise(seed, position, token) for token in tokens], dtype=torch.float64)
    assert noise.dtype == torch.float32
    assert torch.equal(noise, expected.float())


@pytest.mark.parametrize("vocab_size", [1, 4, 7, 1001])
def test_any_subset_of_tokens_has_the_bits_of_the_whole_row(vocab_size: int) -> None:
    seeds, positions = torch.tensor([3, -7, 3]), torch.tensor([10, 10, 11])
    rows = gumbel_noise_rows(seeds, positions, vocab_size)
    assert rows.shape == (3, vocab_size)
    ids = torch.randperm(vocab_size)[: vocab_size // 2 + 1]
    assert torch.equal(gumbel_noise(seeds[:, None], positions[:, None], ids), rows[:, ids])
    alone = gumbel_noise_rows(seeds[1:2], positions[1:2], vocab_size)
    assert torch.equal(alone[0], rows[1])


@pytest.mark.parametrize("shape", [(), (7,), (3, 1), (3, 7)])
def test_the_processors_words_are_those_of_the_definition(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    seeds = torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)
    positions = torch.randint(2**40, (3, 7), generator=generator)
    blocks = torch.randint(2**32 - 1, (7,), generator=generator)
    found = torch.from_numpy(random_words(seeds.numpy(), positions.numpy(), blocks.numpy()))
    counter = (blocks, positions & FULL, positions >> 32, torch.zeros_like(positions))
    expected = torch.broadcast_tensors(*philox4x32(counter, (seeds & FULL, (seeds >> 32) & FULL)))
    assert torch.equal(found, torch.stack(expected, dim=-1))


def test_seed_position_and_token_all_matter() -> None:
    noise = gumbel_noise(
        torch.tensor([[0, 1, 2**32]]).T[..., None], torch.tensor([[0, 1, 2**32]])[..., None], torch.arange(8)
    )
    assert noise.shape == (3, 3, 8)
    assert noise.unique().numel() == noise.numel()


def test_noise_follows_the_gumbel_distribution_into_its_tail() -> None:
    noise = gumbel_noise_rows(torch.arange(64), torch.arange(64) * 7, 32_768).flatten().double()
    count = noise.numel()
    assert noise.isfinite().all()
    for threshold in (-2.0, -1.0, 0.0, 1.0, 3.0, 6.0, 10.0):
        probability = 1 - math.exp(-math.exp(-threshold))
        hits = int((noise > threshold).sum())
        assert abs(hits - count * probability) < 5 * math.sqrt(count * probability * (1 - probability)) + 1, threshold
    extremes = torch.tensor([0, FULL], dtype=torch.int64)
    assert torch.log1p(-(extremes.double() + 0.5) * 2.0**-32).isfinite().all()
