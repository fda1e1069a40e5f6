"""What the SDK makes of refusals and of streams that break: no text twice, no turn lost, no turn kept twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import openai
import pytest
from fault_proxy import Cut, FaultProxy, Refuse, fault_proxy
from live_server import LiveServer, live_server, saying
from scripted_engine import Director
from sdk_twins import Twin

from turnkeep.clients.errors import TurnInterrupted
from turnkeep.clients.retry import RetryPolicy
from turnkeep.clients.turn import ReasoningDelta, TextDelta, TurnRestarted
from turnkeep.server.text_model import TextModel

ANSWER = "<think>I think of it.</think>One two three four five six."
QUICK = RetryPolicy(max_retries=2, outage_s=5.0, initial_delay_s=0.01, max_delay_s=0.02)


@asynccontextmanager
async def spoiled(text_model: TextModel, director: Director) -> AsyncIterator[tuple[LiveServer, FaultProxy]]:
    async with live_server(director, text_model=text_model) as server, fault_proxy(server.url) as proxy:
        yield server, proxy


def always(text_model: TextModel, text: str = ANSWER) -> Director:
    return lambda _: saying(text_model, text)


@pytest.fixture(params=["responses", "chat"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("num_events", [0, 1, 3, 6, 9, 12])
async def test_a_stream_that_breaks_goes_on_without_text_twice(
    text_model: TextModel, twin: Twin, transport: str, num_events: int
) -> None:
    async with spoiled(text_model, always(text_model)) as (_, proxy):
        client = twin.client(proxy.url)
        conversation = await twin.call(client.conversation, transport=transport, retries=QUICK)
        proxy.faults = [Cut(num_events)]
        stream = conversation.stream("Count")
        events = await twin.events(stream)
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "One two three four five six."
        assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "I think of it."
        assert not any(isinstance(event, TurnRestarted) for event in events)
        assert conversation.stats[-1].num_attempts == 2
        assert conversation.num_turns == 1
        (_, _, first), (_, _, second) = proxy.requests
        assert first["idempotency-key"] == second["idempotency-key"]
        assert (await twin.call(conversation.send, "Again")).stats.num_attempts == 1


async def test_another_text_after_a_break_voids_what_was_delivered(
    text_model: TextModel, twin: Twin, transport: str
) -> None:
    texts = ["One two three four.", "Two one four three."]
    async with spoiled(text_model, lambda _: saying(text_model, texts.pop(0))) as (_, proxy):
        client = twin.client(proxy.url)
        conversation = await twin.call(client.conversation, transport=transport, retries=QUICK)
        proxy.faults = [Cut(8 if transport == "responses" else 3)]
        events = await twin.events(conversation.stream("Count"))
        restart = events.index(TurnRestarted())
        assert "".join(event.text for event in events[restart + 1 :]) == "Two one four three."
        assert conversation.messages[-1]["content"] == "Two one four three."


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
async def test_a_refusal_that_may_pass_is_tried_again(
    text_model: TextModel, twin: Twin, transport: str, status: int
) -> None:
    async with spoiled(text_model, always(text_model)) as (server, proxy):
        client = twin.client(proxy.url)
        conversation = await twin.call(client.conversation, transport=transport, retries=QUICK)
        proxy.faults = [Refuse(status), Refuse(status)]
        turn = await twin.call(conversation.send, "Count")
        assert (turn.stats.num_attempts, turn.stats.transport) == (3, transport)
        assert len(server.engine.submitted) == 1


async def test_a_refusal_that_lasts_is_raised_and_the_turn_is_not_kept(text_model: TextModel, twin: Twin) -> None:
    async with spoiled(text_model, always(text_model)) as (server, proxy):
        client = twin.client(proxy.url)
        conversation = await twin.call(client.conversation, transport="chat", retries=replace(QUICK, outage_s=0.1))
        proxy.faults = [Refuse(500)] * 3
        with pytest.raises(openai.InternalServerError):
            await twin.call(conversation.send, "Count")
        proxy.faults = [Refuse(503)] * 100
        with pytest.raises(openai.InternalServerError):
            await twin.call(conversation.send, "Count")
        assert conversation.messages == []
        assert server.engine.submitted == []
        proxy.requests.clear()
        proxy.faults = [Refuse(429, code="insufficient_quota")]
        with pytest.raises(openai.RateLimitError):
            await twin.call(conversation.send, "Count")
        proxy.faults = [Refuse(400)]
        with pytest.raises(openai.BadRequestError):
            await twin.call(conversation.send, "Count")
        assert len(proxy.requests) == 2
        assert (await twin.call(conversation.send, "Count")).text


async def test_a_stream_that_breaks_every_time_is_given_up(text_model: TextModel, twin: Twin) -> None:
    async with spoiled(text_model, always(text_model)) as (_, proxy):
        client = twin.client(proxy.url)
        conversation = await twin.call(client.conversation, transport="chat", retries=QUICK)
        proxy.faults = [Cut(2)] * 3
        with pytest.raises(TurnInterrupted, match="3 times in a row"):
            await twin.call(conversation.send, "Count")
        assert len(proxy.requests) == 3
        assert conversation.messages == []


async def test_responses_that_a_server_does_not_have_are_sent_as_chat(text_model: TextModel, twin: Twin) -> None:
    async with spoiled(text_model, always(text_model)) as (_, proxy):
        client = twin.client(proxy.url)
        conversation = await twin.call(client.conversation, transport="responses", retries=QUICK)
        proxy.spoiled = ("/v1/responses",)
        proxy.faults = [Refuse(404)]
        assert (await twin.call(conversation.send, "Count")).stats.transport == "chat"
        await twin.call(conversation.send, "Again")
        assert [path for path, _, _ in proxy.requests] == ["/v1/responses", *["/v1/chat/completions"] * 2]


async def test_a_websocket_that_is_refused_becomes_plain_http(text_model: TextModel, twin: Twin) -> None:
    async with spoiled(text_model, always(text_model)) as (_, proxy):
        client = twin.client(proxy.url)  # the proxy passes no WebSocket on
        conversation = await twin.call(client.conversation, transport="websocket", retries=QUICK)
        assert (await twin.call(conversation.send, "Count")).stats.transport == "responses"


async def test_a_response_that_is_gone_makes_the_whole_history_be_sent(text_model: TextModel, twin: Twin) -> None:
    async with spoiled(text_model, always(text_model)) as (server, proxy):
        client = twin.client(proxy.url)
        conversation = await twin.call(client.conversation, transport="responses", retries=QUICK)
        first = await twin.call(conversation.send, "Count")
        await twin.call(client.responses.delete, first.response_id)
        await twin.call(conversation.send, "Again")
        bodies = [body for _, body, _ in proxy.requests]
        assert [body.get("previous_response_id") for body in bodies] == [None, first.response_id, None]
        assert len(bodies[2]["input"]) == 4  # question, reasoning, answer, question
        prompts = [text_model.tokenizer.decode(list(submit.prompt_ids)) for submit in server.engine.submitted]
        assert prompts[1].startswith(prompts[0])
        assert "One two three" in prompts[1]


async def test_a_store_that_is_down_does_not_keep_a_turn_from_being_answered(text_model: TextModel, twin: Twin) -> None:
    async with spoiled(text_model, always(text_model)) as (_, proxy):
        client = twin.client(proxy.url)
        conversation = await twin.call(client.conversation, transport="responses", retries=QUICK)
        proxy.spoiled = ("/v1/responses",)
        proxy.faults = [Refuse(503, code="store_unavailable")]
        assert (await twin.call(conversation.send, "Count")).stats.transport == "chat"
        # The store is back: so is the transport, with the whole history once.
        assert (await twin.call(conversation.send, "Again")).stats.transport == "responses"
        assert len(proxy.requests[-1][1]["input"]) == 4


async def test_a_plain_openai_server_is_enough(text_model: TextModel, twin: Twin) -> None:
    async with spoiled(text_model, always(text_model)) as (_, proxy):
        proxy.is_plain = True
        client = twin.client(proxy.url)
        conversation = await twin.call(client.conversation, system="Be brief.", retries=QUICK)
        assert (await twin.call(conversation.send, "Count")).stats.transport == "chat"
        path, body, _ = proxy.requests[-1]
        assert path == "/v1/chat/completions"
        assert set(body) == {"model", "messages", "stream", "stream_options", "prompt_cache_key"}
        other = twin.keep(twin.client(proxy.url).load_conversation(conversation.to_json()))
        await twin.call(other.send, "Again")
        assert [message["role"] for message in proxy.requests[-1][1]["messages"]] == [
            "system", "user", "assistant", "user"
        ]  # fmt: skip
        fork = twin.keep(conversation.fork())
        assert (await twin.call(fork.compact)).startswith("One two")
        for missing in (conversation.count_tokens, conversation.cache_report):
            with pytest.raises(openai.NotFoundError):
                await twin.call(missing)
