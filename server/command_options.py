"""The options of the commands, and what each may be. What becomes of them is in cli.py."""

from __future__ import annotations

import argparse
import os

from turnkeep.engine.sizing import POOL_DTYPES, STATE_DTYPES
from turnkeep.models.catalog import MODEL_NAMES
from turnkeep.server.cache_options import add_cache_options
from turnkeep.server.config import DEFAULT_HOST, DEFAULT_PORT, parse_size
from turnkeep.server.config_file import add_config_option
from turnkeep.server.draft_options import add_draft_options
from turnkeep.server.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS
from turnkeep.server.tier_options import add_tier_options


class CommandError(Exception):
    """The command cannot run; the message is shown as one line."""


INSPECTED_LENGTHS = (512, 2048, 8192, 32768, 131072)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(MODEL_NAMES)
    model = parser.add_argument_group("model and engine")
    model.add_argument("model", nargs="?", default="demo", help=f"{names}, a model folder or a GGUF file (demo)")
    model.add_argument(
        "--allow-hub",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="fetch a model called owner/name from the hub",
    )
    model.add_argument(
        "--engine", type=_script, metavar="scripted:FILE", dest="script",
        help="follow the rules of a JSON or TOML file instead of a model (docs/scripted-engine.md)",
    )  # fmt: skip
    model.add_argument("--dtype", choices=("bfloat16", "float32"), help="weights (default: what the machine does best)")
    _add_pool_dtypes(model)
    model.add_argument("--max-running", type=positive, help="requests that may run at once")
    model.add_argument("--max-model-len", type=positive, help="tokens of prompt and answer together")
    model.add_argument("--memory", type=_size, metavar="SIZE", help="for the cache, for example 2GiB")
    model.add_argument("--max-step-tokens", type=positive, help="tokens computed in one step")
    model.add_argument("--threads", type=positive, help="compute threads of the engine (default: all cores)")
    add_config_option(model)
    add_cache_options(parser)
    add_draft_options(parser)


def _add_pool_dtypes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--kv-dtype", choices=POOL_DTYPES, help="keys and values (default: that of the weights)")
    group.add_argument(
        "--state-dtype", choices=STATE_DTYPES, default="float32", help="recurrent states (default: float32); 16 bits "
        "make snapshots smaller and decoding slower, and round the state at every 32nd token",
    )  # fmt: skip


def add_inspect_options(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(MODEL_NAMES)
    parser.add_argument("model", nargs="?", default="demo", help=f"{names}, a model folder or a GGUF file (demo)")
    parser.add_argument("--allow-hub", action="store_true", help="fetch a model called owner/name from the hub")
    group = parser.add_argument_group("what to assume")
    group.add_argument("--memory", type=_size, metavar="SIZE", help="for the cache (default: what the engine takes)")
    group.add_argument("--dtype", choices=POOL_DTYPES, help="weights (default: what the machine does best)")
    _add_pool_dtypes(group)
    group.add_argument(
        "--tokens", type=positive, action="append", metavar="N", help="length of a conversation; may be repeated"
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    tiers = parser.add_argument_group("colder tiers")
    tiers.add_argument("--url", help="a running server: show what its tiers hold, and nothing of a model")
    tiers.add_argument("--api-key", help="key to send (default: TURNKEEP_API_KEY)")
    tiers.add_argument("--state-dir", metavar="FOLDER", help="where to look for disk caches (default: as serve)")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--host", help=f"address to listen on (default: {DEFAULT_HOST})")
    server.add_argument("--port", type=_port, help=f"port, 0 for any (default: TURNKEEP_PORT, PORT or {DEFAULT_PORT})")
    server.add_argument(
        "--api-key", action="append", metavar="KEY", help="a key that clients must send; may be given several times "
        "(or TURNKEEP_API_KEYS, comma-separated, which the process list does not show)",
    )  # fmt: skip
    server.add_argument("--served-model-name", action="append", metavar="NAME", help="name in the API; may be repeated")
    server.add_argument(
        "--accept-any-model", action=argparse.BooleanOptionalAction, default=False, help="answer under whatever model "
        "name is asked for",
    )  # fmt: skip
    server.add_argument(
        "--tool-call-parser", choices=TOOL_CALL_PARSERS, metavar="NAME",
        help=f"how the model writes tool calls (default: as its chat template tells): {', '.join(TOOL_CALL_PARSERS)}",
    )  # fmt: skip
    server.add_argument(
        "--reasoning-parser", choices=REASONING_PARSERS, metavar="NAME",
        help=f"how it writes reasoning (default: as its chat template tells): {', '.join(REASONING_PARSERS)}",
    )  # fmt: skip
    server.add_argument("--max-body", type=_size, metavar="SIZE", help="largest request body (default: 32MiB)")
    server.add_argument("--max-waiting", type=positive, help="turns that may wait before new ones get 429")
    server.add_argument(
        "--state-dir", metavar="FOLDER", help="where stored responses and conversations are kept (default: "
        "TURNKEEP_STATE_DIR, or turnkeep in XDG_STATE_HOME, which is ~/.local/state by default)",
    )  # fmt: skip
    server.add_argument(
        "--redis-url", metavar="URL", help="keep them in Redis instead, shared by several servers, for example "
        "redis://127.0.0.1:6379/0 (or TURNKEEP_REDIS_URL, which the process list does not show)",
    )  # fmt: skip
    add_tier_options(server)
    server.add_argument("--tokens-per-minute", type=positive, help="computed tokens that each API key may ask for")
    server.add_argument("--max-turns-per-key", type=positive, help="requests that each API key may have open at once")
    server.add_argument("--drain-s", type=float, help="seconds that running turns get after SIGTERM (default: 30)")


def add_client_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser)
    parser.add_argument("--url", help="a running server, for example http://127.0.0.1:8000 (default: start one)")
    parser.add_argument("--api-key", help="key to send (default: TURNKEEP_API_KEY)")


def environment_port() -> int | None:
    for name in ("TURNKEEP_PORT", "PORT"):
        text = os.environ.get(name)
        if text:
            try:
                return _port(text)
            except argparse.ArgumentTypeError as error:
                raise CommandError(f"{name}={text}: {error}") from None
    return None


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError("a port is a number from 0 to 65535")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError("a whole number greater than 0 is needed")
    return int(text)


def _script(text: str) -> str:
    kind, _, file = text.partition(":")
    if kind != "scripted" or not file:
        raise argparse.ArgumentTypeError("only scripted:FILE is known; without it the model runs")
    return file


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
