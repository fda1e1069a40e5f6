"""`turnkeep replay`: a recorded trace against a server, with progress, a table, one JSON line and perhaps a plot."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turnkeep.clients.replay import Replay, ReplayedRequest, ReplayOptions, replay
from turnkeep.clients.replay_report import plot, summary, table
from turnkeep.clients.trace_file import TracedRequest, read_trace
from turnkeep.server.command_options import positive


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    """Everything but how the server is found."""
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace in the format convtrace/1")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests under way at once (default: 8)")
    parser.add_argument(
        "--arrival-scale", type=_not_negative, default=0.0, metavar="FACTOR",
        help="1 keeps the recorded pauses, 2 doubles them, 0 waits for nothing (default: 0)",
    )  # fmt: skip
    parser.add_argument("--requests", type=positive, metavar="N", help="the first N requests only")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="generate at most N tokens a request")
    parser.add_argument(
        "--vocab-size", type=positive, default=1000, metavar="N",
        help="ids below N are made up where the trace has no text (default: 1000)",
    )  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw times and reuse (needs turnkeep[plot])")


async def replay_trace(url: str, api_key: str | None, options: argparse.Namespace) -> None:
    """Play it and report. Raises TraceError, PlotError, OSError, aiohttp.ClientError."""
    trace = read_trace(options.trace, vocab_size=options.vocab_size, max_requests=options.requests)
    console = Console(highlight=False)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
        async with session.get(f"{url}/v1/models", raise_for_status=True) as response:
            model = (await response.json())["data"][0]["id"]
        settings = ReplayOptions(
            model=model,
            concurrency=options.concurrency,
            arrival_scale=options.arrival_scale,
            max_output_tokens=options.max_tokens,
        )
        replayed = await _with_progress(session, url, settings, trace, console)
    console.print(table(replayed))
    console.print(json.dumps(summary(replayed)), markup=False, soft_wrap=True)
    if options.plot is not None:
        plot(replayed, options.plot)


async def _with_progress(
    session: aiohttp.ClientSession, url: str, settings: ReplayOptions, trace: list[TracedRequest], console: Console
) -> Replay:
    note_column = TextColumn("{task.fields[note]}")
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), note_column)
    prompt = cached = failed = 0
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(trace), note="")

        def note(request: ReplayedRequest) -> None:
            nonlocal prompt, cached, failed
            prompt += request.num_prompt_tokens
            cached += request.num_cached_tokens
            failed += request.error is not None
            share = f"{100 * cached / prompt:.1f} % reused" if prompt else ""
            progress.update(task, advance=1, note=share + (f", {failed} failed" if failed else ""))

        return await replay(session, url, trace, settings, note)


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError("must be at least 0")
    return value
