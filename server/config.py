"""The server's settings, resolved once by the command line (or a test) and never changed afterwards."""

from __future__ import annotations

import re
from dataclasses import dataclass

from turnkeep.engine.config import EngineConfig

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Every field but the engine's has a working default."""

    engine: EngineConfig
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    served_model_names: tuple[str, ...] = ()  # empty: the model's own name
    accept_any_model: bool = False  # answer whatever model name a client sends (test suites)
    api_keys: tuple[str, ...] = ()  # empty: no authentication
    state_dir: str | None = None  # stored responses and conversations; None: in memory, gone with the process
    redis_url: str | None = None  # keep them there instead, shared with other servers
    tool_call_parser: str | None = None  # how the model writes calls and reasoning; None: as its template tells
    reasoning_parser: str | None = None
    max_body_bytes: int = 32 * 2**20
    max_waiting: int = 1024  # turns that may wait for admission before new ones get 429
    tokens_per_minute: int | None = None  # computed tokens that each key may ask for; None: no limit
    max_turns_per_key: int | None = None  # turns that each key may have open at once; None: no limit
    write_timeout_s: float = 600.0  # a client that takes nothing of its stream for so long is given up
    keep_alive_s: float = 120.0  # idle HTTP connections; the longest pool of a known client keeps them 90 s
    comment_interval_s: float = 10.0  # a comment on a stream that has nothing to say, so that proxies keep it open
    status_delay_s: float = 15.0  # a stream that still waits for admission gets its 200 and comments after this
    drain_s: float = 30.0  # after SIGTERM: how long running turns may go on


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "512 MB", "1g" or "1048576" (GiB and G are powers of 1024, GB is a power of 1000).

    Raises ValueError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a size: {text!r} (write for example 2GiB)")
    number, prefix, binary = match.groups()
    decimal = text.strip().lower().endswith("b") and not binary
    return int(float(number) * (1000 if decimal else 1024) ** _POWERS[prefix.lower()])


def format_size(num_bytes: float) -> str:
    """The other way round, for messages: 2147483648 is "2.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
