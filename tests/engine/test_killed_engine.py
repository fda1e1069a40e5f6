"""kill -9 while conversations are offloaded: the next engine starts, and no token is ever another than a cold run's.

TURNKEEP_KILLS says how often (3 in the suite); what happened is printed with -s.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_builders import engine_config, make_loop, submit
from safetensors.torch import save_file

from turnkeep.cache.config import CacheConfig
from turnkeep.cache.tiers.config import TierConfig
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.handle import ProcessEngine
from turnkeep.engine.messages import Finished, Tokens
from turnkeep.models.config import ModelConfig
from turnkeep.models.tiny import tiny_config
from turnkeep.models.weights import random_tensors

NUM_KILLS = int(os.environ.get("TURNKEEP_KILLS", "3"))
NUM_CONVERSATIONS, NUM_TURNS, NUM_NEW, NUM_ANSWER = 9, 5, 14, 6


@dataclass
class Turn:
    prompt: list[int]
    answer: list[int]


def cold_turns() -> list[list[Turn]]:
    """Every conversation as an engine without cache has it."""
    bench = make_loop("hybrid", cache=CacheConfig(prefix_caching=False))
    conversations: list[list[Turn]] = []
    for number in range(NUM_CONVERSATIONS):
        generator, history, turns = random.Random(number), list[int](), list[Turn]()
        for index in range(NUM_TURNS):
            history += [generator.randrange(3, 97) for _ in range(NUM_NEW + (40 if not index else 0))]
            name = f"{number}-{index}"
            bench.loop.receive(submit(name, history, NUM_ANSWER, ignore_eos=True))
            bench.run()
            turns.append(Turn(list(history), bench.tokens(name)))
            history += bench.tokens(name)
        conversations.append(turns)
    return conversations


class Traffic:
    """Conversations that go on where the last engine left them, and begin anew after their last turn."""

    def __init__(self, conversations: list[list[Turn]]) -> None:
        self.conversations = conversations
        self.next_turn = [0] * len(conversations)
        self.num_turns = 0
        self._numbers: Iterator[int] = iter(range(10**9))

    async def run(self, engine: ProcessEngine, own: range) -> None:
        """Serve these conversations in turn until the engine is gone."""
        while True:
            for number in own:
                turn = self.conversations[number][self.next_turn[number]]
                if not await self._one(engine, number, turn):
                    return
                self.num_turns += 1
                self.next_turn[number] = (self.next_turn[number] + 1) % NUM_TURNS

    async def _one(self, engine: ProcessEngine, number: int, turn: Turn) -> bool:
        """False: the engine died meanwhile."""
        engine.expect("", f"c{number}")
        name = f"r{next(self._numbers)}"
        boundaries = [(len(turn.prompt), "turn_start")]
        request = submit(name, turn.prompt, NUM_ANSWER, boundaries=boundaries, conversation_id=f"c{number}",  # type: ignore[arg-type]
                         ignore_eos=True)  # fmt: skip
        tokens: list[int] = []
        async for event in engine.submit(request):
            if isinstance(event, Tokens):
                tokens += event.token_ids
                assert tokens == turn.answer[: len(tokens)], f"a wrong token in conversation {number}"
            elif isinstance(event, Finished) and event.reason != "length":
                assert not engine.alive, event.message
                return False
        engine.end_turn(name, len(turn.prompt) + NUM_ANSWER)
        return True


async def until_a_file_is_half_written(folder: Path, timeout_s: float = 1.0) -> None:
    """As near to the middle of a write as one can come from outside."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not any(name.endswith(".part") for name in os.listdir(folder)):
                await asyncio.sleep(0)


async def live_and_die(config: EngineConfig, traffic: Traffic, delay_s: float, totals: Counter[str]) -> None:
    engine = ProcessEngine(config)
    assert config.cache.tiers.folder is not None
    ready = await engine.start()
    assert not any("disk" in notice for notice in ready.notices), ready.notices
    (folder,) = Path(config.cache.tiers.folder).iterdir()
    third = NUM_CONVERSATIONS // 3
    clients = [asyncio.create_task(traffic.run(engine, range(at * third, at * third + third))) for at in range(3)]
    try:
        while traffic.num_turns < 6 + totals["turns"] and not any(client.done() for client in clients):
            await asyncio.sleep(0.01)  # the pools are full by now, and every turn offloads another one
        await asyncio.sleep(delay_s)
        stats = await engine.read_stats()
        for name in ("hits.disk", "hits.host", "offloaded_snapshots", "failed_loads.unreadable"):
            totals[name] += int(stats.counters.get(f"cache_tier_num_{name}", 0))
        totals["ignored_files"] += sum(
            int(value) for name, value in stats.counters.items() if name.startswith("cache_tier_num_ignored_files")
        )
        assert engine.pid is not None
        if totals["kills"] % 2:
            await until_a_file_is_half_written(folder)
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            await asyncio.gather(*clients)
    finally:
        for client in clients:
            client.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*clients, return_exceptions=True)
        await engine.close()
    totals["turns"] = traffic.num_turns


async def test_killed_engines_leave_nothing_wrong_behind(tmp_path: Path) -> None:
    values = tiny_config("hybrid")
    (tmp_path / "config.json").write_text(json.dumps(values))
    save_file(random_tensors(ModelConfig.from_dict(values), seed=1), str(tmp_path / "model.safetensors"))
    tiers = TierConfig(folder=str(tmp_path / "cache"), disk_bytes=4 << 20, host_bytes=200_000)
    config = engine_config(
        model=str(tmp_path), num_threads=1, num_pages=70, num_state_rows=14, cache=CacheConfig(tiers=tiers)
    )
    traffic, totals, delays = Traffic(cold_turns()), Counter[str](), random.Random(5)
    for _ in range(NUM_KILLS):
        await live_and_die(config, traffic, delays.uniform(0.0, 0.4), totals)
        parts = list((tmp_path / "cache").rglob("*.part"))
        totals["kills"] += 1
        totals["kills in the middle of a file"] += bool(parts)
    print(dict(totals))
    assert totals["offloaded_snapshots"] > 0
    assert totals["hits.disk"] > 0, "no engine went on from what another one had written"


@pytest.fixture(autouse=True)
def quiet_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNKEEP_LOG_LEVEL", "error")
