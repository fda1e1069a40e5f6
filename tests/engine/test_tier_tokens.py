"""The same tokens, whether a prefix is computed, on the device, in host memory, or on disk for a new engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engine_builders import LoopBench, make_loop, submit

from turnkeep.cache.config import CacheConfig
from turnkeep.cache.tiers.cold_tiers import ColdTiers
from turnkeep.cache.tiers.config import TierConfig
from turnkeep.engine.messages import EndTurn, Expect, Shutdown
from turnkeep.models.tiny import TinyKind

KINDS: tuple[TinyKind, ...] = ("hybrid", "attention_only", "attention_free", "gated_delta", "short_conv")
PROMPT = [3 + (7 * index) % 90 for index in range(61)]
NEXT = [3 + (5 * index) % 89 for index in range(17)]
NUM_TOKENS = 24


def tiers_of(bench: LoopBench) -> ColdTiers:
    scheduler: Any = bench.loop._scheduler  # type: ignore[attr-defined]
    tiers: ColdTiers = scheduler._cache.tiers
    return tiers


def first_turn(bench: LoopBench) -> list[int]:
    bench.loop.receive(
        submit(
            "first", PROMPT, NUM_TOKENS, boundaries=[(len(PROMPT), "turn_start")], conversation_id="c", ignore_eos=True
        )
    )
    bench.run()
    bench.loop.receive(EndTurn("first", 1000))
    return bench.tokens("first")


def second_turn(bench: LoopBench, prompt: list[int], **sampling: object) -> tuple[list[int], int]:
    """Its tokens, and how many of the prompt were reused."""
    bench.loop.receive(Expect("", "c"))
    bench.loop.receive(submit("second", prompt, NUM_TOKENS, conversation_id="c", ignore_eos=True, **sampling))  # type: ignore[arg-type]
    bench.run()
    return bench.tokens("second"), bench.finished("second").num_cached_tokens


def settings(folder: Path | None, **tiers: int | bool) -> CacheConfig:
    given = TierConfig(folder=None if folder is None else str(folder), **tiers)  # type: ignore[arg-type]
    return CacheConfig(tiers=given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_from_every_tier_are_those_of_a_cold_run(kind: TinyKind, temperature: float, tmp_path: Path) -> None:
    sampling = {"temperature": temperature, "seed": 11}
    cold = make_loop(kind, prefix_caching=False)
    prompt = [*PROMPT, *first_turn(cold), *NEXT]
    expected, _ = second_turn(cold, prompt, **sampling)

    host = make_loop(kind, cache=settings(None, host_bytes=64 << 20))
    first_turn(host)
    evict_all(host)
    tokens, num_reused = second_turn(host, prompt, **sampling)
    assert tokens == expected
    assert num_reused >= len(PROMPT) + NUM_TOKENS - 8  # all but the end of the last page, without state
    assert tiers_of(host).counters.num_hits == {"host": 1}

    dying = make_loop(kind, cache=settings(tmp_path, disk_bytes=64 << 20))
    first_turn(dying)
    dying.loop.receive(Shutdown())
    new = make_loop(kind, cache=settings(tmp_path, disk_bytes=64 << 20))
    tokens, num_reused = second_turn(new, prompt, **sampling)
    assert tokens == expected
    assert num_reused >= len(PROMPT) + NUM_TOKENS - 8
    assert tiers_of(new).counters.num_hits == {"disk": 1}
    tiers_of(new).close()


def evict_all(bench: LoopBench) -> None:
    scheduler: Any = bench.loop._scheduler  # type: ignore[attr-defined]
    scheduler._cache.clear()
    assert scheduler._cache.match("", [*PROMPT, 1]).num_tokens == 0


def test_eight_bit_snapshots_are_near_and_smaller(tmp_path: Path) -> None:
    sizes = []
    for name, int8 in (("exact", False), ("near", True)):
        dying = make_loop("hybrid", cache=settings(tmp_path / name, disk_bytes=64 << 20, int8_snapshots=int8))
        first_turn(dying)
        dying.loop.receive(Shutdown())
        sizes.append(sum(path.stat().st_size for path in (tmp_path / name).rglob("*.snapshot")))
    assert sizes[1] < 0.6 * sizes[0]
    prompt = [*PROMPT, *dying.tokens("first"), *NEXT]
    new = make_loop("hybrid", cache=settings(tmp_path / "near", disk_bytes=64 << 20, int8_snapshots=True))
    tokens, num_reused = second_turn(new, prompt)
    assert num_reused == len(PROMPT) + NUM_TOKENS - 1
    assert len(tokens) == NUM_TOKENS
    tiers_of(new).close()
    # What is exact is never taken from what is not.
    exact = make_loop("hybrid", cache=settings(tmp_path / "near", disk_bytes=64 << 20))
    assert second_turn(exact, prompt)[1] == 0
    tiers_of(exact).close()


def test_an_idle_loop_writes_and_then_rests(tmp_path: Path) -> None:
    bench = make_loop("hybrid", cache=settings(tmp_path, disk_bytes=64 << 20))
    first_turn(bench)
    tiers = tiers_of(bench)
    deadline = time.monotonic() + 20
    while tiers.offloader.num_unwritten and time.monotonic() < deadline:
        bench.loop.step()
    assert not tiers.offloader.num_unwritten
    assert not bench.loop.step(), "an idle loop has nothing to do"
    bench.loop.receive(Shutdown())
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {"", ".pages", ".snapshot"}
