"""Conversations of the SDK against a live server with a scripted engine, over every transport, sync and async alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from live_server import live_server, saying
from scripted_engine import Director, Script
from sdk_twins import Twin

from turnkeep.clients.errors import ContextOverflow, PrefixBroken, TurnInterrupted, TurnkeepError
from turnkeep.clients.turn import ReasoningDelta, TextDelta, ToolCall
from turnkeep.engine.messages import Submit
from turnkeep.server.text_model import TextModel

TRANSPORTS = ["websocket", "responses", "chat"]
CALL = '<think>I look.</think>One moment.<tool_call>{"name": "get_order", "arguments": {"order":  "B47"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_order", "description": "", "parameters": {"type": "object"}}}


def in_turn(text_model: TextModel, *texts: str) -> Director:
    """A director that plays one text a request."""
    left = [saying(text_model, text) for text in texts]
    return lambda _: left.pop(0)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def prompt_of(text_model: TextModel, submit: Submit) -> str:
    return text_model.tokenizer.decode(list(submit.prompt_ids))


async def test_turns_continue_each_other_and_send_the_conversation_id(
    text_model: TextModel, twin: Twin, transport: str
) -> None:
    director = in_turn(text_model, "<think>Note.</think>Noted.", "Oslo.")
    async with live_server(director, text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, system="Be brief.", transport=transport)
        events = await twin.events(conversation.stream("Mara lives in Oslo."))
        assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "Note."
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "Noted."
        turn = await twin.call(conversation.send, "Where does Mara live?")
        assert (turn.text, turn.finish_reason, turn.stats.transport) == ("Oslo.", "stop", transport)
        prompt = prompt_of(text_model, server.engine.submitted[1])
        assert "Be brief." in prompt
        assert "Mara lives in Oslo." in prompt
        assert "Noted." in prompt
        assert {submit.conversation_id for submit in server.engine.submitted} == {conversation.conversation_id}
        assert [message["role"] for message in conversation.messages] == ["user", "assistant"] * 2
        await twin.call(conversation.close)
        assert conversation.conversation_id in server.engine.closed_conversations


async def test_a_tool_call_keeps_its_bytes_and_wants_its_result(
    text_model: TextModel, twin: Twin, transport: str
) -> None:
    async with live_server(in_turn(text_model, CALL, "It is on its way."), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, tools=[TOOL], transport=transport)
        events = await twin.events(conversation.stream("Where is B47?"))
        calls = [event for event in events if isinstance(event, ToolCall)]
        assert [(call.name, call.arguments) for call in calls] == [("get_order", '{"order":  "B47"}')]
        with pytest.raises(ValueError, match="submit the results"):
            await twin.call(conversation.send, "And?")
        with pytest.raises(ValueError, match="missing"):
            await twin.call(conversation.submit_tool_results, {})
        turn = await twin.call(conversation.submit_tool_results, {calls[0].id: '{"status": "sent"}'})
        assert turn.text == "It is on its way."
        assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"order":  "B47"}'
        prompt = prompt_of(text_model, server.engine.submitted[1])
        assert "I look.</think>One moment.<tool_call>" in prompt
        assert '{"status": "sent"}' in prompt


async def test_a_fork_and_the_original_do_not_see_each_other(text_model: TextModel, twin: Twin, transport: str) -> None:
    director = in_turn(text_model, "One.", "Two.", "Three.")
    async with live_server(director, text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, transport=transport)
        await twin.call(conversation.send, "First")
        fork = twin.keep(conversation.fork("branch"))
        await twin.call(fork.send, "Forked")
        await twin.call(conversation.send, "Kept")
        prompts = [prompt_of(text_model, submit) for submit in server.engine.submitted]
        assert "Forked" in prompts[1]
        assert "One." in prompts[1]
        assert "Kept" in prompts[2]
        assert "Forked" not in prompts[2]
        assert "Two." not in prompts[2]
        assert fork.parent_id == conversation.conversation_id
        assert server.engine.submitted[1].conversation_id == f"{conversation.conversation_id}.branch"


async def test_rewinding_takes_turns_back(text_model: TextModel, twin: Twin, transport: str) -> None:
    director = in_turn(text_model, "One.", "Two.", "Three.")
    async with live_server(director, text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, transport=transport)
        await twin.call(conversation.send, "First")
        await twin.call(conversation.send, "Wrong")
        conversation.rewind()
        await twin.call(conversation.send, "Right")
        prompt = prompt_of(text_model, server.engine.submitted[2])
        assert "One." in prompt
        assert "Right" in prompt
        assert "Wrong" not in prompt
        assert "Two." not in prompt
        with pytest.raises(ValueError, match="cannot go back 3 turns"):
            conversation.rewind(3)


async def test_a_saved_conversation_goes_on_elsewhere(text_model: TextModel, twin: Twin, transport: str) -> None:
    director = in_turn(text_model, "<think>So.</think>One.", "Two.", "Two.")
    async with live_server(director, text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, system="Be brief.", tools=[TOOL], transport=transport)
        await twin.call(conversation.send, "First")
        saved = conversation.to_json()
        await twin.call(conversation.send, "Second")
        other = twin.keep(twin.client(server.url).load_conversation(saved))
        await twin.call(other.send, "Second")
        first, second = server.engine.submitted[1:]
        assert list(first.prompt_ids) == list(second.prompt_ids)
        assert first.conversation_id == second.conversation_id == conversation.conversation_id
        altered = json.loads(saved)
        altered["history"]["messages"][0]["content"] = "Else"
        with pytest.raises(PrefixBroken, match="message 0"):
            client.load_conversation(json.dumps(altered))
        with pytest.raises(ValueError, match="not a saved conversation"):
            client.load_conversation('{"history": 3}')


async def test_what_was_drafted_and_lost_is_told_and_saved(text_model: TextModel, twin: Twin, transport: str) -> None:
    counts: dict[str, Any] = {"num_draft_nodes": 9, "accepted_by_depth": (4, 2), "num_lost_tokens": 5}
    script = saying(text_model, "One.", **counts, loss_reason="evicted")
    async with live_server(script, text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, transport=transport)
        stats = (await twin.call(conversation.send, "First")).stats
        assert (stats.num_drafted_tokens, stats.accepted_by_depth) == (9, (4, 2))
        assert stats.lost_tokens == {"evicted": 5}
        saved = json.loads(conversation.to_json())
        assert client.load_conversation(json.dumps(saved)).stats == [stats]
        saved["history"]["turns"][0]["stats"] = {"num_prompt_tokens": 7, "of_another_version": 1}
        (older,) = client.load_conversation(json.dumps(saved)).stats
        assert (older.num_prompt_tokens, older.accepted_by_depth) == (7, ())


async def test_other_tools_are_a_broken_prefix(text_model: TextModel, twin: Twin) -> None:
    async with live_server(in_turn(text_model, "One.", "Two."), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, tools=[TOOL], transport="chat")
        await twin.call(conversation.send, "First")
        with pytest.raises(PrefixBroken, match="tools"):
            client.load_conversation(conversation.to_json(), tools=[])
        conversation.tools = type(conversation.tools)(())
        with pytest.raises(PrefixBroken, match="tools"):
            await twin.call(conversation.send, "Second")
        assert len(server.engine.submitted) == 1
        assert conversation.num_turns == 1


async def test_compacting_puts_a_summary_behind_the_system_text(
    text_model: TextModel, twin: Twin, transport: str
) -> None:
    director = in_turn(text_model, "Noted.", "Mara lives in Oslo.", "Oslo.")
    async with live_server(director, text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, system="Be brief.", transport=transport)
        await twin.call(conversation.send, "I am Mara from Oslo.")
        assert await twin.call(conversation.compact) == "Mara lives in Oslo."
        await twin.call(conversation.send, "Where do I live?")
        prompt = prompt_of(text_model, server.engine.submitted[2])
        assert "Be brief." in prompt
        assert "Mara lives in Oslo." in prompt
        assert "I am Mara" not in prompt


async def test_leaving_a_stream_frees_the_server_and_changes_nothing(
    text_model: TextModel, twin: Twin, transport: str
) -> None:
    scripts = [Script(text_model.tokenizer.encode(" more"), is_endless=True), saying(text_model, "Done.")]
    async with live_server(lambda _: scripts.pop(0), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, transport=transport)
        assert len(await twin.events(conversation.stream("Go on"), limit=2)) == 2
        await server.engine.wait_until(lambda: len(server.engine.aborted) == 1)
        assert conversation.num_turns == 0
        assert (await twin.call(conversation.send, "Again")).text == "Done."
        assert "Go on" not in prompt_of(text_model, server.engine.submitted[1])


async def test_one_turn_at_a_time_and_none_after_the_end(text_model: TextModel, twin: Twin) -> None:
    async with live_server(saying(text_model, "One."), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, transport="chat")
        conversation._is_busy = True
        with pytest.raises(RuntimeError, match="still running"):
            await twin.call(conversation.send, "Second")
        conversation._is_busy = False
        await twin.call(conversation.close)
        await twin.call(conversation.close)
        with pytest.raises(RuntimeError, match="closed"):
            await twin.call(conversation.send, "Third")


async def test_what_does_not_fit_is_told_and_not_kept(text_model: TextModel, twin: Twin, transport: str) -> None:
    options = {"max_model_len": 64}
    async with live_server(saying(text_model, "x"), text_model=text_model, engine_options=options) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, transport=transport)
        with pytest.raises(ContextOverflow, match="maximum context length is 64"):
            await twin.call(conversation.send, "word " * 200)
        assert conversation.messages == []
        remaining = await twin.call(conversation.num_remaining_tokens) if conversation.num_turns else 64
        assert remaining == 64


async def test_counting_tokens_and_what_is_left_of_the_context(text_model: TextModel, twin: Twin) -> None:
    async with live_server(saying(text_model, "One."), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, system="Be brief.")
        await twin.call(conversation.send, "First")
        counted = await twin.call(conversation.count_tokens, "Second")
        assert await twin.call(conversation.num_remaining_tokens) == 4096 - await twin.call(conversation.count_tokens)
        await twin.call(conversation.send, "Second")
        assert len(server.engine.submitted[1].prompt_ids) == counted
        totals = (await twin.call(conversation.cache_report))["totals"]
        assert totals["prompt_tokens"] == sum(len(submit.prompt_ids) for submit in server.engine.submitted)


async def test_every_call_of_the_openai_package_still_works(text_model: TextModel, twin: Twin) -> None:
    async with live_server(saying(text_model, "Hi."), text_model=text_model) as server:
        client = twin.client(server.url)
        create: Callable[..., Any] = client.chat.completions.create
        answer = await twin.call(create, model="demo", messages=[{"role": "user", "content": "Hi"}])
        assert answer.choices[0].message.content == "Hi."
        assert isinstance(client, openai.AsyncOpenAI if twin.is_async else openai.OpenAI)


async def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, twin: Twin) -> None:
    from turnkeep import AsyncTurnkeep, Turnkeep

    monkeypatch.setenv("TURNKEEP_BASE_URL", "http://127.0.0.1:9/v1")
    client = twin.keep((AsyncTurnkeep if twin.is_async else Turnkeep)())
    assert str(client.base_url) == "http://127.0.0.1:9/v1/"


async def test_a_summary_that_is_empty_forgets_nothing(text_model: TextModel, twin: Twin) -> None:
    director = in_turn(text_model, "Noted.", "<think>All of it went into thinking.</think>", "Oslo.")
    async with live_server(director, text_model=text_model) as server:
        conversation = await twin.call(twin.client(server.url).conversation)
        await twin.call(conversation.send, "Mara lives in Oslo.")
        before = conversation.messages
        with pytest.raises(TurnkeepError, match="no summary"):
            await twin.call(conversation.compact)
        assert conversation.messages == before
        assert (await twin.call(conversation.send, "Where?")).text == "Oslo."


@pytest.mark.parametrize("wrong", ["\u017c\u00f3\u0142w", "two\nlines", " blank", "a/b", "x" * 257])
async def test_an_id_that_no_header_can_hold_is_refused_at_once(text_model: TextModel, twin: Twin, wrong: str) -> None:
    async with live_server(in_turn(text_model, "Noted."), text_model=text_model) as server:
        client = twin.client(server.url)
        with pytest.raises(ValueError, match="printable ASCII"):
            await twin.call(client.conversation, conversation_id=wrong)
        conversation = await twin.call(client.conversation)
        with pytest.raises(ValueError, match="printable ASCII"):
            conversation.fork(f"{wrong} ")
        assert not server.engine.submitted


async def test_an_id_with_a_question_mark_is_closed_and_reported(text_model: TextModel, twin: Twin) -> None:
    name = "desk?of=<b>#1"
    async with live_server(in_turn(text_model, "Noted."), text_model=text_model) as server:
        conversation = await twin.call(twin.client(server.url).conversation, conversation_id=name)
        await twin.call(conversation.send, "Mara lives in Oslo.")
        assert (await twin.call(conversation.cache_report))["conversation_id"] == name
        await twin.call(conversation.close)
        assert server.engine.closed_conversations == [name]


async def test_closing_in_the_middle_of_an_answer_sends_nothing_again(text_model: TextModel, twin: Twin) -> None:
    director = in_turn(text_model, "One " * 400, "Sent again.")
    async with live_server(director, text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, transport="websocket")
        stream = conversation.stream("Count.")
        if twin.is_async:
            await anext(aiter(stream))
            await conversation.close()
            with pytest.raises(TurnInterrupted, match="closed in the middle"):
                await stream.final()
        else:
            await asyncio.to_thread(lambda: next(iter(stream)))
            await asyncio.to_thread(conversation.close)
            with pytest.raises(TurnInterrupted, match="closed in the middle"):
                await asyncio.to_thread(lambda: stream.final)
        assert conversation.num_turns == 0
        assert len(server.engine.submitted) == 1
