"""`turnkeep demo`: the order-desk agent with real tool functions over HTTP, and what every request of it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import aiohttp
from rich.console import Console
from rich.markup import escape

from turnkeep.clients.chat_client import ChatClient, Reply
from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.order_desk import OrderDesk
from turnkeep.models.demo.script import Turn

MAX_TOOL_ROUNDS = 8
HEADER = "turn request  prompt  reused recomputed generated  TTFT ms  what"


@dataclass(slots=True)
class DemoRow:
    """One request of the agent."""

    turn: int
    request: int
    reply: Reply
    what: str

    def line(self) -> str:
        reply = self.reply
        return (
            f"{self.turn:>4} {self.request:>7} {reply.num_prompt_tokens:>7} {reply.num_cached_tokens:>7} "
            f"{reply.num_computed_tokens:>10} {reply.num_generated_tokens:>9} "
            f"{reply.time_to_first_token_s * 1000:>8.1f}  {self.what}"
        )


@dataclass(slots=True)
class DemoResult:
    """The whole run: every request, and how many answers held what the script expects."""

    rows: list[DemoRow] = field(default_factory=list)
    num_turns: int = 0
    num_right: int = 0

    def summary(self) -> str:
        num_prompt_tokens = sum(row.reply.num_prompt_tokens for row in self.rows)
        num_computed_tokens = sum(row.reply.num_computed_tokens for row in self.rows)
        share = 1 - num_computed_tokens / max(num_prompt_tokens, 1)
        return (
            f"{self.num_turns} turns, {len(self.rows)} requests: {num_prompt_tokens} prompt tokens, of which "
            f"{num_computed_tokens} were computed ({share:.1%} reused); {self.num_right} of {self.num_turns} "
            "answers hold the expected facts"
        )


async def run_agent(client: ChatClient, console: Console, *, num_turns: int, seed: int) -> DemoResult:
    """Play the scripted user against the model; tools are run by a real order desk. Prints a row per request."""
    script = conversation(seed, num_turns)
    desk = OrderDesk(script.seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": script.system}]
    result = DemoResult()
    console.print(HEADER, style="bold")
    for number, turn in enumerate(script.turns, 1):
        messages.append({"role": "user", "content": turn.user})
        console.print(f"[dim]     user: {escape(turn.user)}[/dim]")
        await _run_turn(client, console, messages, script.tools, desk, number, result)
        result.num_turns += 1
        result.num_right += _is_right(turn, messages[-1])
    return result


async def _run_turn(
    client: ChatClient,
    console: Console,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    desk: OrderDesk,
    number: int,
    result: DemoResult,
) -> None:
    """Requests until the model answers without calling a tool."""
    for request in range(1, MAX_TOOL_ROUNDS + 1):
        reply = await client.send(messages, tools=tools, temperature=0)
        messages.append(reply.message)
        row = DemoRow(number, request, reply, _what(reply))
        result.rows.append(row)
        console.print(row.line(), markup=False, soft_wrap=True)
        for call in reply.tool_calls:
            content = desk.call_json(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not reply.tool_calls:
            return


def _what(reply: Reply) -> str:
    if reply.tool_calls:
        return ", ".join(f"{call['function']['name']}({call['function']['arguments']})" for call in reply.tool_calls)
    return str(reply.message["content"])


def _is_right(turn: Turn, answer: dict[str, Any]) -> bool:
    content = answer.get("content") or ""
    return answer["role"] == "assistant" and all(fact in content for fact in turn.expected_facts)


async def demo(url: str, api_key: str | None, *, num_turns: int, seed: int) -> None:
    """Run the agent against a server and print the table. Raises RequestFailedError, aiohttp.ClientError."""
    console = Console(highlight=False)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=5)) as session:
        client = await ChatClient.connect(session, url, api_key)
        result = await run_agent(client, console, num_turns=num_turns, seed=seed)
    console.print(result.summary(), style="bold", soft_wrap=True)
