"""Every example runs as its first lines say, against a server that was started as a user would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_conversation import ROOT, Server

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    server.wait_until_ready()
    yield server
    assert server.stop() == 0


def run(server: Server | None, name: str, *arguments: str) -> str:
    """What the example prints; it must end well and say nothing on standard error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    if server is not None:
        environment["TURNKEEP_BASE_URL"] = f"{server.url}/v1"
    path = EXAMPLES / name
    command = ["bash", str(path)] if path.suffix == ".sh" else [sys.executable, str(path), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_quickstart_with_curl_reuses_its_first_turn(server: Server) -> None:
    output = run(server, "quickstart.sh")
    assert "Mara lives in Oslo." in output
    assert int(re.findall(r'"cached_tokens": ?(\d+)', output)[-1]) > 0


def test_the_quickstart_remembers_and_reuses(server: Server) -> None:
    lines = run(server, "quickstart.py").splitlines()
    assert "Oslo" in lines[1]
    reused, prompt = map(int, re.findall(r"\d+", lines[2]))
    assert 0 < prompt - reused <= 24  # the answer, whose reasoning the template strips, and the new question


def test_the_agent_answers_thirty_turns_rightly(server: Server) -> None:
    output = run(server, "order_desk_agent.py")
    right, turns, computed, prompt = map(int, re.findall(r"\d+", output.splitlines()[-1]))
    assert turns == 30
    assert right >= 0.95 * turns, output
    assert computed < 0.1 * prompt, output


def test_sub_agents_share_what_their_parent_has_computed(server: Server) -> None:
    lines = run(server, "sub_agents.py").splitlines()
    assert [city in line for city, line in zip(("Oslo", "Rome", "Paris"), lines, strict=True)] == [True] * 3
    for line in lines:
        reused, prompt = map(int, re.findall(r"(\d+) of (\d+)", line)[0])
        assert reused > prompt // 2


def test_both_branches_of_an_edit_stay(server: Server) -> None:
    asked, edited, before = run(server, "edit_and_branch.py").splitlines()
    assert "Oslo" in asked
    assert "Rome" in edited
    assert "Oslo" in before


def test_a_saved_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    saved = str(tmp_path / "conversation.json")
    options = ("--state-dir", str(tmp_path / "state"))
    for expected in ("Noted", "Oslo"):
        server = Server(*options)
        try:
            server.wait_until_ready()
            output = run(server, "resume_after_restart.py", saved)
        finally:
            server.stop()
        assert expected in output
    assert not Path(saved).exists()


def test_anthropics_sdk_calls_a_tool_and_answers(server: Server) -> None:
    lines = run(server, "anthropic_sdk.py").splitlines()
    assert lines[0].startswith("tool_use")
    assert lines[1].startswith("end_turn")
    assert re.search(r"cost \d+ euros each", lines[2])


@pytest.mark.parametrize("name", ["openai_agents_sdk.py", "langchain_agent.py"])
def test_other_agent_libraries_call_a_tool_and_answer(server: Server, name: str) -> None:
    answer, usage = run(server, name).splitlines()
    assert re.search(r"cost \d+ euros each", answer)
    assert "reused" in usage or "input_tokens" in usage


def test_a_batch_needs_no_server() -> None:
    lines = run(None, "offline_batch.py").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["Mara", "Nils", "Lena", "Hugo"]
    assert all("Oslo" in line for line in lines)


def test_the_trace_is_replayed_with_most_of_it_reused(server: Server, tmp_path: Path) -> None:
    trace, picture = EXAMPLES / "order_desk_trace.jsonl", tmp_path / "plot.png"
    command = [sys.executable, "-m", "turnkeep.server.cli", "replay", str(trace), "--url", server.url]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, "--plot", str(picture)], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    numbers = json.loads(done.stdout.strip().splitlines()[-1])
    assert numbers["failed"] == 0
    assert numbers["requests"] == len(trace.read_text().splitlines()) - 1
    assert numbers["cached_share"] > 0.7
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_example_is_listed_and_every_listed_one_exists() -> None:
    listed = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
