"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No server that a test starts may touch the state folder of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNKEEP_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        patch.delenv("TURNKEEP_REDIS_URL", raising=False)
        yield
