"""What the disk tier costs and saves: a long conversation of the bundled model, computed, and loaded after a restart.

    python -m benchmarks.cold_tiers [--tokens 7000] [--int8]

Prints one table and one line of JSON. Both engines run in this process, one after the other, with one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.machine import describe_machine

from turnkeep.cache.config import CacheConfig
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.cache.tiers.config import TierConfig
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.factory import build_engine
from turnkeep.engine.loop import EngineLoop
from turnkeep.engine.messages import EndTurn, Finished, FromEngine, Shutdown, Submit, Tokens
from turnkeep.scheduler.request import SamplingParams

NUM_ANSWER_TOKENS = 32
NUM_NEW_TOKENS = 40


class Engine:
    """A loop that runs one request at a time."""

    def __init__(self, folder: Path, *, int8: bool) -> None:
        tiers = TierConfig(folder=str(folder), disk_bytes=2 << 30, int8_snapshots=int8)
        config = EngineConfig(model="demo", num_threads=1, memory_bytes=256 << 20, cache=CacheConfig(tiers=tiers))
        self.events: list[FromEngine] = []
        started_s = time.perf_counter()
        self.loop: EngineLoop
        self.loop, self.ready = build_engine(config, self.events.append)
        self.start_s = time.perf_counter() - started_s

    def turn(self, name: str, prompt: list[int]) -> tuple[list[int], int, float]:
        """Tokens, reused prompt tokens, and seconds to the first token."""
        sampling = SamplingParams(max_new_tokens=NUM_ANSWER_TOKENS, ignore_eos=True)
        started_s = time.perf_counter()
        self.loop.receive(
            Submit(request_id=name, prompt_ids=EncodedTokens(prompt), sampling=sampling, conversation_id="bench")
        )
        first_s, tokens, num_cached = 0.0, list[int](), 0
        is_finished = False
        while not is_finished:
            self.loop.step()
            for event in self.events:
                if isinstance(event, Tokens):
                    first_s = first_s or time.perf_counter() - started_s
                    tokens += event.token_ids
                elif isinstance(event, Finished):
                    assert event.reason == "length", event.message
                    num_cached, is_finished = event.num_cached_tokens, True
            self.events.clear()
        self.loop.receive(EndTurn(name, len(prompt) + len(tokens)))
        return tokens, num_cached, first_s

    def close(self) -> float:
        """Seconds that leaving takes, with what is still to be written."""
        started_s = time.perf_counter()
        self.loop.receive(Shutdown())
        return time.perf_counter() - started_s

    def counter(self, name: str) -> float:
        return self.loop.stats().counters.get(f"cache_tier_{name}", 0.0)


def measure(num_tokens: int, *, int8: bool) -> dict[str, float | bool]:
    """One conversation of num_tokens, whose second turn comes after a restart."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(200, 1200, (num_tokens,), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as name:
        first = Engine(Path(name), int8=int8)
        answer, _, computed_s = first.turn("first", prompt)
        leaving_s = first.close()
        written_bytes = first.counter("written_bytes")
        following = [*prompt, *answer, *range(300, 300 + NUM_NEW_TOKENS)]
        second = Engine(Path(name), int8=int8)
        tokens, num_cached, loaded_s = second.turn("second", following)
        second.close()
    with tempfile.TemporaryDirectory() as name:
        cold = Engine(Path(name), int8=int8)
        cold_tokens, _, cold_s = cold.turn("second", following)
        cold.close()
    return {
        "prompt_tokens": len(following),
        "reused_tokens": num_cached,
        "first_turn_s": computed_s,
        "cold_first_token_s": cold_s,
        "loaded_first_token_s": loaded_s,
        "written_mib": written_bytes / (1 << 20),
        "leaving_s": leaving_s,
        "start_s": second.start_s,
        "same_tokens": tokens == cold_tokens,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--int8", action="store_true")
    options = parser.parse_args()
    found = measure(options.tokens, int8=options.int8)
    for name, value in found.items():
        print(f"{name:24} {value:,.3f}" if isinstance(value, float) else f"{name:24} {value}")
    print(json.dumps({"machine": describe_machine(), "int8": options.int8, **found}))


if __name__ == "__main__":
    main()
