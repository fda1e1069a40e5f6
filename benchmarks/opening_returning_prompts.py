"""What a returning conversation costs the engine before its first step: a long prompt that the cache holds whole.

Measured from the bytes of the Submit message to the opened sequence, in the engine's own parts (decoding, scheduler,
admission, cache; no model): with the conversation's tag, and without. Bars for 100,000 tokens: 1 ms and 20 ms.
Processor time of the engine's thread is shown beside the wall clock: on a busy machine only the first is the engine's.
Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks.machine import describe_machine

PAGE_SIZE = 16
BARS_MS = {"tag": 1.0, "no tag": 20.0}
NEW_TOKENS = 200


class NoModel:
    """Samples token 7 after everything; the pools hold nothing."""

    def run(self, plan: Any) -> Any:
        from turnkeep.scheduler.step_plan import SampledToken, StepOutput

        tokens = {item.request_id: (SampledToken(7),) for item in plan.items if item.sampling is not None}
        return StepOutput(tokens=tokens, duration_s=0.0)


def make_loop(num_tokens: int, policy: str) -> Any:
    from turnkeep.cache.cache_manager import CacheManager
    from turnkeep.cache.config import CacheConfig
    from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec
    from turnkeep.engine.loop import EngineLoop
    from turnkeep.scheduler.config import SchedulerConfig
    from turnkeep.scheduler.scheduler import Scheduler

    spec = CacheSpec(PAGE_SIZE, KVSpec(4, 2, 64, "bfloat16"), StateSpec((StatePart("ssm", 4, (64, 64), "float32"),)))
    cache = CacheManager(
        spec,
        CacheConfig(eviction_policy=policy),  # type: ignore[arg-type]
        num_pages=4 * num_tokens // PAGE_SIZE,
        num_state_rows=64,
        clock=time.monotonic,
    )
    limits = SchedulerConfig(
        max_running=4, max_step_tokens=4096, max_model_len=2 * num_tokens + 10_000, vocab_size=100_000
    )
    return EngineLoop(Scheduler(cache, limits), NoModel(), lambda event: None)


def submit_frame(request_id: str, prompt: list[int], conversation: str | None) -> bytes:
    """The message as the server sends it."""
    from turnkeep.cache.boundary import Boundary
    from turnkeep.cache.encoded_tokens import EncodedTokens
    from turnkeep.engine.framing import HEADER_BYTES, encode_frame
    from turnkeep.engine.messages import Submit
    from turnkeep.scheduler.request import SamplingParams

    message = Submit(
        request_id=request_id,
        prompt_ids=EncodedTokens(prompt),
        sampling=SamplingParams(max_new_tokens=8),
        boundaries=(Boundary(len(prompt) - 4, "turn_start"),),
        conversation_id=conversation,
    )
    return encode_frame(message)[HEADER_BYTES:]


def measure(num_tokens: int, rounds: int, *, tagged: bool, policy: str) -> tuple[list[float], list[float]]:
    """Milliseconds from message to opened sequence, one for each returning turn: wall clock, processor."""
    from turnkeep.engine.framing import decode_message
    from turnkeep.engine.process import _calm_garbage_collector

    _calm_garbage_collector()
    loop = make_loop(num_tokens + rounds * (NEW_TOKENS + 8), policy)
    conversation = "c" if tagged else None
    prompt = [(7919 * place) % 99_991 for place in range(num_tokens)]
    wall_ms, cpu_ms = [], []
    for turn in range(rounds + 1):
        frame = submit_frame(f"t{turn}", prompt, conversation)
        start, cpu_start = time.perf_counter(), time.thread_time()
        loop.receive(decode_message(frame))
        loop._scheduler._admit()
        cpu_ms.append((time.thread_time() - cpu_start) * 1e3)
        wall_ms.append((time.perf_counter() - start) * 1e3)
        request = loop._scheduler._running[0]
        assert turn == 0 or request.num_cached_tokens > len(prompt) - NEW_TOKENS - 2, "the turn before was not reused"
        while loop.has_work:
            loop.step()
        prompt = [*prompt, *[7] * 8, *[(turn + 31 * place) % 99_991 for place in range(NEW_TOKENS)]][: num_tokens * 2]
    return wall_ms[1:], cpu_ms[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--policy", default="lru")
    options = parser.parse_args()
    medians: dict[str, dict[str, float]] = {}
    for num_tokens in options.tokens:
        for name in BARS_MS:
            wall, cpu = measure(num_tokens, options.rounds, tagged=name == "tag", policy=options.policy)
            median = {"wall": statistics.median(wall), "cpu": statistics.median(cpu), "least": min(wall)}
            medians[f"{num_tokens} {name}"] = {key: round(value, 3) for key, value in median.items()}
            print(
                f"{num_tokens:>8,} tokens, {name:<6}: median {median['wall']:7.3f} ms, "
                f"processor {median['cpu']:7.3f} ms, least {min(wall):7.3f} ms"
            )
    longest = max(options.tokens)
    result = {
        "benchmark": "opening_returning_prompts",
        "policy": options.policy,
        "rounds": options.rounds,
        "ms": medians,
        "bars_met": {name: medians[f"{longest} {name}"]["wall"] <= bar for name, bar in BARS_MS.items()},
        "machine": describe_machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
