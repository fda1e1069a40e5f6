"""The engine in its own process: start, serve, die, leave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from engine_builders import engine_config, submit
from safetensors.torch import save_file

import turnkeep
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.environment import engine_environment
from turnkeep.engine.framing import FrameDecoder, decode_events, encode_frame
from turnkeep.engine.handle import EngineStartError, ProcessEngine
from turnkeep.engine.messages import Finished, FromEngine, Loading, Ready, Stats, Tokens
from turnkeep.models.config import ModelConfig
from turnkeep.models.tiny import tiny_config
from turnkeep.models.weights import random_tensors


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A small model in a folder, as a user has one."""
    folder = tmp_path_factory.mktemp("tiny")
    values = tiny_config("hybrid")
    (folder / "config.json").write_text(json.dumps(values))
    save_file(random_tensors(ModelConfig.from_dict(values), seed=1), str(folder / "model.safetensors"))
    return engine_config(model=str(folder), num_threads=1)


async def test_a_process_serves_aborts_ignores_ctrl_c_and_leaves(config: EngineConfig) -> None:
    loading: list[Loading] = []
    engine = ProcessEngine(config, on_loading=loading.append)
    ready = await engine.start()
    assert engine.alive
    assert ready.vocab_size == 97
    assert loading
    assert engine.pid is not None
    before = await engine.read_stats()
    os.kill(engine.pid, signal.SIGINT)
    events = [event async for event in engine.submit(submit("r", range(3, 40), 6))]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"
    assert sum(len(event.token_ids) for event in events if isinstance(event, Tokens)) == 6
    aborted = engine.submit(submit("aborted", range(3, 60), 400))
    async with aborted:
        async for event in aborted:
            if isinstance(event, Tokens):
                break
    assert [event.reason async for event in aborted if isinstance(event, Finished)] == ["abort"]
    after = await engine.read_stats()
    assert after.num_running == after.num_waiting == 0
    assert after.num_free_pages + after.gauges["cache_num_evictable_pages"] == before.num_free_pages
    assert engine.heartbeat_age_s < 60
    pid = engine.pid
    await engine.close()
    assert not engine.alive
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_killed_process_ends_every_open_request_with_an_error(config: EngineConfig) -> None:
    engine = ProcessEngine(config)
    await engine.start()
    requests = [engine.submit(submit(f"r{index}", range(3, 20), 400)) for index in range(5)]
    async for event in requests[0]:
        if isinstance(event, Tokens):
            break
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    for events in requests:
        finished = [event async for event in events][-1]
        assert isinstance(finished, Finished)
        assert finished.reason == "error"
        assert finished.message is not None
    assert not engine.alive
    late = [event async for event in engine.submit(submit("late", [3]))]
    assert [event.reason for event in late if isinstance(event, Finished)] == ["error"]
    await engine.close()


async def test_why_a_process_cannot_start_is_told(config: EngineConfig) -> None:
    engine = ProcessEngine(engine_config(model="no-such-model"))
    with pytest.raises(EngineStartError, match="no-such-model"):
        await engine.start()
    assert not engine.alive
    assert engine.pid is None


async def test_a_start_that_is_cancelled_leaves_no_process(config: EngineConfig) -> None:
    engine = ProcessEngine(config)
    task = asyncio.create_task(engine.start())
    while engine.pid is None:
        await asyncio.sleep(0)
    pid = engine.pid
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def read_until(connection: socket.socket, decoder: FrameDecoder, kind: type) -> list[FromEngine]:
    events: list[FromEngine] = []
    while not any(isinstance(event, kind) for event in events):
        data = connection.recv(1 << 16)
        assert data, "the engine left"
        for body in decoder.feed(data):
            events += decode_events(body)
    return events


def test_a_process_sends_heartbeats_prints_nothing_and_leaves_when_the_socket_closes(config: EngineConfig) -> None:
    ours, theirs = socket.socketpair()
    environment = engine_environment(1, os.environ) | {"PYTHONPATH": str(Path(turnkeep.__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "turnkeep.engine.process", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        theirs.close()
        ours.sendall(encode_frame(config))
        decoder = FrameDecoder()
        read_until(ours, decoder, Ready)
        read_until(ours, decoder, Stats)
        ours.sendall(encode_frame(submit("r", range(3, 20), 480)))
        read_until(ours, decoder, Tokens)
        ours.close()
        output, _ = process.communicate()
        watchdog.cancel()
    assert process.returncode == 0
    assert output == b""
