"""The command line: options, environment, and one clear line with the right exit status when it cannot run."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_server import END_TOKEN_ID, user
from scripted_engine import Script, ScriptedEngine

import turnkeep
from turnkeep.cache.config import CacheConfig
from turnkeep.cache.tiers.config import TierConfig
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.handle import EngineStartError
from turnkeep.engine.messages import Loading
from turnkeep.models.catalog import find_model
from turnkeep.server import cli
from turnkeep.server.config import ServerConfig, format_size, parse_size
from turnkeep.server.serve import RunningServer, running_server, serve_until_signal

SCRIPT = Script([98, END_TOKEN_ID])


def make_engine(config: ServerConfig, on_loading: Callable[[Loading], None] | None) -> ScriptedEngine:
    return ScriptedEngine(lambda submit: SCRIPT)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.fixture(autouse=True)
def no_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "TURNKEEP_PORT", "TURNKEEP_HOST", "TURNKEEP_API_KEYS", "TURNKEEP_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def options(*arguments: str) -> ServerConfig:
    return cli.server_config(cli.make_parser().parse_args(["serve", *arguments]))


def test_options_become_settings() -> None:
    config = options(
        "smollm2", "--host", "0.0.0.0", "--port", "9", "--memory", "2GiB", "--max-running", "3", "--max-model-len",
        "99", "--dtype", "float32", "--api-key", "a", "--api-key", "b", "--served-model-name", "x", "--max-step-tokens",
        "64", "--threads", "2", "--no-prefix-caching", "--max-body", "1MB", "--drain-s", "5",
        "--state-dir", "s",
    )  # fmt: skip
    assert config.engine == EngineConfig(
        model="smollm2",
        dtype="float32",
        max_running=3,
        max_model_len=99,
        memory_bytes=2 * 2**30,
        max_step_tokens=64,
        num_threads=2,
        cache=CacheConfig(prefix_caching=False, tiers=TierConfig(folder="s/cache")),
        state_dir="s",
    )
    assert (config.host, config.port) == ("0.0.0.0", 9)
    assert (config.api_keys, config.served_model_names) == (("a", "b"), ("x",))
    assert (config.max_body_bytes, config.drain_s) == (10**6, 5.0)


def test_defaults_listen_on_loopback_only() -> None:
    config = options()
    assert (config.engine.model, config.host, config.port) == ("demo", "127.0.0.1", 8000)
    assert config.api_keys == ()


def test_the_port_comes_from_option_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1111")
    assert options().port == 1111
    monkeypatch.setenv("TURNKEEP_PORT", "2222")
    assert options().port == 2222
    assert options("--port", "0").port == 0


def test_keys_may_stand_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNKEEP_API_KEYS", "one, two,")
    assert options("--api-key", "zero").api_keys == ("zero", "one", "two")


def test_a_bad_port_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PORT", "many")
    assert cli.main(["serve"]) == 1
    assert "PORT=many" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["serve", "--port", "x"], ["serve", "--memory", "lots"], ["serve", "--max-running", "0"]],
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "usage: turnkeep" in capsys.readouterr().err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"turnkeep {turnkeep.__version__}\n"


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if line.startswith("turnkeep: error: ")]
    assert "Traceback" not in captured.err
    return line


def test_a_model_that_does_not_exist_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "no/such/model", "--port", "0"]) == 1
    line = error_line(capsys)
    assert "no/such/model" in line
    assert "demo, smollm2" in line


def test_a_taken_port_is_one_line_and_status_1(taken_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "demo", "--port", str(taken_port)]) == 1
    line = error_line(capsys)
    assert f"port {taken_port} on 127.0.0.1 is taken" in line
    assert "--port" in line


def test_an_address_that_is_not_ours_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "demo", "--host", "192.0.2.1", "--port", "0"]) == 1
    assert "cannot listen on 192.0.2.1" in error_line(capsys)


def test_too_little_memory_is_one_line_with_numbers_and_status_1(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "turnkeep.server.cli", "serve", "demo", "--port", "0", "--memory", "1MiB"]
    environment = {**os.environ, "PYTHONPATH": str(Path(turnkeep.__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("turnkeep: error: ")
    assert "memory" in line
    assert "1.0 MiB" in line, "the number that was given"


def test_a_broken_chat_template_is_one_line_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(find_model("demo").path)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("turnkeep: error: ")
    assert "template" in line


@pytest.mark.parametrize("command", ["chat", "demo"])
def test_no_server_at_the_url_is_one_line_and_status_1(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--url", "http://127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in error_line(capsys)


async def test_an_engine_that_cannot_start_is_told_as_it_says() -> None:
    def make_failing_engine(config: ServerConfig, on_loading: Any) -> ScriptedEngine:
        engine = ScriptedEngine(lambda submit: SCRIPT)
        engine.start_error = "not enough memory: 3 MiB needed, 1 MiB given"
        return engine

    config = ServerConfig(engine=EngineConfig(model="demo"), port=0)
    with pytest.raises(EngineStartError, match="3 MiB needed"):
        async with running_server(config, make_engine=make_failing_engine):
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_ends_the_server(number: signal.Signals) -> None:
    config = ServerConfig(engine=EngineConfig(model="demo"), port=0)
    ready: asyncio.Future[RunningServer] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve_until_signal(config, ready.set_result, make_engine=make_engine))
    server = await ready
    async with aiohttp.ClientSession() as session:
        body = {"model": "demo", "messages": user("x")}
        async with session.post(f"{server.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
        os.kill(os.getpid(), number)
        await asyncio.wait_for(serving, 5)
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{server.url}/health")


async def test_a_signal_while_the_model_loads_ends_the_server() -> None:
    loading = asyncio.Event()

    class SlowEngine(ScriptedEngine):
        async def start(self) -> Any:
            loading.set()
            await asyncio.Event().wait()

    config = ServerConfig(engine=EngineConfig(model="demo"), port=0)
    serving = asyncio.create_task(
        serve_until_signal(config, lambda server: None, make_engine=lambda *_: SlowEngine(lambda submit: SCRIPT))
    )
    await loading.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 5)


async def test_while_the_model_loads_the_server_answers_503() -> None:
    go_on, ports = asyncio.Event(), list[int]()

    class SlowEngine(ScriptedEngine):
        async def start(self) -> Any:
            await go_on.wait()
            return await super().start()

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        ports.append(probe.getsockname()[1])
    config = ServerConfig(engine=EngineConfig(model="demo"), port=ports[0])

    async def run() -> None:
        async with running_server(config, make_engine=lambda *_: SlowEngine(lambda submit: SCRIPT)):
            pass

    running = asyncio.create_task(run())
    async with aiohttp.ClientSession() as session:
        for _ in range(500):
            try:
                async with session.get(f"http://127.0.0.1:{ports[0]}/health") as response:
                    assert response.status == 503
                    assert "loaded" in (await response.json())["error"]["message"]
                    break
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.01)
        else:
            pytest.fail("the server did not listen while its engine was loading")
    go_on.set()
    await running


async def test_the_printed_request_works(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(engine=EngineConfig(model="demo"), port=0)
    async with running_server(config, make_engine=make_engine) as server:
        message = cli.start_message(server, config)
        words = shlex.split(message[message.index("curl") :])
        url, body = words[2], words[-1]
        assert "Content-Type: application/json" in words
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=body, headers={"Content-Type": "application/json"}) as response,
        ):
            assert response.status == 200
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert json.loads(body)["model"] == "demo"


def test_the_printed_request_does_not_show_a_key() -> None:
    class Shown:
        url = "http://127.0.0.1:1"
        service: Any = type("Service", (), {"served_names": ("m",)})
        ready: Any = type("Ready", (), {"limiting_resource": "1 request", "notices": ["float32 is slow here"]})

    config = ServerConfig(engine=EngineConfig(model="demo"), api_keys=("hush",))
    message = cli.start_message(Shown(), config)  # type: ignore[arg-type]
    assert "hush" not in message
    assert "Authorization: Bearer" in message
    assert "note: float32 is slow here" in message
    assert "http://127.0.0.1:1/ui" in message


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2**31), ("2 gib", 2**31), ("2G", 2**31), ("1GB", 10**9), ("1.5KiB", 1536), ("77", 77), ("77B", 77)],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "1XB", "1e9", "GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_sizes_are_written_for_people() -> None:
    assert [format_size(n) for n in (0, 1536, 2**31, 5 * 2**40)] == ["0 B", "1.5 KiB", "2.0 GiB", "5.0 TiB"]
