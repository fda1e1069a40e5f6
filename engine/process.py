"""The engine process: `python -m turnkeep.engine.process FD`, started by ProcessEngine with an inherited socket.

The first frame is the EngineConfig. Answers Loading, then Ready or Failed, then serves until Shutdown or until the
socket closes. Logs to standard error; nothing is ever written to standard output.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys

import msgspec

from turnkeep.engine.channel import EngineChannel, ServerGone
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.framing import decode_message
from turnkeep.engine.heartbeat import HEARTBEAT_PERIOD_S, Heartbeat
from turnkeep.engine.loop import EngineFailure, EngineLoop
from turnkeep.engine.messages import Failed, FromEngine, Loading, Ready, Stats, ToEngine

log = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 5.0


class EngineProcess:
    """Drives one engine loop from one channel."""

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._heartbeat = Heartbeat(channel, on_server_gone=_leave_at_once)
        self._early_messages: list[bytes] = []

    def run(self) -> int:
        """Serve until the server is done with us. The exit status."""
        try:
            config = self._read_config()
            self._heartbeat.start()
            built = self._build(config)
            if built is None:
                return 1
            loop, ready = built
            calm_garbage_collector()
            self._heartbeat.status = loop.stats()
            self._channel.send((ready,))
            try:
                self._serve(loop)
            finally:  # also when the engine fails: its last events say why
                self._heartbeat.stop()
                self._channel.finish(FINISH_TIMEOUT_S)
        except ServerGone as gone:
            log.info("leaving: %s", gone)
        except EngineFailure:
            log.exception("the engine ended")
            return 1
        return 0

    def _read_config(self) -> EngineConfig:
        while True:
            bodies = self._channel.read()
            if bodies:
                self._early_messages = bodies[1:]
                return msgspec.msgpack.decode(bodies[0], type=EngineConfig)
            self._channel.wait(HEARTBEAT_PERIOD_S)

    def _build(self, config: EngineConfig) -> tuple[EngineLoop, Ready] | None:
        """Load the model. None when that failed and the server was told why."""
        try:
            if config.script is not None:
                from turnkeep.engine.scripted import build_scripted_engine as build_engine
            else:
                from turnkeep.engine.factory import build_engine
            return build_engine(config, self._put)
        except ServerGone:
            raise
        except Exception as error:
            # What a user can mend (model not found, not enough memory, ...) is a ValueError or an OSError whose
            # message says it all; the server shows that as one line.
            expected = isinstance(error, (ValueError, OSError, LookupError, ImportError))
            log.log(logging.DEBUG if expected else logging.ERROR, "the engine cannot start", exc_info=error)
            self._heartbeat.stop()
            self._channel.put(Failed(str(error) or type(error).__name__))
            self._channel.finish(FINISH_TIMEOUT_S)
            return None

    def _put(self, event: FromEngine) -> None:
        if isinstance(event, Loading):
            self._heartbeat.status = event
            self._channel.send((event,))
        elif isinstance(event, Stats) and not event.requested:
            self._heartbeat.status = event  # the thread sends it
        else:
            self._channel.put(event)

    def _serve(self, loop: EngineLoop) -> None:
        for body in self._early_messages:
            loop.receive(decode_message(body))
        while not loop.is_shut_down:
            for body in self._channel.read():
                message: ToEngine = decode_message(body)
                loop.receive(message)
            if not loop.step():
                self._channel.flush()
                if not loop.has_work:
                    self._channel.wait(HEARTBEAT_PERIOD_S)
            else:
                self._channel.flush()


def calm_garbage_collector() -> None:
    """Full collections would stop every step for tens of milliseconds, to look again at a model that never changes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _leave_at_once() -> None:
    # From the heartbeat thread, perhaps in the middle of a long step. There is no state worth saving.
    os._exit(0)


def main() -> int:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when the engine leaves
    os.dup2(2, 1)  # whatever a library prints must not mix with the server's output
    level = logging.getLevelNamesMapping().get(os.environ.get("TURNKEEP_LOG_LEVEL", "info").upper(), logging.INFO)
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s engine %(levelname)s %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    channel = EngineChannel(connection)
    try:
        return EngineProcess(channel).run()
    finally:
        channel.close()


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # Nothing is left to save, and tearing torch down takes seconds that the server's shutdown would wait for.
    os._exit(status)
