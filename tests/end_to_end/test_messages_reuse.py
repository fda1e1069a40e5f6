"""An agent that speaks Anthropic's protocol reuses what it has computed, as one that speaks OpenAI's does."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest
from served_conversation import Server, common_prefix

from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, TOOLS, OrderDesk

NUM_TURNS = 10
MAX_REQUESTS_A_TURN = 5
SLACK_TOKENS = 16
MARK = {"type": "ephemeral"}
MESSAGES_TOOLS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", ""),
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]


class Agent:
    """Keeps the history as the official client's agents do: blocks sent back as they came, the newest one marked."""

    def __init__(self, server: Server, client: anthropic.Anthropic, *, streams: bool) -> None:
        self.server = server
        self.client = client
        self.streams = streams
        self.messages: list[Any] = []
        self.computed: list[list[int]] = []  # prompts
        self.num_output_tokens = 0  # of the last answer
        self.shares: list[float] = []  # of the prefix that was computed before, how much was read from the cache
        self.lost: list[int] = []

    def request(self) -> anthropic.types.Message:
        fields: Any = {
            "model": "demo",
            "max_tokens": 96,
            "system": [{"type": "text", "text": SYSTEM_PROMPT, "cache_control": MARK}],
            "tools": MESSAGES_TOOLS,
            "messages": self.messages,
            "metadata": {"user_id": f'{{"session_id": "messages-reuse-{self.streams}"}}'},
        }
        if self.streams:
            with self.client.messages.stream(**fields) as stream:
                message: anthropic.types.Message = stream.get_final_message()
        else:
            message = self.client.messages.create(**fields)
        self.count(fields, message.usage)
        self.messages.append({"role": "assistant", "content": message.to_dict()["content"]})
        return message

    def count(self, fields: dict[str, Any], usage: anthropic.types.Usage) -> None:
        counted = self.client.messages.count_tokens(
            model="demo", system=fields["system"], tools=fields["tools"], messages=fields["messages"]
        )
        cached = usage.cache_read_input_tokens or 0
        created = usage.cache_creation_input_tokens or 0
        assert usage.input_tokens + created + cached == counted.input_tokens
        prompt = self.prompt_ids()
        known = max((common_prefix(prompt, seen) for seen in self.computed), default=0)
        if isinstance(fields["messages"][-1]["content"], list):  # a tool's result: the whole last answer comes back
            known = len(self.computed[-1]) + self.num_output_tokens - 1
        self.lost.append(min(known, len(prompt) - 1) - cached)
        if known:
            self.shares.append(cached / known)
        self.computed.append(prompt)
        self.num_output_tokens = usage.output_tokens

    def prompt_ids(self) -> list[int]:
        """The ids of the prompt, of the same messages in OpenAI's words."""
        messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}]
        for message in self.messages:
            blocks = message["content"]
            if message["role"] == "assistant":
                messages.append(as_chat_answer(blocks))
            elif isinstance(blocks, str):
                messages.append({"role": "user", "content": blocks})
            else:
                messages += [
                    {"role": "tool", "tool_call_id": block["tool_use_id"], "content": block["content"]}
                    for block in blocks
                ]
        status, answer = self.server.post("/tokenize", {"messages": messages, "tools": TOOLS})
        assert status == 200, answer
        ids: list[int] = answer["tokens"]
        return ids


def as_chat_answer(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        if block["type"] == "text":
            answer["content"] += block["text"]
        elif block["type"] == "thinking":
            answer["reasoning_content"] = block["thinking"]
        else:
            function = {"name": block["name"], "arguments": block["input"]}
            answer.setdefault("tool_calls", []).append({"id": block["id"], "function": function})
    return answer


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])
def test_an_agent_of_ten_turns_recomputes_only_new_tokens(demo_server: Server, streams: bool) -> None:
    script = conversation(21, NUM_TURNS)
    desk = OrderDesk(script.seed)
    with anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0) as client:
        agent = Agent(demo_server, client, streams=streams)
        for turn in script.turns:
            agent.messages.append({"role": "user", "content": turn.user})
            for _ in range(MAX_REQUESTS_A_TURN):
                message = agent.request()
                calls: list[Any] = [block for block in message.content if block.type == "tool_use"]
                if not calls:
                    break
                results = [
                    {"type": "tool_result", "tool_use_id": call.id, "content": desk.call_json(call.name, call.input)}
                    for call in calls
                ]
                agent.messages.append({"role": "user", "content": results})
    assert any(isinstance(message["content"], list) for message in agent.messages[1::2])
    assert max(agent.lost[1:]) <= SLACK_TOKENS, agent.lost
    assert sum(agent.shares) / len(agent.shares) >= 0.95, agent.shares
