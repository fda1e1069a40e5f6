"""Events of one request on the server's side, and their merging while nobody reads."""

from __future__ import annotations

import asyncio
import socket

import pytest

from turnkeep.engine.channel import EngineChannel, ServerGone
from turnkeep.engine.coalescing import EventBuffer
from turnkeep.engine.framing import FrameDecoder, decode_events, encode_frame
from turnkeep.engine.messages import Abort, Admitted, Finished, FromEngine, Stats, TokenLogprobs, Tokens
from turnkeep.engine.request_events import RequestEvents


def finished(request_id: str) -> Finished:
    return Finished(request_id=request_id, reason="stop")


def stats(num_steps: int, *, requested: bool = False) -> Stats:
    return Stats(
        num_steps=num_steps,
        num_running=0,
        num_waiting=0,
        num_suspended=0,
        num_free_pages=0,
        num_free_rows=0,
        requested=requested,
    )


def test_waiting_tokens_of_a_request_become_one_event_in_order() -> None:
    buffer = EventBuffer()
    buffer.put(Admitted("a", 0, 0))
    for token in range(1000):
        buffer.put(Tokens("a", [token]))
        buffer.put(Tokens("b", [-token], [TokenLogprobs(-1.0, [])]))
    buffer.put(finished("a"))
    events = buffer.take()
    assert events[0] == Admitted("a", 0, 0)
    assert events[1] == Tokens("a", list(range(1000)))
    assert isinstance(events[2], Tokens)
    assert events[2].logprobs is not None
    assert len(events[2].logprobs) == 1000
    assert events[3] == finished("a")
    assert len(buffer) == 0


def test_of_heartbeats_the_newest_is_kept_and_answers_are_all_kept() -> None:
    buffer = EventBuffer()
    for number in range(5):
        buffer.put(stats(number))
        buffer.put(stats(number, requested=True))
    events = buffer.take()
    assert [event.requested for event in events if isinstance(event, Stats)] == [True] * 5 + [False]
    assert events[-1] == stats(4)


async def test_iteration_ends_after_the_one_finished() -> None:
    events = RequestEvents("r", lambda _: None)
    for event in (Admitted("r", 3, 4), Tokens("r", [1]), Tokens("r", [2]), finished("r")):
        events.push(event)
    assert [event async for event in events] == [Admitted("r", 3, 4), Tokens("r", [1, 2]), finished("r")]
    assert [event async for event in events] == []


async def test_closing_aborts_once_and_only_what_is_not_finished() -> None:
    aborted: list[str] = []
    events = RequestEvents("r", aborted.append)
    async with events:
        events.close()
    assert aborted == ["r"]
    ended = RequestEvents("s", aborted.append)
    ended.push(finished("s"))
    await ended.aclose()
    assert aborted == ["r"]


async def test_cancelling_a_waiting_task_aborts() -> None:
    aborted: list[str] = []
    events = RequestEvents("r", aborted.append)

    async def consume() -> None:
        async for _ in events:
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert aborted == ["r"]
    events.push(Finished(request_id="r", reason="abort"))
    assert [event.reason async for event in events if isinstance(event, Finished)] == ["abort"]


async def test_waiting_with_a_time_limit_does_not_abort() -> None:
    aborted: list[str] = []
    events = RequestEvents("r", aborted.append)
    assert not await events.wait(0.001)
    waiting = asyncio.create_task(events.wait(60))
    await asyncio.sleep(0)
    events.push(Tokens("r", [1]))
    assert await waiting
    assert await events.wait(0)
    assert aborted == []


def channel_pair() -> tuple[EngineChannel, socket.socket]:
    ours, theirs = socket.socketpair()
    return EngineChannel(ours), theirs


def read_all(server: socket.socket, decoder: FrameDecoder) -> list[FromEngine]:
    server.setblocking(False)
    events: list[FromEngine] = []
    while True:
        try:
            data = server.recv(1 << 16)
        except BlockingIOError:
            return events
        if not data:
            return events
        for body in decoder.feed(data):
            events += decode_events(body)


def test_a_server_that_does_not_read_neither_blocks_the_engine_nor_loses_a_token() -> None:
    channel, server = channel_pair()
    num_tokens = 200_000
    was_full = False
    for token in range(num_tokens):
        channel.put(Tokens("r", [token]))
        was_full = not channel.flush() or was_full
    assert was_full
    received: list[int] = []
    num_events = 0
    decoder = FrameDecoder()
    while len(received) < num_tokens:
        for event in read_all(server, decoder):
            assert isinstance(event, Tokens)
            received += event.token_ids
            num_events += 1
        channel.flush()
    assert received == list(range(num_tokens))
    assert num_events < num_tokens / 2
    channel.close()
    server.close()


def test_the_channel_reads_what_has_arrived_and_notices_the_end() -> None:
    channel, server = channel_pair()
    assert channel.read() == []
    server.sendall(encode_frame(Abort("r")) + encode_frame(Abort("s"))[:-1])
    channel.wait(5)
    assert len(channel.read()) == 1
    server.sendall(encode_frame(Abort("s"))[-1:])
    channel.wait(5)
    assert len(channel.read()) == 1
    server.close()
    with pytest.raises(ServerGone):
        channel.read()
    with pytest.raises(ServerGone):
        channel.send([finished("r")])
    channel.close()


class Receiver:
    """Takes tokens at once while it is ready."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_ready = True
        self.error: Exception | None = None

    def can_take(self) -> bool:
        return self.is_ready

    def take(self, tokens: Tokens) -> None:
        if self.error is not None:
            raise self.error
        self.token_ids += tokens.token_ids


async def test_tokens_that_arrive_during_a_wait_are_taken_at_once_and_wake_nobody() -> None:
    events, receiver = RequestEvents("a", lambda _: None), Receiver()
    events.deliver_to(receiver)
    events.push(Tokens("a", [1]))  # nobody waits: it may not overtake what is being worked on
    assert receiver.token_ids == []
    assert events.take() == Tokens("a", [1])
    waiting = asyncio.create_task(events.wait(10))
    await asyncio.sleep(0)
    events.push(Tokens("a", [2]))
    events.push(Tokens("a", [3]))
    await asyncio.sleep(0)
    assert receiver.token_ids == [2, 3]
    assert not waiting.done()
    receiver.is_ready = False  # a full connection: the task writes it, and waits for room
    events.push(Tokens("a", [4]))
    receiver.is_ready = True
    events.push(Tokens("a", [5]))
    assert await waiting
    assert events.take() == Tokens("a", [4, 5])
    events.deliver_to(None)
    waiting = asyncio.create_task(events.wait(10))
    await asyncio.sleep(0)
    events.push(Tokens("a", [6]))
    assert await waiting
    assert events.take() == Tokens("a", [6])
    assert receiver.token_ids == [2, 3]


async def test_what_a_receiver_raises_comes_out_of_its_own_wait() -> None:
    events, receiver = RequestEvents("a", lambda _: None), Receiver()
    receiver.error = ValueError("broken")
    events.deliver_to(receiver)
    waiting = asyncio.create_task(events.wait(10))
    await asyncio.sleep(0)
    events.push(Tokens("a", [1]))
    with pytest.raises(ValueError, match="broken"):
        await waiting
