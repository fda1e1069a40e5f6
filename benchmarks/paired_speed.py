"""Two engines that answer the same prompts in turns: tokens per second of the second against the first.

Rounds of both alternate, or single steps of them, so that what else the machine does falls on both; a ratio is of two
rounds that follow each other. Each engine has answered everything once before it is measured, so that prompts come
from the cache and what steps cost is known.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from operator import ne
from types import SimpleNamespace
from typing import Any

from benchmarks.machine import describe_machine

from turnkeep.engine import runner
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.factory import build_engine, resolve_dtype
from turnkeep.engine.loop import EngineLoop
from turnkeep.engine.messages import FromEngine, Submit, Tokens
from turnkeep.engine.process import calm_garbage_collector
from turnkeep.models.catalog import ModelSource, find_model
from turnkeep.models.demo.generator import conversation
from turnkeep.scheduler.request import SamplingParams
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.tokenizer import Tokenizer

Prompts = Sequence[Sequence[int]]


class Engine:
    """One engine, driven step by step."""

    def __init__(self, speculation: str, dtype: str, model: str = "demo") -> None:
        self.events: list[FromEngine] = []
        settings: dict[str, Any] = {"speculation": speculation, "dtype": dtype, "memory_bytes": 1 << 29}
        self.loop: EngineLoop = build_engine(EngineConfig(model=model, **settings), self.events.append)[0]
        self._num_requests = 0

    def submit(self, prompts: Prompts, sampling: SamplingParams) -> list[str]:
        """All of them at once; the names under which `answers` gives what they got."""
        names = []
        for prompt in prompts:
            self._num_requests += 1
            names.append(f"r{self._num_requests}")
            self.loop.receive(Submit(request_id=names[-1], prompt_ids=list(prompt), sampling=sampling))
        return names

    def answers(self, names: Sequence[str]) -> list[list[int]]:
        """Once nothing is left to do."""
        found: dict[str, list[int]] = {name: [] for name in names}
        for event in self.events:
            if isinstance(event, Tokens):
                found[event.request_id] += event.token_ids
        self.events.clear()
        return list(found.values())


class PairedSpeed:
    """Comparisons of one run, and the report they make. `arguments` are those of `options`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.dtype = resolve_dtype(arguments.dtype)
        self._repeats: int = arguments.repeats
        self._is_stepwise = arguments.turns == "steps"
        self._clock = time.perf_counter
        if arguments.clock == "cpu":
            self._clock = time.process_time
            runner.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
        self.report: dict[str, Any] = {"dtype": self.dtype, "seed": arguments.seed, "clock": arguments.clock}
        self.report["turns"] = arguments.turns

    def engines(self, drafted: str, model: str = "demo") -> dict[str, Engine]:
        """One that decodes plainly, and one that drafts."""
        engines = {mode: Engine(mode, self.dtype, model) for mode in ("off", drafted)}
        calm_garbage_collector()  # as in an engine's own process
        return engines

    def compare(
        self, name: str, engines: Mapping[str, Engine], groups: Sequence[Prompts], sampling: SamplingParams
    ) -> int:
        """The prompts of a group are answered at once, the groups after each other. Returns how many answers differ."""
        seconds: dict[str, list[float]] = {side: [] for side in engines}
        answers: dict[str, list[list[int]]] = {}
        for repeat in range(self._repeats + 1):
            answers = {side: [] for side in engines}
            of_round = dict.fromkeys(engines, 0.0)
            pairs = [engines] if self._is_stepwise else [{side: engine} for side, engine in engines.items()]
            for together in pairs:
                for group in groups:
                    for side, found in self._answer(together, group, sampling, of_round).items():
                        answers[side] += found
            if repeat:  # the first round warms up
                for side, own in of_round.items():
                    seconds[side].append(own)
        (plain_s, drafted_s), (plain, drafted) = seconds.values(), answers.values()
        num_tokens = sum(map(len, plain))
        ratios = [before / after for before, after in zip(plain_s, drafted_s, strict=True)]
        num_different = sum(map(ne, plain, drafted))
        self.report[name] = {
            "answers": len(plain),
            "answers_that_differ": num_different,
            "tokens": num_tokens,
            "plain_tokens_per_s": round(num_tokens / statistics.median(plain_s), 1),
            "drafted_tokens_per_s": round(num_tokens / statistics.median(drafted_s), 1),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
        return num_different

    def _answer(
        self, engines: Mapping[str, Engine], group: Prompts, sampling: SamplingParams, seconds: dict[str, float]
    ) -> dict[str, list[list[int]]]:
        """Steps of these engines in turns, each time another first, until all have answered."""
        names = {}
        for side, engine in engines.items():
            started_s = self._clock()
            names[side] = engine.submit(group, sampling)
            seconds[side] += self._clock() - started_s
        order = list(engines)
        while any(engine.loop.has_work for engine in engines.values()):
            for side in order:
                if engines[side].loop.has_work:
                    started_s = self._clock()
                    engines[side].loop.step()
                    seconds[side] += self._clock() - started_s
            order.reverse()
        return {side: engine.answers(names[side]) for side, engine in engines.items()}

    def print(self) -> None:
        """The report as JSON, with the machine."""
        print(json.dumps(self.report | describe_machine(), indent=2))


def options(description: str) -> argparse.ArgumentParser:
    """What such a benchmark can be told; the first line of the description is shown."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: the seconds of this process, also in what engines learn about steps; for busy machines",
    )
    parser.add_argument(
        "--turns", choices=("rounds", "steps"), default="rounds", help="what alternates: steps are least disturbed"
    )
    parser.add_argument("--seed", type=int, default=100)
    return parser


def in_groups(prompts: Prompts, together: int) -> list[Prompts]:
    """So many of them at once."""
    return [prompts[start : start + together] for start in range(0, len(prompts), together)]


def text_of(source: ModelSource) -> tuple[Tokenizer, ChatTemplate]:
    """What makes tokens of texts, and a text of messages."""
    template = ChatTemplate(source.chat_template() or "", bos_token=source.bos_token, eos_token=source.eos_token)
    return Tokenizer(source.tokenizer_json()), template


def order_desk_prompts(count: int, seed: int) -> tuple[list[list[int]], SamplingParams]:
    """Conversations as the bundled model knows them, up to a user's words, and how their answers are sampled."""
    source = find_model("demo")
    tokenizer, template = text_of(source)
    prompts = []
    for number in range(count):
        script = conversation(seed + number, 1 + number % 4)
        messages = script.messages()
        last = max(index for index, message in enumerate(messages) if message["role"] == "user") + 1
        prompts.append(tokenizer.encode(template.render(messages[:last], tools=script.tools)))
    return prompts, SamplingParams(max_new_tokens=400, stop_token_ids=tuple(sorted(source.eos_token_ids)))
