"""`turnkeep chat`: talk to a model in the terminal and see per turn what was reused and what had to be computed."""

from __future__ import annotations

import argparse
import asyncio
import threading
from typing import Any

import aiohttp
from rich.console import Console
from rich.markup import escape

from turnkeep.clients.chat_client import ChatClient, Reply, RequestFailedError
from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, TOOLS, OrderDesk

MAX_TOOL_ROUNDS = 8
HELP = "Type a message. /new starts over, /quit (or Ctrl-D) leaves."


class Conversation:
    """One conversation in the terminal: its messages, and the order desk whose tools the demo model calls."""

    def __init__(self, client: ChatClient, console: Console, options: argparse.Namespace) -> None:
        self._client = client
        self._console = console
        has_tools = client.model == "demo" and not options.no_tools
        self._tools = TOOLS if has_tools else None
        self._desk = OrderDesk(1)
        self._sampling = {} if options.temperature is None else {"temperature": options.temperature}
        self._last_kind = ""
        system = options.system if options.system is not None else SYSTEM_PROMPT if has_tools else None
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]

    async def say(self, text: str) -> None:
        """One user message, the answer, and the tools it calls until it has no more calls."""
        self._messages.append({"role": "user", "content": text})
        for _ in range(MAX_TOOL_ROUNDS):
            self._last_kind = ""
            reply = await self._client.send(self._messages, tools=self._tools, on_text=self._show, **self._sampling)
            self._messages.append(reply.message)
            self._console.print()
            for call in reply.tool_calls:
                result = self._desk.call_json(call["function"]["name"], call["function"]["arguments"])
                self._console.print(
                    f"[cyan]{escape(call['function']['name'])}({escape(call['function']['arguments'])})"
                    f" -> {escape(result)}[/cyan]"
                )
                self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            self._console.print(f"[dim]{cost_line(reply)}[/dim]")
            if not reply.tool_calls:
                return
        self._console.print("[yellow]The model keeps calling tools; stopped here.[/yellow]")

    def _show(self, kind: str, text: str) -> None:
        if kind != self._last_kind and self._last_kind:
            self._console.print()
        self._last_kind = kind
        self._console.print(escape(text), end="", style="dim italic" if kind == "reasoning" else None, soft_wrap=True)


def cost_line(reply: Reply) -> str:
    """The cost of one request in one line."""
    return (
        f"prompt {reply.num_prompt_tokens}, reused {reply.num_cached_tokens}, "
        f"recomputed {reply.num_computed_tokens}, generated {reply.num_generated_tokens}, "
        f"first token after {reply.time_to_first_token_s * 1000:.0f} ms"
    )


async def chat(url: str, api_key: str | None, options: argparse.Namespace) -> None:
    """Read lines until the input ends. Raises RequestFailedError, aiohttp.ClientError when there is no server."""
    console = Console(highlight=False)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=5)) as session:
        client = await ChatClient.connect(session, url, api_key)
        console.print(f"[bold]{escape(client.model)}[/bold] at {url}. {HELP}")
        conversation = Conversation(client, console, options)
        lines = LineReader()
        while (line := await lines.read("> ")) is not None and line.strip() != "/quit":
            if line.strip() == "/new":
                client = await ChatClient.connect(session, url, api_key)
                conversation = Conversation(client, console, options)
            elif line.strip():
                try:
                    await conversation.say(line)
                except RequestFailedError as error:
                    console.print(f"[red]{escape(str(error))}[/red]")


class LineReader:
    """Lines from standard input without blocking the event loop.

    A daemon thread: a read that still waits must not keep the program from leaving.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def read(self, prompt: str) -> str | None:
        """The next line, or None at the end of the input."""
        line: asyncio.Future[str | None] = self._loop.create_future()
        threading.Thread(target=self._read, args=(prompt, line), daemon=True).start()
        return await line

    def _read(self, prompt: str, line: asyncio.Future[str | None]) -> None:
        text: str | None
        try:
            text = input(prompt)
        except (EOFError, OSError):
            text = None
        self._loop.call_soon_threadsafe(lambda: None if line.done() else line.set_result(text))
