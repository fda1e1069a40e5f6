"""The engine's end of the byte stream to the server: reads without blocking, writes without blocking.

A server that reads slowly never stalls a step: what the socket does not take waits here, merged. The heartbeat
thread and the loop may both send.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterable

from turnkeep.engine.coalescing import EventBuffer
from turnkeep.engine.framing import FrameDecoder, encode_events
from turnkeep.engine.messages import FromEngine

_READ_BYTES = 1 << 18


class ServerGone(ConnectionError):
    """The server closed its end, or died."""


class EngineChannel:
    """Frames over `connection`, a connected stream socket that this object owns from now on."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decoder = FrameDecoder()
        self._lock = threading.Lock()  # guards the two fields below and writing
        self._buffer = EventBuffer()
        self._unsent = memoryview(b"")  # the rest of a frame that the socket took a part of

    def put(self, event: FromEngine) -> None:
        """Queue one event for the next flush."""
        with self._lock:
            self._buffer.put(event)

    def flush(self) -> bool:
        """Write what the socket takes now. True when nothing is left. Raises ServerGone."""
        with self._lock:
            while True:
                if not self._unsent:
                    if not len(self._buffer):
                        return True
                    self._unsent = memoryview(encode_events(self._buffer.take()))
                try:
                    sent = self._socket.send(self._unsent)
                except BlockingIOError:
                    return False
                except OSError as error:
                    raise ServerGone(str(error)) from error
                self._unsent = self._unsent[sent:]

    def send(self, events: Iterable[FromEngine]) -> None:
        """Queue events and write what the socket takes now. Raises ServerGone."""
        for event in events:
            self.put(event)
        self.flush()

    def read(self) -> list[bytes]:
        """Frame bodies that have arrived, without waiting. Raises ServerGone at the end of the stream."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ServerGone(str(error)) from error
        if not data:
            raise ServerGone("the server closed the connection")
        return self._decoder.feed(data)

    def wait(self, timeout_s: float) -> None:
        """Sleep until something has arrived, or until waiting output can be written, or for `timeout_s`."""
        with self._lock:
            has_output = bool(self._unsent) or len(self._buffer) > 0
        select.select([self._socket], [self._socket] if has_output else [], [], timeout_s)

    def close(self) -> None:
        self._socket.close()

    def finish(self, timeout_s: float) -> None:
        """Write all that waits, for at most `timeout_s`."""
        while not self.flush():
            _, writable, _ = select.select([], [self._socket], [], timeout_s)
            if not writable:
                return
