"""Events on their way to the server, merged while the reader is slow.

Waiting Tokens events of one request become one, so a reader that falls behind costs memory for the tokens
themselves and nothing for the number of events. Not thread-safe; the owner locks.
"""

from __future__ import annotations

from turnkeep.engine.messages import FromEngine, Stats, Tokens


def merge_tokens(earlier: Tokens, later: Tokens) -> None:
    """Append what `later` carries to `earlier`, both of the same request."""
    if later.logprobs is not None:
        earlier.logprobs = [*(earlier.logprobs or ()), *later.logprobs]
    earlier.token_ids.extend(later.token_ids)


class EventBuffer:
    """Events in order; of one request, tokens that nobody has taken yet are merged."""

    def __init__(self) -> None:
        self._events: list[FromEngine] = []
        self._open_tokens: dict[str, Tokens] = {}  # request -> its last waiting event, when that is Tokens
        self._stats: Stats | None = None

    def put(self, event: FromEngine) -> None:
        """Add one event. Of unrequested Stats only the newest is kept."""
        if isinstance(event, Tokens):
            waiting = self._open_tokens.get(event.request_id)
            if waiting is not None:
                merge_tokens(waiting, event)
                return
            self._open_tokens[event.request_id] = event
        elif isinstance(event, Stats) and not event.requested:
            self._stats = event
            return
        self._events.append(event)

    def take(self) -> list[FromEngine]:
        """All waiting events; the buffer is empty afterwards."""
        events = self._events
        if self._stats is not None:
            events.append(self._stats)
            self._stats = None
        self._events = []
        self._open_tokens.clear()
        return events

    def __len__(self) -> int:
        return len(self._events) + (self._stats is not None)
