"""The short ways that almost every token takes give what the long ways give."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from turnkeep.engine.messages import Finished, Tokens
from turnkeep.engine.request_events import RequestEvents
from turnkeep.server import event_stream
from turnkeep.server.chat_answers import AnswerFrame, ChunkBuilder
from turnkeep.server.chat_completions import convert_request
from turnkeep.server.chat_endpoint import ChatStream
from turnkeep.server.latency_histogram import LatencyHistogram
from turnkeep.server.turn_events import TurnDelta


def stream_of(model: str, with_usage: bool) -> tuple[ChatStream, ChunkBuilder]:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if with_usage else {}
    body = convert_request({"model": model, "messages": [], "stream": True, **options})
    frame = AnswerFrame(model=model, fingerprint="fp", id="chatcmpl-1", created=7)
    builder = ChunkBuilder(frame, num_choices=2, with_usage=with_usage, usage_on_every_chunk=False, token_ids=False)
    return ChatStream(body, frame, num_choices=2), builder


@given(st.text(), st.sampled_from(["demo", '"content":"x"', "\\x", "é\u2028"]), st.booleans(), st.integers(0, 1))
def test_a_frame_of_plain_text_is_the_builders_byte_for_byte(
    content: str, model: str, with_usage: bool, index: int
) -> None:
    stream, builder = stream_of(model, with_usage)
    delta = TurnDelta(index, content=content, token_ids=[3])
    chunk = builder.delta(delta)
    expected = b"" if chunk is None else event_stream.encode_event(chunk)
    assert stream.encode([delta]) == expected
    assert stream.encode([delta]) == expected


def test_the_histogram_reads_as_the_client_librarys_own() -> None:
    bounds = (0.001, 0.5, 10.0)
    registries = (CollectorRegistry(), CollectorRegistry())
    ours = LatencyHistogram("gap_seconds", "Gaps.", bounds)
    registries[0].register(ours)
    theirs = Histogram("gap_seconds", "Gaps.", buckets=bounds, registry=registries[1])
    for value in (0.0, 0.001, 0.0011, 0.5, 3.0, 10.0, 11.0):
        ours.observe(value)
        theirs.observe(value)
    texts = [generate_latest(registry).decode().splitlines() for registry in registries]
    assert texts[0] == [line for line in texts[1] if "_created" not in line]


def events_of(aborted: list[str] | None = None) -> RequestEvents:
    return RequestEvents("r", (aborted if aborted is not None else []).append)


async def test_a_wait_ends_with_an_event_or_with_its_time() -> None:
    events = events_of()
    started_s = time.monotonic()
    assert not await events.wait(0.02)
    assert time.monotonic() - started_s >= 0.018
    assert not await events.wait(0.0)
    asyncio.get_running_loop().call_soon(events.push, Tokens("r", [1]))
    assert await events.wait(5.0)
    assert events.take() == Tokens("r", [1])


async def test_a_short_wait_after_a_long_one_is_short() -> None:
    events = events_of()
    asyncio.get_running_loop().call_soon(events.push, Tokens("r", [1]))
    assert await events.wait(60.0)
    events.take()
    async with asyncio.timeout(5):
        assert not await events.wait(0.01)


async def test_a_long_wait_after_a_short_one_is_long() -> None:
    events = events_of()
    asyncio.get_running_loop().call_soon(events.push, Tokens("r", [1]))
    assert await events.wait(0.02)
    events.take()
    asyncio.get_running_loop().call_later(0.06, events.push, Tokens("r", [2]))
    assert await events.wait(5.0)
    assert events.take() == Tokens("r", [2])
    asyncio.get_running_loop().call_later(0.03, events.push, Tokens("r", [3]))
    assert await events.wait(math.inf)


async def test_waits_set_one_timer_up_and_the_end_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    set_up: list[float] = []
    call_at = loop.call_at

    def counting(when: float, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
        set_up.append(when)
        return call_at(when, *arguments, **options)

    monkeypatch.setattr(loop, "call_at", counting)
    events = events_of()
    for token_id in range(50):
        loop.call_soon(events.push, Tokens("r", [token_id]))
        assert await events.wait(10.0)
        events.take()
    assert len(set_up) == 1
    events.push(Finished(request_id="r", reason="stop"))
    assert events._timer is None


async def test_a_cancelled_wait_aborts_and_does_not_disturb_the_next() -> None:
    aborted: list[str] = []
    events = events_of(aborted)
    first = asyncio.create_task(events.wait(math.inf))
    await asyncio.sleep(0)
    first.cancel()
    second = asyncio.create_task(events.wait(math.inf))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert first.cancelled()
    events.push(Finished(request_id="r", reason="abort"))
    assert await second
    assert aborted == ["r"]
