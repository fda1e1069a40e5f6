"""The command `turnkeep`: serve, chat, demo, inspect. Settings come from options, then the environment, then defaults.

Exit status: 0 done, 1 could not run (one line on standard error says why), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from aiohttp import ClientError

import turnkeep
from turnkeep.clients.chat_client import RequestFailedError
from turnkeep.clients.replay_report import PlotError
from turnkeep.clients.trace_file import TraceError
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.environment import default_memory_bytes, has_bf16_instructions
from turnkeep.engine.handle import EngineStartError
from turnkeep.models.catalog import ModelFilesError, ModelNotFound, find_model
from turnkeep.models.config import ConfigError
from turnkeep.models.hub import fetch_model, is_hub_id
from turnkeep.server.cache_options import cache_config
from turnkeep.server.chat_template import TemplateError
from turnkeep.server.command_options import (
    INSPECTED_LENGTHS,
    CommandError,
    add_client_options,
    add_inspect_options,
    add_model_options,
    add_server_options,
    environment_port,
    positive,
)
from turnkeep.server.config import ServerConfig
from turnkeep.server.config_file import ConfigFileError, parse_with_file
from turnkeep.server.draft_options import draft_settings
from turnkeep.server.loading_progress import LoadingProgress
from turnkeep.server.logging_setup import set_up_logging
from turnkeep.server.replay_command import add_replay_options, replay_trace
from turnkeep.server.serve import PortTakenError, RunningServer, serve_until_signal
from turnkeep.server.state_folder import asked_state_dir, existing_state_dir, state_dir
from turnkeep.server.tier_options import FOLDER, tier_config
from turnkeep.server.tokenizer import TokenizerError

log = logging.getLogger(__name__)


_FAILURES = (
    CommandError, ModelNotFound, ModelFilesError, EngineStartError, RequestFailedError, ClientError, TraceError,
    PlotError,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script. Returns the exit status."""
    try:
        options = parse_with_file(make_parser(), list(sys.argv[1:] if arguments is None else arguments))
    except ConfigFileError as error:
        return _fail(str(error))
    set_up_logging(options.log_level)
    os.environ["TURNKEEP_LOG_LEVEL"] = options.log_level  # for the engine process
    try:
        options.run(options)
    except _FAILURES as error:
        return _fail(str(error))
    except (TemplateError, TokenizerError) as error:
        return _fail(f"the model's files cannot be used: {error}")
    except PortTakenError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(error.strerror or str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(reason: str) -> int:
    print(f"turnkeep: error: {' '.join(reason.split())}", file=sys.stderr)
    return 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="turnkeep", description="Serve hybrid language models to agents.")
    parser.add_argument("--version", action="version", version=f"turnkeep {turnkeep.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    # No abbreviations: a key of a configuration file with a letter missing must not become another option.
    serve = commands.add_parser(
        "serve", help="serve a model over HTTP", parents=[serve_parser()], add_help=False, allow_abbrev=False
    )
    serve.set_defaults(run=run_serve, log_level="info")

    chat = commands.add_parser("chat", help="chat in the terminal, with the cost of every turn")
    add_client_options(chat)
    chat.add_argument("--system", help="system message (default: none, or the order desk's with its tools)")
    chat.add_argument("--no-tools", action="store_true", help="do not offer the demo model's tools")
    chat.add_argument("--temperature", type=float, help="sampling temperature (default: the model's)")
    chat.set_defaults(run=run_chat, log_level="warning")

    demo = commands.add_parser("demo", help="run the order-desk agent and show what every request cost")
    add_client_options(demo)
    demo.add_argument("--turns", type=positive, default=20, help="user turns (default: 20)")
    demo.add_argument("--seed", type=int, default=1, help="which conversation (default: 1)")
    demo.set_defaults(run=run_demo, log_level="warning")

    replay = commands.add_parser("replay", help="play a recorded trace and measure reuse and times")
    add_replay_options(replay)
    add_client_options(replay)
    replay.set_defaults(run=run_replay, log_level="warning")

    inspect = commands.add_parser("inspect", help="show what a model is made of, and what its cache costs")
    add_inspect_options(inspect)
    inspect.set_defaults(run=run_inspect, log_level="warning")

    for command in (serve, chat, demo, replay, inspect):
        levels = ("debug", "info", "warning", "error")
        command.add_argument("--log-level", choices=levels, help="how much to log on standard error")
    return parser


def serve_parser() -> argparse.ArgumentParser:
    """The options of `turnkeep serve`."""
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    add_server_options(parser)
    return parser


def model_path(options: argparse.Namespace) -> str:
    """The model's name, or the folder of an id of the hub where that is allowed. Raises ModelNotFound."""
    if options.allow_hub and is_hub_id(options.model):
        return str(fetch_model(options.model))
    return str(options.model)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Options that were not given stay None: the engine decides them and says how. Raises CommandError."""
    try:
        cache = cache_config(options)
    except ValueError as error:
        raise CommandError(str(error)) from error
    config = EngineConfig(
        model=model_path(options),
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        state_dtype=options.state_dtype,
        max_running=options.max_running,
        max_model_len=options.max_model_len,
        memory_bytes=options.memory,
        num_threads=options.threads,
        **draft_settings(options),
        cache=cache,
        script=options.script,
    )
    if options.max_step_tokens is not None:
        config = msgspec.structs.replace(config, max_step_tokens=options.max_step_tokens)
    return config


def server_config(options: argparse.Namespace) -> ServerConfig:
    """Raises CommandError for a bad value in the environment."""
    redis_url = options.redis_url or os.environ.get("TURNKEEP_REDIS_URL") or None
    keys = list(options.api_key or ())
    keys += [key.strip() for key in os.environ.get("TURNKEEP_API_KEYS", "").split(",") if key.strip()]
    # The folder of a hub's model is called after a revision.
    hub_names = [options.model] if options.allow_hub and is_hub_id(options.model) else []
    # Who keeps everything in Redis has not asked for a folder.
    folder = state_dir(options.state_dir) if redis_url is None else asked_state_dir(options.state_dir)
    given = {
        "host": options.host or os.environ.get("TURNKEEP_HOST"),
        "port": options.port if options.port is not None else environment_port(),
        "api_keys": tuple(keys),
        "served_model_names": tuple(options.served_model_name or hub_names),
        "accept_any_model": options.accept_any_model,
        "tool_call_parser": options.tool_call_parser,
        "reasoning_parser": options.reasoning_parser,
        "max_body_bytes": options.max_body,
        "max_waiting": options.max_waiting,
        "redis_url": redis_url,
        "state_dir": None if redis_url is not None else folder,
        "tokens_per_minute": options.tokens_per_minute,
        "max_turns_per_key": options.max_turns_per_key,
        "drain_s": options.drain_s,
    }
    engine = engine_config(options)
    cache = msgspec.structs.replace(engine.cache, tiers=tier_config(options, folder))
    return ServerConfig(
        engine=msgspec.structs.replace(engine, cache=cache, state_dir=folder),
        **{name: value for name, value in given.items() if value is not None},
    )


def run_serve(options: argparse.Namespace) -> None:
    config = server_config(options)
    with LoadingProgress() as progress:

        def on_ready(server: RunningServer) -> None:
            progress.close()
            print(start_message(server, config), flush=True)

        _run(serve_until_signal(config, on_ready, on_loading=progress.report))


def run_chat(options: argparse.Namespace) -> None:
    from turnkeep.server.terminal_chat import chat

    _run_client(options, lambda url, key: chat(url, key, options))


def run_demo(options: argparse.Namespace) -> None:
    from turnkeep.server.demo import demo

    _run_client(options, lambda url, key: demo(url, key, num_turns=options.turns, seed=options.seed))


def run_replay(options: argparse.Namespace) -> None:
    _run_client(options, lambda url, key: replay_trace(url, key, options))


def run_inspect(options: argparse.Namespace) -> None:
    from rich.console import Console

    from turnkeep.server.inspect_model import inspect_model, print_report, report_json
    from turnkeep.server.inspect_tiers import folder_json, folder_tiers, print_folder

    if options.url:
        _run(_inspect_server(options))
        return
    config = EngineConfig(model=model_path(options), kv_dtype=options.kv_dtype, state_dtype=options.state_dtype)
    try:
        report = inspect_model(
            find_model(config.model),
            config,
            dtype=options.dtype or ("bfloat16" if has_bf16_instructions() else "float32"),
            memory_bytes=options.memory or default_memory_bytes(),
            lengths=options.tokens or INSPECTED_LENGTHS,
        )
    except ConfigError as error:
        raise CommandError(str(error)) from error
    folder = existing_state_dir(options.state_dir) / FOLDER
    layouts = folder_tiers(folder)
    if options.json:
        print(json.dumps(report_json(report) | {"disk_caches": folder_json(layouts)}, indent=2))
        return
    print_report(report, Console())
    print_folder(layouts, folder, Console())


async def _inspect_server(options: argparse.Namespace) -> None:
    from rich.console import Console

    from turnkeep.server.inspect_tiers import print_server_tiers, read_server_tiers, server_tiers_json

    key = options.api_key or os.environ.get("TURNKEEP_API_KEY")
    report = await read_server_tiers(options.url.rstrip("/"), key)
    if options.json:
        print(json.dumps(server_tiers_json(report), indent=2))
    else:
        print_server_tiers(report, Console())


def start_message(server: RunningServer, config: ServerConfig) -> str:
    """Where the server is, what bounds it, and a first request to paste."""
    name = server.service.served_names[0]
    body = {"model": name, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_keys else ""
    lines = [
        f"Serving {name} at {server.url} ({server.ready.limiting_resource})",
        *(f"note: {notice}" for notice in server.ready.notices),
        f"Look at it at {server.url}/ui",
        "Try:",
        f"  curl -N {server.url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
        f"    -d {shlex.quote(msgspec.json.encode(body).decode())}",
    ]
    return "\n".join(lines)


def _run_client(options: argparse.Namespace, client: Callable[[str, str | None], Coroutine[Any, Any, None]]) -> None:
    """Run a client against --url, or against a server of its own on a free port."""
    from turnkeep.server.serve import running_server

    key = options.api_key or os.environ.get("TURNKEEP_API_KEY")

    async def run() -> None:
        if options.url:
            await client(options.url.rstrip("/"), key)
            return
        with LoadingProgress() as progress:
            config = ServerConfig(engine=engine_config(options), port=0)
            async with running_server(config, on_loading=progress.report) as server:
                progress.close()
                await client(server.url, None)

    _run(run())


def _run(main_coroutine: Coroutine[Any, Any, None]) -> None:
    """In uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main_coroutine)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main_coroutine)


if __name__ == "__main__":
    sys.exit(main())
