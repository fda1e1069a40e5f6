"""Tokens per second with drafts against plain decoding: the same engine settings, prompts and answers, in turns.

Order-desk conversations of the bundled model, greedy, each answered to its end; one conversation at a time and several
at once. Then 300 tokens each, nearly all beyond the end of the answer, where the draft head was never trained and is
hardly ever right: what drafts cost where they are of no use. Before it is measured each engine has answered everything
once, so that prompts come from the cache and what drafts cost is known. `--clock cpu`: the seconds of this process
instead of those on the wall, also in what the engines learn about steps, for busy machines.

    OMP_WAIT_POLICY=passive python -m benchmarks.draft_speed [--repeats 5] [--clock cpu]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from operator import ne
from types import SimpleNamespace
from typing import Any

import msgspec
from benchmarks.machine import describe_machine

from turnkeep.engine import runner
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.factory import build_engine, resolve_dtype
from turnkeep.engine.loop import EngineLoop
from turnkeep.engine.messages import FromEngine, Submit, Tokens
from turnkeep.engine.process import calm_garbage_collector
from turnkeep.models.catalog import find_model
from turnkeep.models.demo.generator import conversation
from turnkeep.scheduler.request import SamplingParams
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.tokenizer import Tokenizer

NUM_UNFORESEEN = 300


class Engine:
    """One engine, driven step by step."""

    def __init__(self, speculation: str, dtype: str, model: str = "demo") -> None:
        self.events: list[FromEngine] = []
        settings: dict[str, Any] = {"speculation": speculation, "dtype": dtype, "memory_bytes": 1 << 29}
        self.loop: EngineLoop = build_engine(EngineConfig(model=model, **settings), self.events.append)[0]
        self._num_requests = 0

    def answers(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[list[int]]:
        """Submit all at once and step to the end."""
        names = []
        for prompt in prompts:
            self._num_requests += 1
            names.append(f"r{self._num_requests}")
            self.loop.receive(Submit(request_id=names[-1], prompt_ids=list(prompt), sampling=sampling))
        while self.loop.has_work:
            self.loop.step()
        found: dict[str, list[int]] = {name: [] for name in names}
        for event in self.events:
            if isinstance(event, Tokens):
                found[event.request_id] += event.token_ids
        self.events.clear()
        return list(found.values())


def order_desk_prompts(count: int, seed: int) -> tuple[list[list[int]], SamplingParams]:
    source = find_model("demo")
    tokenizer = Tokenizer(source.tokenizer_json())
    template = ChatTemplate(source.chat_template() or "", bos_token=source.bos_token, eos_token=source.eos_token)
    prompts = []
    for number in range(count):
        script = conversation(seed + number, 1 + number % 4)
        messages = script.messages()
        last = max(index for index, message in enumerate(messages) if message["role"] == "user") + 1
        prompts.append(tokenizer.encode(template.render(messages[:last], tools=script.tools)))
    return prompts, SamplingParams(max_new_tokens=400, stop_token_ids=tuple(sorted(source.eos_token_ids)))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    if arguments.clock == "cpu":
        runner.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
    dtype = resolve_dtype(arguments.dtype)
    prompts, sampling = order_desk_prompts(arguments.conversations, arguments.seed)
    report: dict[str, Any] = {"dtype": dtype, "seed": arguments.seed, "clock": arguments.clock}
    engines = make_engines(dtype)
    for together in arguments.together:
        groups = [prompts[start : start + together] for start in range(0, len(prompts), together)]
        report[f"{together} at once"] = compared = compare(engines, groups, sampling, arguments.repeats, clock)
        if compared["answers_that_differ"]:  # beyond an answer's end likely tokens tie, which 16 bits break either way
            raise SystemExit("the answers differ")
    unforeseen = msgspec.structs.replace(sampling, max_new_tokens=NUM_UNFORESEEN, ignore_eos=True)
    for together in arguments.together:
        # Engines of their own, which have not learnt that drafts are good.
        compared = compare(make_engines(dtype), [prompts[:together]], unforeseen, arguments.repeats, clock)
        report[f"{together} at once, beyond the end"] = compared
    return report


def make_engines(dtype: str) -> dict[str, Engine]:
    engines = {mode: Engine(mode, dtype) for mode in ("off", "mtp")}
    calm_garbage_collector()  # as in an engine's own process
    return engines


def compare(
    engines: dict[str, Engine],
    groups: Sequence[Sequence[Sequence[int]]],
    sampling: SamplingParams,
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Rounds of both engines in turns; answers that differ are counted."""
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    answers: dict[str, list[list[int]]] = {}
    for repeat in range(repeats + 1):
        for mode, engine in engines.items():
            started_s = clock()
            answers[mode] = [answer for group in groups for answer in engine.answers(group, sampling)]
            if repeat:  # the first round warms up
                seconds[mode].append(clock() - started_s)
    num_tokens = sum(map(len, answers["off"]))
    ratios = [plain / drafted for plain, drafted in zip(seconds["off"], seconds["mtp"], strict=True)]
    return {
        "tokens": num_tokens,
        "plain_tokens_per_s": round(num_tokens / statistics.median(seconds["off"]), 1),
        "drafted_tokens_per_s": round(num_tokens / statistics.median(seconds["mtp"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "answers_that_differ": sum(map(ne, answers["off"], answers["mtp"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seed", type=int, default=100)
    print(json.dumps(measure(parser.parse_args()) | describe_machine(), indent=2))


if __name__ == "__main__":
    main()
