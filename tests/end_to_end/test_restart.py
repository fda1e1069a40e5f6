"""A server that was killed: the next one goes on from what the disk holds, with the same tokens as a cold run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from served_conversation import ConversationDriver, Server

from turnkeep.server.cli import main

SLACK_TOKENS = 16
OPTIONS = ("--dtype", "float32", "--threads", "1")
QUESTIONS = ("Where is order 17?", "And order 23?", "Thank you. Is order 5 paid?")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def start(state: Path, *options: str) -> Server:
    server = Server("--state-dir", str(state), *OPTIONS, *options, log=state.parent / "server.log")
    server.wait_until_ready()
    return server


def wait_until_written(server: Server, timeout_s: float = 30.0) -> None:
    """Until nothing that is worth it is missing on disk."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        metrics = server.metrics()
        written = metrics["turnkeep_engine_cache_tier_written_bytes_total"]
        held = sum(metrics[f"turnkeep_engine_cache_tier_disk_{kind}_bytes"] for kind in ("page", "snapshot"))
        if metrics["turnkeep_engine_cache_tier_unwritten"] == 0 and held and written >= held:
            return
        time.sleep(0.1)
    raise TimeoutError("the engine did not write what it holds")


def ask(server: Server, driver: ConversationDriver, question: str) -> str:
    driver.server = server
    driver.messages.append({"role": "user", "content": question})
    return str(driver.request()["content"])


def conversation(server: Server) -> ConversationDriver:
    driver = ConversationDriver(server, "killed", {"max_tokens": 24})
    driver.messages.append({"role": "system", "content": "You keep the order desk and answer in one sentence. " * 6})
    return driver


def test_killed_server_goes_on_where_it_was(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(state)
    driver = conversation(server)
    answers = [ask(server, driver, question) for question in QUESTIONS[:2]]
    wait_until_written(server)
    server.kill()

    server = start(state)
    answers.append(ask(server, driver, QUESTIONS[2]))
    last = driver.reuse[-1]
    assert last.num_excess_tokens <= SLACK_TOKENS, last
    assert last.num_cached_tokens > 100
    assert server.metrics()["turnkeep_engine_cache_tier_hits_disk_total"] == 1
    assert main(["inspect", "--url", server.url, "--json"]) == 0
    tiers = {tier["tier"]: tier for tier in json.loads(capsys.readouterr().out)["tiers"]}
    assert tiers["disk"]["num_hits"] == 1
    assert tiers["disk"]["page_bytes"] > 0
    assert server.stop() == 0

    cold = start(state, "--no-prefix-caching")
    again = conversation(cold)
    assert [ask(cold, again, question) for question in QUESTIONS] == answers
    assert cold.stop() == 0


def test_stopped_server_saves_what_idle_time_had_not(state: Path) -> None:
    server = start(state)
    driver = conversation(server)
    ask(server, driver, QUESTIONS[0])
    assert server.stop() == 0
    server = start(state)
    ask(server, driver, QUESTIONS[1])
    assert driver.reuse[-1].num_excess_tokens <= SLACK_TOKENS
    assert server.stop() == 0
