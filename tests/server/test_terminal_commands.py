"""`turnkeep chat` and `turnkeep demo` against a server that plays the right answers."""

from __future__ import annotations

import argparse
import io
import json
from typing import Any

import pytest
from live_server import live_server, saying, user
from rich.console import Console
from scripted_engine import Script

from turnkeep.clients.chat_client import ChatClient, RequestFailedError
from turnkeep.engine.messages import Submit
from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.order_desk import TOOLS, OrderDesk
from turnkeep.models.demo.rendering import render_message
from turnkeep.server import demo, terminal_chat
from turnkeep.server.text_model import TextModel

CHAT_OPTIONS = argparse.Namespace(system=None, no_tools=False, temperature=0.0)


def written_by_the_agent(message: dict[str, Any]) -> str:
    text = render_message(message, with_reasoning=True)
    return text.removeprefix("<|assistant|>").removesuffix("<|end|>")


async def test_the_demo_runs_real_tools_and_counts_what_was_computed(text_model: TextModel) -> None:
    script = conversation(3, 8)
    gold = [message for turn in script.turns for message in turn.messages if message["role"] == "assistant"]
    answers = iter(gold)

    def direct(submit: Submit) -> Script:
        cached = len(submit.prompt_ids) - 10
        return saying(text_model, written_by_the_agent(next(answers)), num_cached_tokens=cached)

    output = io.StringIO()
    console = Console(file=output, width=200, highlight=False)
    async with live_server(direct, text_model=text_model) as server:
        client = await ChatClient.connect(server.session, server.url, None)
        result = await demo.run_agent(client, console, num_turns=8, seed=3)
        sent = server.engine.submitted
    assert (result.num_turns, result.num_right, len(result.rows)) == (8, 8, len(gold))
    assert all(row.reply.num_computed_tokens == 10 for row in result.rows)
    assert f"{10 * len(gold)} were computed" in result.summary()
    assert {submit.conversation_id for submit in sent} == {client.conversation_id}
    # The tools were really run: what the desk answered is in the next prompt.
    results = [message["content"] for turn in script.turns for message in turn.messages if message["role"] == "tool"]
    assert results
    last_prompt = text_model.tokenizer.decode(sent[-1].prompt_ids)
    assert all(text in last_prompt for text in results)
    lines = output.getvalue().splitlines()
    assert lines[0].split() == ["turn", "request", "prompt", "reused", "recomputed", "generated", "TTFT", "ms", "what"]


async def test_chat_shows_the_answer_its_tools_and_its_cost(text_model: TextModel) -> None:
    order = next(iter(OrderDesk(1).orders))
    call = json.dumps({"name": "get_order", "arguments": {"order": order}})
    answers = iter([f"<think>I look.</think><tool_call>{call}</tool_call>", "<think>Found.</think>It is [open]."])

    def direct(submit: Submit) -> Script:
        return saying(text_model, next(answers), num_cached_tokens=len(submit.prompt_ids) - 7)

    output = io.StringIO()
    async with live_server(direct, text_model=text_model) as server:
        client = await ChatClient.connect(server.session, server.url, None)
        console = Console(file=output, width=300, highlight=False)
        await terminal_chat.Conversation(client, console, CHAT_OPTIONS).say(f"Status of order {order}?")
        first, second = server.engine.submitted
    shown = output.getvalue()
    assert "I look." in shown
    assert f'get_order({{"order": "{order}"}}) -> {OrderDesk(1).call_json("get_order", {"order": order})}' in shown
    assert "It is [open]." in shown, "brackets are text, not markup"
    for submit in (first, second):
        size = len(submit.prompt_ids)
        assert f"prompt {size}, reused {size - 7}, recomputed 7, generated" in shown


async def test_chat_reads_lines_until_quit(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["Hello!", "", "/new", "Hello!", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    async with live_server(saying(text_model, "Hi."), text_model=text_model) as server:
        await terminal_chat.chat(server.url, None, CHAT_OPTIONS)
        ids = [submit.conversation_id for submit in server.engine.submitted]
    assert len(ids) == 2
    assert ids[0] != ids[1], "/new starts another conversation"


async def test_a_refused_request_does_not_end_the_chat(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["word " * 5000, "Hello!", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    async with live_server(saying(text_model, "Hi."), text_model=text_model) as server:
        await terminal_chat.chat(server.url, None, CHAT_OPTIONS)
    shown = capsys.readouterr().out
    assert "maximum context length" in shown


async def test_the_client_reports_a_broken_stream_and_wrong_keys(text_model: TextModel) -> None:
    script = saying(text_model, "Hi there", is_endless=True)
    async with live_server(script, text_model=text_model, api_keys=("key",)) as server:
        with pytest.raises(RequestFailedError, match="401"):
            await ChatClient.connect(server.session, server.url, None)
        client = await ChatClient.connect(server.session, server.url, "key")
        seen: list[str] = []

        def on_text(kind: str, text: str) -> None:
            seen.append(text)
            server.engine.die()

        with pytest.raises(RequestFailedError, match="Internal server error"):
            await client.send(user("x"), on_text=on_text, ignore_eos=True)
    assert seen


async def test_the_client_sends_tools_and_reads_calls(text_model: TextModel) -> None:
    call = '<tool_call>{"name": "get_stock", "arguments": {"item": "lamps"}}</tool_call>'
    async with live_server(saying(text_model, f"One.{call}{call}"), text_model=text_model) as server:
        client = await ChatClient.connect(server.session, server.url, None)
        reply = await client.send(user("x"), tools=TOOLS)
    assert reply.message["content"] == "One."
    assert [call["function"]["name"] for call in reply.tool_calls] == ["get_stock", "get_stock"]
    assert len({call["id"] for call in reply.tool_calls}) == 2
    assert reply.finish_reason == "tool_calls"
