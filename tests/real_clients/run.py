"""`make clients`: real clients against a scripted server, with faults on the way; see README.md.

Needs a network for the installation only, and Turnkeep itself on the path of this Python.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from command_line import COMMAND_LINES, OFFLINE
from recording_proxy import FaultProxy, reused_share

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TURN_S = 120.0  # what one process of a client may take
TEN_TURNS = [f"What is the weather in city number {number}?" for number in range(10)]
ANSWER = "sunny-42"
# Program -> the packages that it needs.
PYTHON_CLIENTS: dict[str, tuple[str, ...]] = {
    "openai_chat": ("openai==3.57.0",),
    "openai_responses": ("openai==3.57.0",),
    "anthropic_messages": ("anthropic==2.14.0",),
    "openai_agents": ("openai-agents==0.24.0",),
    "langchain_chat": ("langchain-openai==1.7.4",),
    "pydantic_ai_chat": ("pydantic-ai-slim[openai]>=2,<3",),
    "litellm_chat": ("litellm>=1.110,<2",),
    "smolagents_chat": ("smolagents[openai]>=1.26,<2",),
}


@dataclass
class Outcome:
    """A row of the table."""

    cells: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Client:
    """How to run turns: messages in one process. is_resumed: they continue what is in the folder."""

    name: str
    command: Callable[[Path, list[str], bool], list[str]]
    environment: Callable[[Path], dict[str, str]]
    messages: Callable[[list[str]], list[str]] = lambda messages: messages
    takes_many: bool = True  # several turns in one process

    def run(self, folder: Path, messages: list[str], *, is_resumed: bool) -> tuple[int, str, str]:
        """Exit status, standard output, and standard error of one process."""
        command = self.command(folder, self.messages(messages), is_resumed)
        environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **OFFLINE, **self.environment(folder)}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=TURN_S * len(messages), check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return 124, str(error.stdout or ""), "it did not end"
        return done.returncode, done.stdout, done.stderr


def python_client(name: str, python: Path, url: str) -> Client:
    program = HERE / "programs" / f"{name}.py"
    return Client(
        name,
        lambda folder, messages, _: [str(python), str(program), url, str(folder / "state"), *messages],
        lambda _: {"PYTHONWARNINGS": "ignore"},
    )


def command_line_client(name: str, node: Path, url: str) -> Client:
    known = COMMAND_LINES[name]
    program = str(node / "node_modules" / ".bin" / known.program)

    def command(_: Path, messages: list[str], is_resumed: bool) -> list[str]:
        return [program, *(known.following if is_resumed else known.first)(messages[0])]

    return Client(
        name,
        command,
        lambda folder: dict(known.configure(folder, url)),
        lambda messages: [text.replace("the weather", f"the weather by {known.tool}") for text in messages],
        takes_many=False,
    )


def two_turns(client: Client, folder: Path, proxy: FaultProxy, notes: list[str]) -> str:
    """Two turns in two processes, and what became of the fault."""
    result = "ok"
    for number, text in enumerate(("What is the weather in Oslo?", "And what is the weather in Rome?")):
        for attempt in range(2):
            status, shown, errors = client.run(folder, [text], is_resumed=number > 0)
            if status == 0 and ANSWER in shown:
                break
            if status == 0 and proxy.num_faults and attempt == 0 and "error" not in (shown + errors).lower():
                return "took a part for the whole"
            if attempt or not proxy.num_faults:
                notes.append(f"{client.name}: {(errors or shown).strip()[-300:]}")
                return f"failed ({status})"
            result = "raised"
    return result


async def examine(client: Client, folder: Path, proxy: FaultProxy) -> Outcome:
    outcome = Outcome()
    for fault in ("none", "503", "drop"):
        place = folder / f"{client.name}-{fault}"
        place.mkdir(parents=True)
        proxy.begin(fault)
        outcome.cells[fault] = await asyncio.to_thread(two_turns, client, place, proxy, outcome.notes)
        if fault != "none" and not proxy.num_faults:
            outcome.cells[fault] += " (no fault met)"
        wrong = [one for one in proxy.seen if one.status >= 400]
        if wrong:
            outcome.notes.append(f"{client.name}, {fault}: {wrong[0].status} at {wrong[0].path}")
    place = folder / f"{client.name}-ten"
    place.mkdir()
    proxy.begin("none")
    turns = [TEN_TURNS] if client.takes_many else [[text] for text in TEN_TURNS]
    for number, messages in enumerate(turns):
        status, shown, errors = await asyncio.to_thread(client.run, place, messages, is_resumed=number > 0)
        if status or shown.count(ANSWER) < len(messages):
            outcome.notes.append(f"{client.name}, ten turns: {(errors or shown).strip()[-300:]}")
            break
    share = reused_share(proxy.seen)
    outcome.cells["reused"] = "-" if share is None else f"{share:.3f}"
    outcome.cells["requests"] = str(len(proxy.seen))
    return outcome


def install(build: Path, names: list[str], missing: dict[str, str]) -> tuple[Path, Path]:
    """The clients that are asked for, each package once; `missing` gets those that do not install, with the reason."""
    environment, node = build / "python", build / "node"
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
    for name in names:
        if name in PYTHON_CLIENTS:
            command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            command += PYTHON_CLIENTS[name]
        else:
            node.mkdir(parents=True, exist_ok=True)
            if (node / "node_modules" / ".bin" / COMMAND_LINES[name].program).exists():
                continue
            npm = shutil.which("npm")
            if npm is None:
                missing[name] = "npm is not installed"
                continue
            command = [npm, "install", "--prefix", str(node), "--no-audit", "--no-fund", COMMAND_LINES[name].package]
        print(f"installing what {name} needs", flush=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            missing[name] = (done.stderr or done.stdout).strip()[-200:]
    return python, node


def start_server(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "turnkeep.server.cli", "serve", "--engine", f"scripted:{HERE / 'rules.json'}"]
    command += ["--port", str(port), "--accept-any-model", "--state-dir", str(folder / "state"), "--memory", "256MiB"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL), f"http://127.0.0.1:{port}"


async def wait_until_ready(url: str) -> None:
    import aiohttp

    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            try:
                async with session.get(url + "/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise TimeoutError("the server did not start")


async def run_all(options: argparse.Namespace) -> int:
    build = options.build.resolve()
    runs = build / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    missing: dict[str, str] = {}
    python, node = install(build, options.clients, missing)
    server, target = start_server(runs)
    outcomes: dict[str, Outcome] = {}
    try:
        await wait_until_ready(target)
        async with FaultProxy(target).running() as proxy:
            for name in options.clients:
                if name in missing:
                    continue
                is_python = name in PYTHON_CLIENTS
                client = (
                    python_client(name, python, proxy.url) if is_python else command_line_client(name, node, proxy.url)
                )
                outcomes[name] = await examine(client, runs, proxy)
                print_row(name, outcomes[name].cells)
    finally:
        server.terminate()
        server.wait(30)
    print_table(outcomes, missing)
    if not options.keep:
        shutil.rmtree(runs, ignore_errors=True)
    good = ("ok", "raised")
    return int(any(not cell.startswith(good) for one in outcomes.values() for cell in list(one.cells.values())[:3]))


COLUMNS = ("none", "503", "drop", "reused", "requests")


def print_row(name: str, cells: dict[str, str]) -> None:
    print(f"{name:<22}" + "".join(f"{cells.get(column, ''):<26}" for column in COLUMNS).rstrip(), flush=True)


def print_table(outcomes: dict[str, Outcome], missing: dict[str, str]) -> None:
    print("\n" + f"{'client':<22}" + "".join(f"{column:<26}" for column in COLUMNS).rstrip())
    for name, outcome in outcomes.items():
        print_row(name, outcome.cells)
    for name, reason in missing.items():
        print(f"{name:<22}not installed: {reason}")
    for outcome in outcomes.values():
        for note in outcome.notes:
            print(f"note: {note}")


def main() -> None:
    known = [*PYTHON_CLIENTS, *COMMAND_LINES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"which (default: all): {', '.join(known)}")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "clients", help="where they are installed")
    parser.add_argument("--keep", action="store_true", help="keep the folders of the runs, for a look at the files")
    options = parser.parse_args()
    unknown = set(options.clients) - set(known)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    options.clients = options.clients or known
    sys.exit(asyncio.run(run_all(options)))


if __name__ == "__main__":
    main()
