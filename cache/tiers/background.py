"""Work beside the engine's loop: one thread that does it in order, and results that the loop takes when it likes.

The loop never waits for a disk while requests run. What the thread is given touches nothing that the loop owns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Background(Protocol):
    """Runs blocking work elsewhere; its end is told in `poll`, in the caller's thread."""

    def submit(
        self, work: Callable[[], T], done: Callable[[T | BaseException], None], *, is_urgent: bool = False
    ) -> None:
        """Run `work` after what was submitted before it; urgent work goes before all that is not."""

    def poll(self) -> int:
        """Call `done` of everything that has ended since the last time. Returns how many there were."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until something has ended that `poll` would tell. False: nothing did in this time."""

    def close(self) -> None:
        """End after the work that is running. What is queued is not done any more."""


class BackgroundThread:
    """The thread starts with the first work."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._urgent: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self._queued: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()
        self._ended: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def submit(
        self, work: Callable[[], T], done: Callable[[T | BaseException], None], *, is_urgent: bool = False
    ) -> None:
        with self._condition:
            (self._urgent if is_urgent else self._queued).append((work, done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="turnkeep-tiers", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def poll(self) -> int:
        if not self._ended:  # the usual case, once a step
            return 0
        with self._condition:
            ended, self._ended = self._ended, deque()
        for done, result in ended:
            done(result)
        return len(ended)

    def wait(self, timeout_s: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: bool(self._ended), timeout_s)

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_closed or bool(self._urgent or self._queued))
                if self._is_closed:
                    return
                work, done = (self._urgent or self._queued).popleft()
            result: Any
            try:
                result = work()
            except Exception as error:
                result = error
            with self._condition:
                self._ended.append((done, result))
                self._condition.notify_all()
