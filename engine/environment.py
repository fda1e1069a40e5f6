"""What the engine takes from the machine: cores, memory, instructions, and the variables torch reads at import.

Reads /proc and /sys only, so that the server can prepare the engine's environment without importing torch.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")

MIB = 1024 * 1024
DEFAULT_MEMORY_SHARE = 0.25
MAX_DEFAULT_MEMORY_BYTES = 2048 * MIB
MIN_DEFAULT_MEMORY_BYTES = 64 * MIB


def num_usable_cores() -> int:
    """Cores this process may run on, at least 1; a container's CPU quota counts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _read_text(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]) > 0:
        cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(cores, 1)


def engine_environment(num_threads: int | None, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment for an engine process, from the server's own.

    Idle OpenMP threads must not spin: with the default they take the cores that the server and the engine's own
    Python need. OpenMP and the allocator read these variables once, when the process starts, hence not later. What
    the user set stays.
    """
    environment = dict(variables)
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment.setdefault("GOMP_SPINCOUNT", "0")
    # A step's temporaries are the same sizes again and again: giving them back to the system after each step costs
    # a page fault for every 4 KiB of the next one (half as fast a scan was measured).
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(1024 * MIB))
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 * MIB))
    if num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    else:
        environment.setdefault("OMP_NUM_THREADS", str(num_usable_cores()))
    return environment


def has_bf16_instructions() -> bool:
    """The CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX, or the Arm BF16 extension)."""
    names = ("flags", "Features") if platform.system() == "Linux" else ()
    for line in _read_text(_PROC / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            flags = set(value.split())
            return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    return False


def available_memory_bytes() -> int | None:
    """Memory that can be used without swapping, a container's limit included; None where it cannot be read."""
    candidates: list[int] = []
    for line in _read_text(_PROC / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            candidates.append(int(line.split()[1]) * 1024)
    limit = _read_text(_CGROUP / "memory.max").strip()
    used = _read_text(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        candidates.append(max(int(limit) - int(used), 0))
    return min(candidates) if candidates else None


def default_memory_bytes() -> int:
    """Memory for pages and state rows where none was asked for: a modest share of what is available, bounded."""
    available = available_memory_bytes()
    if available is None:
        return MIN_DEFAULT_MEMORY_BYTES
    return int(min(max(available * DEFAULT_MEMORY_SHARE, MIN_DEFAULT_MEMORY_BYTES), MAX_DEFAULT_MEMORY_BYTES))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
