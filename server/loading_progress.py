"""Shows on standard error how far the model is loaded: a bar on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from turnkeep.engine.messages import Loading


class LoadingProgress:
    """Give report() to the engine as its listener."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stderr)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage: str | None = None
        self._is_closed = False

    def report(self, loading: Loading) -> None:
        if self._is_closed:  # a later engine, started after the first one died: the log tells of it
            return
        if loading.stage != self._stage:
            self._stage = loading.stage
            if not self._console.is_terminal:
                print(f"loading {loading.stage} ...", file=sys.stderr, flush=True)
        if not self._console.is_terminal:
            return
        if self._progress is None or self._task is None:
            columns = (TextColumn("loading {task.description}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.start()
            self._task = self._progress.add_task(loading.stage)
        total = max(loading.total, 1)
        self._progress.update(self._task, description=loading.stage, completed=loading.done, total=total)

    def close(self) -> None:
        """Take the bar away. Idempotent."""
        self._is_closed = True
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> LoadingProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
