"""Fixtures of the server's tests."""

from __future__ import annotations

import pytest
from live_server import make_text_model

from turnkeep.server.text_model import TextModel


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    """Tokenizer, template and formats of the bundled model; no weights. Safe to share: it only remembers prompts."""
    return make_text_model()
