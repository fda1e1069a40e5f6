"""Whether the openai package can open WebSockets here, and what its failures mean."""

from __future__ import annotations

from importlib.util import find_spec


def has_websockets() -> bool:
    """Whether the optional `websockets` package is installed."""
    return find_spec("websockets") is not None


def is_refused(error: BaseException) -> bool:
    """The server answered, but not as a WebSocket; or none can be opened here."""
    if isinstance(error, ImportError):
        return True
    return any(kind.__name__ in ("InvalidHandshake", "InvalidMessage") for kind in type(error).__mro__)


def is_closed(error: BaseException) -> bool:
    """The connection is gone."""
    names = ("ConnectionClosed", "WebSocketConnectionClosedError")
    return any(kind.__name__ in names for kind in type(error).__mro__)
