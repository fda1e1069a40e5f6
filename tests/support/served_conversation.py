"""Drive a real server process over HTTP: start it as a user would, send chat requests, read its metrics."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A `turnkeep serve` process on a free loopback port."""

    def __init__(self, *options: str, model: str = "demo", log: Path | None = None, port: int | None = None) -> None:
        self.port = port if port is not None else free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        environment = dict(os.environ, PYTHONPATH=str(ROOT / "src"))
        command = [sys.executable, "-m", "turnkeep.server.cli", "serve", model, "--port", str(self.port), *options]
        self._log = (log or Path(os.devnull)).open("ab")
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self.process.returncode}")
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"no healthy server within {timeout_s} s")

    def stop(self) -> int:
        """SIGTERM, then the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._log.close()

    def kill(self) -> None:
        """SIGKILL, as a machine that dies would do; its engine leaves by itself."""
        self.process.kill()
        self.process.wait(timeout=30)
        self._log.close()

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def metrics(self) -> dict[str, float]:
        """Sample name (with labels) -> value."""
        values = {}
        for line in self.get("/metrics")[1].splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name] = float(value)
        return values


@dataclass
class Reuse:
    """What one request reused, and what it could have reused at best."""

    num_prompt_tokens: int
    num_cached_tokens: int
    common_prefix_tokens: int  # with anything the engine already computed in this conversation

    @property
    def num_recomputed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def num_excess_tokens(self) -> int:
        """Recomputed although the engine had computed them: what the cache lost."""
        return self.num_recomputed_tokens - (self.num_prompt_tokens - self.common_prefix_tokens)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


@dataclass
class ConversationDriver:
    """Sends the requests of one conversation and keeps account of what the engine computed."""

    server: Server
    conversation_id: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    computed: list[list[int]] = field(default_factory=list)
    reuse: list[Reuse] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        """One chat completion for the messages so far; appends and returns the assistant message."""
        body: dict[str, Any] = {
            "model": self.options.get("model", "demo"),
            "messages": self.messages,
            "return_token_ids": True,
            "temperature": 0,
            **self.options,
        }
        if self.conversation_id is not None:
            body["conversation_id"] = self.conversation_id
        status, answer = self.server.post("/v1/chat/completions", body)
        assert status == 200, answer
        prompt, output = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        best = max((common_prefix(prompt, seen) for seen in self.computed), default=0)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.reuse.append(Reuse(len(prompt), cached, min(best, len(prompt) - 1)))
        # The last sampled token was never fed to the model: it is known, not computed.
        self.computed.append([*prompt, *output[:-1]])
        message: dict[str, Any] = answer["choices"][0]["message"]
        self.messages.append(message)
        return message
