"""Every command and snippet of README and docs is carried out, or checked against what it names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_conversation import ROOT, Server

from turnkeep.server.cli import make_parser

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), ROOT / "examples/README.md"]
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
URL = "http://127.0.0.1:8000"
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def snippets(kind: str) -> list[tuple[str, str]]:
    return [
        (f"{page.name}:{page.read_text()[: match.start()].count(chr(10)) + 1}", match[2])
        for page in PAGES
        for match in FENCE.finditer(page.read_text())
        if match[1] == kind
    ]


def commands() -> list[tuple[str, str]]:
    """Shell commands, one each; lines that go on are joined, comments are dropped."""
    found = []
    for place, text in snippets("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            found.extend((place, part) for part in _parts(line))
    return found


def _parts(line: str) -> Iterator[str]:
    part: list[str] = []
    for word in shlex.split(line, comments=True):
        if word == "&&":
            yield shlex.join(part)
            part = []
        else:
            part.append(word)
    if part:
        yield shlex.join(part)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    server.wait_until_ready()
    server.post("/v1/chat/completions", {
        "model": "demo", "messages": [{"role": "user", "content": "Hi"}], "conversation_id": "my-conversation",
    })  # fmt: skip
    yield server
    assert server.stop() == 0


def test_there_are_snippets_to_check() -> None:
    assert len(snippets("python")) >= 4
    assert len(commands()) >= 10
    assert {match[1] for page in PAGES for match in FENCE.finditer(page.read_text())} <= {
        "python", "bash", "toml", "text", "json"
    }  # fmt: skip


@pytest.mark.parametrize(("place", "code"), snippets("python"), ids=lambda value: value[:40].replace("\n", " "))
def test_python_runs_as_it_is_written(server: Server, place: str, code: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TURNKEEP_BASE_URL": f"{server.url}/v1"}
    command = [sys.executable, "-c", code.replace(URL, server.url)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{place}: {done.stderr}"
    assert done.stdout.strip()


@pytest.mark.parametrize(("place", "command"), commands(), ids=lambda value: value[:60])
def test_commands_are_what_they_say(server: Server, place: str, command: str) -> None:
    words = shlex.split(command)
    program = Path(words[0]).name
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert all(word in targets or "=" in word for word in words[1:]), place
    elif program == "curl":
        done = subprocess.run(
            [word.replace(URL, server.url) for word in [*words, "--fail-with-body", "-sS"]],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{place}: {done.stdout}{done.stderr}"
    elif program == "turnkeep":
        make_parser().parse_args(words[1:])
    elif program in ("python", "python3"):
        assert (ROOT / words[1]).is_file() or words[1] == "-m", place
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"turnkeep\[(\w+)\]", command)) <= set(extras), place
    else:
        assert program in ("git", "cd", "bash"), f"{place}: nobody checks {command!r}"


def test_metrics_that_are_named_exist(server: Server) -> None:
    there = set(re.findall(r"^(turnkeep_\w+)", server.get("/metrics")[1], re.MULTILINE))
    there |= set(re.findall(r"^# TYPE (turnkeep_\w+)", server.get("/metrics")[1], re.MULTILINE))
    for page in PAGES:
        # The cache's counters by reason are there from their first event on.
        named = set(re.findall(r"`(turnkeep_(?!engine_cache_)\w+)`", page.read_text()))
        assert named <= there, f"{page.name}: {named - there}"


def test_inline_commands_and_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    options = {option for action in _actions() for option in action}
    for page in PAGES:
        text = FENCE.sub("", page.read_text())
        named = set(re.findall(r"turnkeep\[(\w+)\]", text))
        assert named <= set(extras), f"{page.name}: {named - set(extras)}"
        for command in re.findall(r"`turnkeep \w[^`]*`", text):
            used = set(re.findall(r"(?<!\w)--[\w-]+", command))
            assert used <= options, f"{page.name}: {used - options}"


def _actions() -> Iterator[tuple[str, ...]]:
    parser = make_parser()
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for sub in action.choices.values():
                yield from (tuple(one.option_strings) for one in sub._actions)


def test_links_inside_the_repository_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "ARCHITECTURE.md"]:
        for target in LINK.findall(page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_list_of_pages_is_whole() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text()))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
