"""Philox4x32-10 in NumPy for the processor: the words of `noise.philox4x32` in a sixth of its calls.

The noise of one row is so little work that the number of calls decides. Counters 0 and 2 lie in one array, 1 and 3 in
another, and both halves of a 64-bit product are read from it in place: a round is one product and two sums.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from turnkeep.kernels.sampling.philox import KEY_STEPS, MASK, MULTIPLIERS, NUM_ROUNDS

Int64Array = npt.NDArray[np.int64]

_FACTORS = np.array(MULTIPLIERS, dtype=np.uint64)
_KEY_OFFSETS = np.arange(NUM_ROUNDS, dtype=np.uint64)[:, None] * np.array(KEY_STEPS, dtype=np.uint64)  # [rounds, 2]
_LITTLE = np.dtype("<u4")


def random_words(seeds: Int64Array, positions: Int64Array, blocks: Int64Array) -> Int64Array:
    """Four 32-bit words for each (seed, position, block), last: the three broadcast to [..., ] -> [..., 4]."""
    shape = np.broadcast_shapes(seeds.shape, positions.shape, blocks.shape)
    even = np.empty((2, *shape), dtype=np.uint32)
    odd = np.empty_like(even)
    even[0], even[1] = blocks, positions >> 32
    odd[0], odd[1] = positions & MASK, 0
    keys = _round_keys(seeds, len(shape))
    factors = _FACTORS.reshape(2, *(1,) * len(shape))
    products = [np.empty((2, *shape), dtype="<u8") for _ in range(2)]  # `odd` of a round lies in the one before
    for number in range(NUM_ROUNDS):
        product = products[number % 2]
        np.multiply(even, factors, out=product)
        halves = product.view(_LITTLE)[::-1]
        np.bitwise_xor(halves[..., 1::2], odd, out=even)
        even ^= keys[number]
        odd = halves[..., ::2]
    words = np.empty((*shape, 4), dtype=np.int64)
    words[..., 0], words[..., 1], words[..., 2], words[..., 3] = even[0], odd[0], even[1], odd[1]
    return words


def _round_keys(seeds: Int64Array, num_dims: int) -> npt.NDArray[np.uint32]:
    """[rounds, 2, ...], with as many dimensions after the first two as the counters have."""
    halves = np.stack((seeds & MASK, (seeds >> 32) & MASK)).astype(np.uint64)
    offsets = _KEY_OFFSETS.reshape(NUM_ROUNDS, 2, *(1,) * seeds.ndim)
    keys = (halves + offsets).astype(np.uint32)
    return keys.reshape(NUM_ROUNDS, 2, *(1,) * (num_dims - seeds.ndim), *seeds.shape)
