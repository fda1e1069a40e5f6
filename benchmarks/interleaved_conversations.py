"""Many conversations in memory for few: 200 conversations of 10 turns interleaved, with room for about 20 of them.

Drives the whole engine (scheduler, cache, model) in-process with the bundled model, several requests at a time. Every
request must finish, nothing may leak; reports the share of prompt tokens that came from the cache. Prints a table and
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.machine import describe_machine

PAGE_SIZE = 16


@dataclass
class Dialogue:
    """One conversation: what the engine holds of it, and the messages to come."""

    conversation_id: str
    token_ids: list[int]
    new_messages: list[list[int]]
    turn: int = 0
    request_id: str = ""
    output: list[int] = field(default_factory=list)


class Desk:
    """Submits turns and collects their events."""

    def __init__(self, loop: Any, events: list[Any], max_new_tokens: int) -> None:
        self.loop = loop
        self.events = events
        self.max_new_tokens = max_new_tokens
        self.open: dict[str, Dialogue] = {}
        self.totals = {"requests": 0, "prompt": 0, "cached": 0, "finished": 0, "failed": 0, "suspensions": 0}

    def send(self, dialogue: Dialogue) -> None:
        from turnkeep.cache.boundary import Boundary
        from turnkeep.cache.encoded_tokens import EncodedTokens
        from turnkeep.engine.messages import Submit
        from turnkeep.scheduler.request import SamplingParams

        dialogue.token_ids = dialogue.token_ids + dialogue.output + dialogue.new_messages[dialogue.turn]
        dialogue.output = []
        dialogue.request_id = f"{dialogue.conversation_id}-{dialogue.turn}"
        dialogue.turn += 1
        self.open[dialogue.request_id] = dialogue
        self.totals["requests"] += 1
        self.loop.receive(
            Submit(
                request_id=dialogue.request_id,
                prompt_ids=EncodedTokens(dialogue.token_ids),
                sampling=SamplingParams(max_new_tokens=self.max_new_tokens, ignore_eos=True),
                boundaries=(Boundary(len(dialogue.token_ids), "turn_start"),),
                conversation_id=dialogue.conversation_id,
            )
        )

    def take_events(self) -> list[Dialogue]:
        """Dialogues whose turn has ended."""
        from turnkeep.engine.messages import EndTurn, Finished, Tokens

        ended = []
        for event in self.events:
            if isinstance(event, Tokens):
                self.open[event.request_id].output += event.token_ids
            elif isinstance(event, Finished):
                dialogue = self.open.pop(event.request_id)
                self.totals["finished" if event.reason in ("stop", "length") else "failed"] += 1
                self.totals["prompt"] += event.num_prompt_tokens
                self.totals["cached"] += event.num_cached_tokens
                self.totals["suspensions"] += event.num_suspensions
                ended.append(dialogue)
        self.events.clear()
        for dialogue in ended:
            self.loop.receive(EndTurn(dialogue.request_id, len(dialogue.token_ids) + len(dialogue.output)))
        return ended


def make_dialogues(arguments: argparse.Namespace, generator: random.Random, vocab_size: int) -> list[Dialogue]:
    def tokens(length: int) -> list[int]:
        return [generator.randrange(16, vocab_size) for _ in range(length)]

    trunk = tokens(64)
    return [
        Dialogue(
            conversation_id=f"c{index}",
            token_ids=list(trunk),
            new_messages=[tokens(generator.randint(8, 40)) for _ in range(arguments.turns)],
        )
        for index in range(arguments.conversations)
    ]


def measure(arguments: argparse.Namespace, folder: str | None) -> dict[str, Any]:
    """folder: of the disk tier, None for none."""
    from turnkeep.cache.config import CacheConfig
    from turnkeep.cache.tiers.config import TierConfig
    from turnkeep.engine.config import EngineConfig
    from turnkeep.engine.factory import build_engine

    generator = random.Random(arguments.seed)
    final_tokens = 64 + arguments.turns * (24 + arguments.tokens)
    tiers = TierConfig(folder=folder, disk_bytes=1 << 30)
    config = EngineConfig(
        model="demo",
        # The last turns of about `capacity` conversations fit: their pages, and two snapshots each.
        num_pages=arguments.capacity * (final_tokens // PAGE_SIZE + 1) + 1,
        num_state_rows=2 * arguments.capacity + arguments.running + 1,
        max_running=arguments.running,
        cache=CacheConfig(eviction_policy=arguments.eviction_policy, tiers=tiers),
    )
    events: list[Any] = []
    loop, ready = build_engine(config, events.append)
    desk = Desk(loop, events, arguments.tokens)
    dialogues = make_dialogues(arguments, generator, ready.vocab_size)
    # A conversation has at most one open turn; which of the active ones returns next is random, and when one has had
    # its last turn a new one takes its place.
    coming = list(reversed(dialogues))
    idle = [coming.pop() for _ in range(min(arguments.working_set, len(coming)))]
    start = time.perf_counter()
    while idle or desk.open:
        while idle and len(desk.open) < arguments.running + 1:
            desk.send(idle.pop(generator.randrange(len(idle))))
        loop.step()
        for dialogue in desk.take_events():
            if dialogue.turn < arguments.turns:
                idle.append(dialogue)
            elif coming:
                idle.append(coming.pop())
    elapsed_s = time.perf_counter() - start
    stats = loop._scheduler.cache_stats()
    loop._scheduler._cache.check()
    return {
        "conversations": arguments.conversations,
        "turns": arguments.turns,
        "capacity_conversations": arguments.capacity,
        "seed": arguments.seed,
        "eviction_policy": arguments.eviction_policy,
        "disk_cache": folder is not None,
        "hits_from_disk": stats.counter_values().get("tier_num_hits.disk", 0.0),
        "hits_from_host": stats.counter_values().get("tier_num_hits.host", 0.0),
        **desk.totals,
        "cached_share": round(desk.totals["cached"] / desk.totals["prompt"], 4),
        "held_pages": stats.num_pages - stats.num_free_pages - stats.num_evictable_pages,
        "held_rows": stats.num_rows - stats.num_free_rows - stats.num_evictable_rows,
        "open_sequences": stats.num_open_sequences,
        "elapsed_s": round(elapsed_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--capacity", type=int, default=20, help="conversations that the memory holds")
    parser.add_argument("--working-set", type=int, default=30, help="conversations that are active at a time")
    parser.add_argument("--running", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8, help="generated tokens a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eviction-policy", default="density")
    parser.add_argument("--disk-cache", action="store_true", help="let what is evicted go to disk, and come back")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments, folder if arguments.disk_cache else None) | {"machine": describe_machine()}
    for name, value in result.items():
        if name != "machine":
            print(f"{name:24}{value:>12}")
    print(json.dumps(result))
    expected = result["conversations"] * result["turns"]
    if result["finished"] != expected or result["failed"] or result["held_pages"] or result["held_rows"]:
        raise SystemExit("a request did not finish, or something leaked")


if __name__ == "__main__":
    main()
