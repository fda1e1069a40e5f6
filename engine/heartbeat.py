"""A thread that repeats the engine's last status about once a second, also while a step or the loading is long.

It notices as well that the server is gone, and then ends the process: nobody is left to compute for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from turnkeep.engine.channel import EngineChannel, ServerGone
from turnkeep.engine.messages import Loading, Stats

HEARTBEAT_PERIOD_S = 1.0


class Heartbeat:
    """`status` is what is repeated; the loop replaces it by newer ones. `on_server_gone` runs in the thread."""

    def __init__(self, channel: EngineChannel, on_server_gone: Callable[[], None]) -> None:
        self.status: Loading | Stats = Loading("starting", 0, 1)
        self._channel = channel
        self._on_server_gone = on_server_gone
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turnkeep-heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No heartbeat is sent after this returns."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(HEARTBEAT_PERIOD_S):
            try:
                self._channel.send((self.status,))
            except ServerGone:
                self._on_server_gone()
                return
