"""What state exports cost: a 2,000-token scan that exports the state at 15 positions, over the same scan without.

CPU time of one thread, the two kinds of scan in turns; the median of their ratios. Bar: below 1.05.

    python -m benchmarks.state_exports
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from benchmarks.machine import describe_machine

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.gated_delta_scan import gated_delta_scan
from turnkeep.kernels.ssd_scan import ssd_scan

NUM_TOKENS, NUM_EXPORTS, NUM_ROUNDS, SEED = 2000, 15, 15, 1
# Heads, head dimension, state dimension, groups: Nemotron-H's, a quarter of its heads, Granite 4's small model.
MAMBA2_SIZES = ((128, 64, 128, 8), (32, 64, 128, 8), (48, 64, 128, 1))
# Key heads, value heads, key and value dimension: Qwen3-Next's, a quarter of its heads.
DELTA_SIZES = ((16, 32, 128), (4, 8, 128))

Scan = Callable[[Sequence[StateExport]], torch.Tensor]


def mamba2_scan(num_heads: int, head_dim: int, state_dim: int, num_groups: int) -> Scan:
    x, dt = torch.randn(NUM_TOKENS, num_heads, head_dim), torch.rand(NUM_TOKENS, num_heads) * 0.1
    A, D = -torch.rand(num_heads), torch.rand(num_heads)
    B, C = torch.randn(2, NUM_TOKENS, num_groups, state_dim)
    states, rows = torch.zeros(NUM_EXPORTS + 2, num_heads, head_dim, state_dim), torch.tensor([1])
    return lambda exports: ssd_scan(x, dt, A, B, C, D, states, rows, [NUM_TOKENS], [0], 256, exports)


def delta_scan(num_keys: int, num_values: int, width: int) -> Scan:
    q, k = torch.randn(2, NUM_TOKENS, num_keys, width)
    v, g = torch.randn(NUM_TOKENS, num_values, width), -torch.rand(NUM_TOKENS, num_values) * 0.1
    beta = torch.rand(NUM_TOKENS, num_values)
    states, rows = torch.zeros(NUM_EXPORTS + 2, num_values, width, width), torch.tensor([1])
    return lambda exports: gated_delta_scan(q, k, v, g, beta, states, rows, [NUM_TOKENS], [0], 64, exports)


def cpu_seconds(scan: Scan, exports: Sequence[StateExport]) -> float:
    start = time.process_time()
    scan(exports)
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    positions = sorted(random.Random(SEED).sample(range(1, NUM_TOKENS), NUM_EXPORTS))
    exports = [StateExport(0, position, 2 + number) for number, position in enumerate(positions)]
    print(describe_machine())
    scans = [("Mamba-2", sizes, mamba2_scan(*sizes)) for sizes in MAMBA2_SIZES]
    scans += [("gated delta net", sizes, delta_scan(*sizes)) for sizes in DELTA_SIZES]  # type: ignore[misc]
    for name, sizes, scan in scans:
        for warm_up in ([], exports):
            cpu_seconds(scan, warm_up)
        rounds = [(cpu_seconds(scan, []), cpu_seconds(scan, exports)) for _ in range(NUM_ROUNDS)]
        ratio = statistics.median(with_exports / plain for plain, with_exports in rounds)
        milliseconds = statistics.median(plain for plain, _ in rounds) * 1e3
        print(f"{name} {sizes}: {milliseconds:.1f} ms, with {NUM_EXPORTS} exports x {ratio:.3f}")


if __name__ == "__main__":
    main()
