"""How long bringing a long prefix from disk keeps the engine's loop from anything else.

    python -m benchmarks.tier_holds [--tokens 100000] [--host]

A prefix without content lies in pools of the bundled model's shapes, is written, and is loaded by a scheduler that
started again; no model runs. --host: it leaves the device and comes back from host memory. Every turn of the loop is
timed on its own. Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from benchmarks.machine import describe_machine

from turnkeep.cache.cache_manager import CacheManager
from turnkeep.cache.config import CacheConfig
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.cache.pool_content import TensorPoolContent
from turnkeep.cache.storage import CacheStorage
from turnkeep.cache.tiers.config import TierConfig
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.sizing import engine_spec
from turnkeep.engine.tier_building import build_tiers
from turnkeep.models.catalog import find_model
from turnkeep.models.config import ModelConfig
from turnkeep.scheduler.config import SchedulerConfig
from turnkeep.scheduler.request import Request, SamplingParams
from turnkeep.scheduler.scheduler import Scheduler

NUM_ROWS = 8
NUM_NEW_TOKENS = 20


class Device:
    """A cache over pools, and its tiers in a folder."""

    def __init__(self, folder: Path, num_tokens: int, host_bytes: int | None) -> None:
        model = ModelConfig.from_dict(find_model("demo").config_dict())
        spec = engine_spec(model, EngineConfig(model="demo"), "bfloat16")
        num_pages = num_tokens // spec.page_size + 100
        storage = CacheStorage(spec, num_pages=num_pages, num_state_rows=NUM_ROWS)
        tiers = TierConfig(folder=str(folder), disk_bytes=8 << 30, host_bytes=host_bytes)
        content = TensorPoolContent(storage.tensors)
        built = build_tiers(spec, CacheConfig(tiers=tiers), content, b"benchmark", 1 << 30)
        self.cache = CacheManager(
            spec,
            CacheConfig(),
            num_pages=num_pages,
            num_state_rows=NUM_ROWS,
            clock=time.monotonic,
            tiers=built.tiers,
        )
        assert built.tiers is not None
        self.tiers = built.tiers

    def publish(self, tokens: list[int]) -> None:
        """A turn of these tokens ends; everything is written."""
        cache = self.cache
        seq = cache.open(cache.match("", tokens, "c"), tokens, conversation_id="c")
        assert seq is not None
        assert cache.grow(seq, len(tokens))
        cache.drain_copies()
        cache.advance(seq, len(tokens))
        cache.finish(seq, tokens, keep_turn_end=True)
        self.tiers.flush(60.0)


def load(device: Device, tokens: list[int]) -> dict[str, float]:
    """The next turn arrives. Seconds until it is admitted, and how long single turns of the loop took."""
    limits = SchedulerConfig(max_running=2, max_step_tokens=512, max_model_len=len(tokens) + 100)
    scheduler = Scheduler(device.cache, limits)
    sampling = SamplingParams(max_new_tokens=1)
    request = Request("r", EncodedTokens(tokens), len(tokens), (), sampling, conversation_id="c", cache_root="")
    started_s = time.perf_counter()
    scheduler.submit(request)
    turns: list[float] = []
    while request.admitted_s is None:
        begun_s = time.perf_counter()
        scheduler.plan()
        turns.append(time.perf_counter() - begun_s)
        if request.admitted_s is None:
            scheduler.use_idle_time()  # nothing runs here: it waits a moment for the disk
    return {
        "reused_tokens": float(request.num_cached_tokens),
        "until_admitted_s": time.perf_counter() - started_s,
        "longest_turn_s": max(turns),
        "turns_over_5_ms": float(sum(turn > 0.005 for turn in turns)),
        "all_turns_s": sum(turns),
    }


def measure(num_tokens: int, *, from_host: bool) -> dict[str, float]:
    tokens = list(range(num_tokens))
    following = [*tokens, *range(NUM_NEW_TOKENS)]
    with tempfile.TemporaryDirectory() as name:
        device = Device(Path(name), num_tokens, (4 << 30) if from_host else None)
        device.publish(tokens)
        if from_host:
            device.cache.clear()
        else:
            device.tiers.close()
            device = Device(Path(name), num_tokens, None)
        found = load(device, following)
        device.tiers.close()
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--host", action="store_true")
    options = parser.parse_args()
    found = measure(options.tokens, from_host=options.host)
    for name, value in found.items():
        print(f"{name:18} {value:,.3f}")
    print(json.dumps({"machine": describe_machine(), "tokens": options.tokens, "from_host": options.host, **found}))


if __name__ == "__main__":
    main()
