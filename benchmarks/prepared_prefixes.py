"""What idle-time preparation costs requests that run: tokens a second of a saturated engine with it and without.

A few conversations in a closed loop keep the engine busy; every turn's end says how the next prompt begins, which in
every second run is also given to be prepared. Runs take turns in one process, each is measured in processor time of the
engine's thread, so that a busy machine tells the same. Bar: less than 2 % fewer tokens. Then the same conversations one
after another with idle time between turns: prompt tokens computed a turn. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import describe_machine

BAR = 0.98
TRUNK_TOKENS, WORK_TOKENS, MESSAGE_TOKENS = 64, 60, 16


@dataclass
class Dialogue:
    """A conversation whose answers come back shorter than they were generated: the template drops the reasoning."""

    name: str
    prompt: list[int]
    turn: int = 0


class Load:
    """Conversations over one engine loop. `prepares`: each next prefix is also given to be prepared."""

    def __init__(self, loop: Any, events: list[Any], options: argparse.Namespace, run: int, *, prepares: bool) -> None:
        self.loop, self.events, self.options, self.prepares = loop, events, options, prepares
        self.random = random.Random(run)
        trunk = self.words(TRUNK_TOKENS)
        self.dialogues = [
            Dialogue(f"run{run}-{number}", [*trunk, *self.words(MESSAGE_TOKENS)])
            for number in range(options.conversations)
        ]
        self.num_tokens = 0
        self.num_prompt_computed = 0

    def words(self, number: int) -> list[int]:
        return [self.random.randrange(16, 1000) for _ in range(number)]

    def send(self, dialogue: Dialogue) -> None:
        from turnkeep.cache.boundary import Boundary
        from turnkeep.cache.encoded_tokens import EncodedTokens
        from turnkeep.engine.messages import Submit
        from turnkeep.scheduler.request import SamplingParams

        prompt = dialogue.prompt
        self.loop.receive(
            Submit(
                request_id=f"{dialogue.name}/{dialogue.turn}",
                prompt_ids=EncodedTokens(prompt),
                sampling=SamplingParams(max_new_tokens=self.options.tokens, ignore_eos=True),
                boundaries=(Boundary(len(prompt) - 1, "turn_start"),),
                conversation_id=dialogue.name,
            )
        )

    def finished(self) -> list[Dialogue]:
        """Take the events; end the turns that are done and say how their next prompts begin."""
        from turnkeep.cache.encoded_tokens import EncodedTokens
        from turnkeep.engine.messages import EndTurn, Finished, Prepare

        found, events = [], list(self.events)
        self.events.clear()
        for event in events:
            if not isinstance(event, Finished):
                continue
            dialogue = next(one for one in self.dialogues if event.request_id.startswith(f"{one.name}/"))
            self.num_tokens += event.num_output_tokens
            self.num_prompt_computed += event.num_prompt_tokens - event.num_cached_tokens
            self.loop.receive(EndTurn(event.request_id, event.num_prompt_tokens - 1))
            following = [*dialogue.prompt, *self.words(WORK_TOKENS)]
            if self.prepares:
                self.loop.receive(Prepare(EncodedTokens(following), dialogue.name))
            dialogue.prompt, dialogue.turn = [*following, *self.words(MESSAGE_TOKENS)], dialogue.turn + 1
            found.append(dialogue)
        return found

    def close(self) -> None:
        from turnkeep.engine.messages import CloseConversation

        for dialogue in self.dialogues:
            self.loop.receive(CloseConversation("", dialogue.name))
        self.loop._scheduler._cache.clear()

    def saturated(self) -> float:
        """Tokens a second of processor time, all conversations at once."""
        start = time.thread_time()
        for dialogue in self.dialogues:
            self.send(dialogue)
        num_left = len(self.dialogues) * self.options.turns
        while num_left:
            self.loop.step()
            for dialogue in self.finished():
                num_left -= 1
                if dialogue.turn < self.options.turns:
                    self.send(dialogue)
        elapsed = time.thread_time() - start
        self.close()
        return self.num_tokens / elapsed

    def with_idle_time(self) -> float:
        """Prompt tokens computed a turn after the first, one conversation at a time and idle in between."""
        num_computed = 0
        for dialogue in self.dialogues:
            for turn in range(self.options.turns):
                before = self.num_prompt_computed
                self.send(dialogue)
                while not self.finished():
                    self.loop.step()
                while self.loop.has_work:
                    self.loop.step()
                num_computed += self.num_prompt_computed - before if turn else 0
        self.close()
        return num_computed / (len(self.dialogues) * (self.options.turns - 1))


def main() -> None:
    from turnkeep.engine.config import EngineConfig
    from turnkeep.engine.factory import build_engine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    events: list[Any] = []
    loop, _ = build_engine(
        EngineConfig(model="demo", num_threads=1, max_running=8, memory_bytes=256 << 20), events.append
    )
    Load(loop, events, options, 0, prepares=False).saturated()  # warm
    ratios, speeds = [], []
    for pair in range(options.pairs):
        order = (False, True) if pair % 2 else (True, False)
        speed = {
            prepares: Load(loop, events, options, 2 * pair + 2 + prepares, prepares=prepares).saturated()
            for prepares in order
        }
        ratios.append(speed[True] / speed[False])
        speeds.append(speed[False])
        print(f"pair {pair}: {speed[False]:7.1f} tokens/s without, {speed[True]:7.1f} with, ratio {ratios[-1]:.3f}")
    computed = {
        prepares: Load(loop, events, options, 1000 + prepares, prepares=prepares).with_idle_time()
        for prepares in (False, True)
    }
    counts = dict(loop._scheduler.stats().num_preparations)
    ratio = statistics.median(ratios)
    print(f"median ratio {ratio:.3f} (bar {BAR}); with idle time {computed[False]:.1f} prompt tokens computed a turn "
          f"without preparation, {computed[True]:.1f} with, {MESSAGE_TOKENS} of them new")  # fmt: skip
    result = {
        "benchmark": "prepared_prefixes",
        "ratio": round(ratio, 4),
        "ratios": [round(one, 3) for one in ratios],
        "tokens_per_s_without": round(statistics.median(speeds), 1),
        "computed_without": round(computed[False], 1),
        "computed_with": round(computed[True], 1),
        "preparations": counts,
        "machine": describe_machine(),
    }
    print(json.dumps(result))
    if ratio < BAR:
        raise SystemExit("preparation costs running requests too much")


if __name__ == "__main__":
    main()
