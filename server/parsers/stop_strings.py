"""Stop strings: text is held back while it may be the start of one, so that no part of it is ever delivered."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feeds text through; what comes out is safe to deliver. The stop string that is complete first ends the text.

    Which one that is does not depend on how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Empty strings are ignored: they would stop before anything is said."""
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped: bool = False
        self.matched: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether there are any to look for."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Text that can be delivered now; empty for everything behind the stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is not None:
            self.stopped, self.matched, self._held = True, best[2], ""
            return text[: best[1]]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What was held and turned out to be no stop string, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
