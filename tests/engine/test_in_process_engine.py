"""The engine in a thread, behind the handle that the server uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from engine_builders import build_tiny, engine_config, submit

from turnkeep.engine.config import EngineConfig
from turnkeep.engine.handle import EngineHandle, EngineStartError, InProcessEngine
from turnkeep.engine.loop import EngineLoop
from turnkeep.engine.messages import Admitted, Finished, FromEngine, Loading, Ready, Tokens


def build_hybrid(config: EngineConfig, outbox: Callable[[FromEngine], None]) -> tuple[EngineLoop, Ready]:
    outbox(Loading("weights", 1, 1))
    return build_tiny("hybrid", config, outbox)


@pytest.fixture
async def engine() -> AsyncIterator[EngineHandle]:
    handle = InProcessEngine(engine_config(), build=build_hybrid)
    await handle.start()
    yield handle
    await handle.close()


async def collect(engine: EngineHandle, request_id: str, num_prompt: int = 20, max_new_tokens: int = 5) -> list[object]:
    message = submit(request_id, range(3, 3 + num_prompt), max_new_tokens, conversation_id="c")
    return [event async for event in engine.submit(message)]


async def test_start_reports_loading_and_what_is_ready() -> None:
    loading: list[Loading] = []
    handle = InProcessEngine(engine_config(max_running=3), build=build_hybrid, on_loading=loading.append)
    assert not handle.alive
    ready = await handle.start()
    assert handle.alive
    assert (ready.max_running, ready.vocab_size, ready.num_pages, ready.num_state_rows) == (3, 97, 200, 60)
    assert loading == [Loading("weights", 1, 1)]
    await handle.close()
    await handle.close()
    assert not handle.alive


async def test_a_request_gives_admitted_tokens_and_finished(engine: EngineHandle) -> None:
    events = await collect(engine, "r")
    assert isinstance(events[0], Admitted)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"
    assert sum(len(event.token_ids) for event in events if isinstance(event, Tokens)) == 5


async def test_the_end_of_a_turn_reaches_the_cache(engine: EngineHandle) -> None:
    first = await collect(engine, "one", 20, 5)
    output = [token for event in first if isinstance(event, Tokens) for token in event.token_ids]
    engine.end_turn("one", 1000)
    message = submit("two", [*range(3, 23), *output, 9], 3, conversation_id="c")
    finished = [event async for event in engine.submit(message)][-1]
    assert isinstance(finished, Finished)
    assert finished.num_cached_tokens == 24


async def test_many_requests_at_once_each_get_their_own_events(engine: EngineHandle) -> None:
    alone = [await collect(engine, f"alone{index}", 5 + index) for index in range(8)]
    together = await asyncio.gather(*(collect(engine, f"together{index}", 5 + index) for index in range(8)))

    def tokens(events: list[object]) -> list[int]:
        return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]

    assert [tokens(events) for events in together] == [tokens(events) for events in alone]


async def test_cancelled_requests_free_everything(engine: EngineHandle) -> None:
    before = await engine.read_stats()
    for index in range(30):
        task = asyncio.create_task(collect(engine, f"r{index}", 10 + index, 400))
        if index % 3:
            while not (await engine.read_stats()).num_running:
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    after = await engine.read_stats()
    assert (after.num_running, after.num_waiting, after.num_suspended) == (0, 0, 0)
    held = after.num_free_pages + after.gauges["cache_num_evictable_pages"]
    assert held == before.num_free_pages
    assert after.num_free_rows + after.gauges["cache_num_evictable_rows"] == before.num_free_rows
    assert after.gauges["cache_num_open_sequences"] == 0


async def test_stop_ends_with_stop(engine: EngineHandle) -> None:
    events = engine.submit(submit("r", range(3, 13), 400))
    async for event in events:
        if isinstance(event, Tokens):
            engine.stop("r")
        if isinstance(event, Finished):
            assert event.reason == "stop"


async def test_an_open_id_cannot_be_submitted_again(engine: EngineHandle) -> None:
    events = engine.submit(submit("r", range(3, 13), 400))
    with pytest.raises(ValueError, match="'r' is still open"):
        engine.submit(submit("r", range(3, 13)))
    events.close()
    assert [event async for event in events][-1].request_id == "r"
    assert (await collect(engine, "r"))[-1]


async def test_a_slow_reader_gets_its_tokens_in_few_events(engine: EngineHandle) -> None:
    slow = engine.submit(submit("slow", range(3, 13), 100))
    while not slow.is_finished:
        await asyncio.sleep(0.001)
    events = [event async for event in slow]
    assert len(events) == 3
    assert isinstance(events[1], Tokens)
    assert len(events[1].token_ids) == 100


async def test_closing_ends_open_requests_and_later_ones_at_once() -> None:
    handle = InProcessEngine(engine_config(), build=build_hybrid)
    await handle.start()
    running = handle.submit(submit("running", range(3, 13), 400))
    await handle.close()
    finished = [event async for event in running][-1]
    assert isinstance(finished, Finished)
    assert finished.reason == "abort"
    late = [event async for event in handle.submit(submit("late", [3]))]
    assert [event.reason for event in late if isinstance(event, Finished)] == ["error"]
    with pytest.raises(ConnectionError):
        await handle.read_stats()


async def test_what_keeps_the_engine_from_starting_is_told() -> None:
    def fail(config: EngineConfig, outbox: Callable[[FromEngine], None]) -> tuple[EngineLoop, Ready]:
        raise ValueError("the model has three legs")

    handle = InProcessEngine(engine_config(), build=fail)
    with pytest.raises(EngineStartError, match="three legs"):
        await handle.start()
    assert not handle.alive
    await handle.close()


async def test_an_engine_that_dies_ends_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    def build_broken(config: EngineConfig, outbox: Callable[[FromEngine], None]) -> tuple[EngineLoop, Ready]:
        loop, ready = build_tiny("hybrid", config, outbox)

        def broken_step() -> bool:
            if loop.has_work:  # not before there is anything that could be ended
                raise RuntimeError("the loop broke")
            return False

        loop.step = broken_step  # type: ignore[method-assign]
        return loop, ready

    handle = InProcessEngine(engine_config(), build=build_broken)
    await handle.start()
    events = [event async for event in handle.submit(submit("r", range(3, 13)))]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "error"
    assert "the loop broke" in str(events[-1].message)
    assert not handle.alive
    await handle.close()


async def test_a_heartbeat_that_comes_late_does_not_bring_old_numbers_back(engine: EngineHandle) -> None:
    older = await engine.read_stats()
    await collect(engine, "r")
    newer = await engine.read_stats()
    assert newer.counters["num_generated_tokens"] > older.counters["num_generated_tokens"]
    assert isinstance(engine, InProcessEngine)
    engine._deliver([older])
    assert engine.stats() is newer
    engine._deliver([newer])  # a heartbeat repeats it
    assert engine.stats() is newer
