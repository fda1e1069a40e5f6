"""The machine and the versions that a measurement was made with, for benchmarks/RESULTS.md."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory, versions, date. No host name and no path."""
    cpu = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "memory_gib": f"{memory_gib:.0f}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "date": datetime.now(UTC).date().isoformat(),
    }
