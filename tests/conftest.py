"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

# One compute thread a process, and none that spins: tests run in as many processes as there are cores, and start
# servers and engines besides. OpenMP reads these when torch is imported, hence before anything else.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest


@pytest.fixture(scope="session", autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No server that a test starts may touch the state folder of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNKEEP_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        patch.delenv("TURNKEEP_REDIS_URL", raising=False)
        yield
