"""Fixtures of the SDK's tests: every test runs with the sync and with the async client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from live_server import make_text_model
from sdk_twins import Twin

from turnkeep.server.text_model import TextModel


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    """Tokenizer and template of the bundled model, without weights."""
    return make_text_model()


@pytest.fixture(params=["sync", "async"])
async def twin(request: pytest.FixtureRequest) -> AsyncIterator[Twin]:
    made = Twin(request.param)
    yield made
    await made.close()
