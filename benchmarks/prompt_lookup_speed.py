"""Tokens per second with prompt lookup (`--speculation ngram`) against plain decoding: the same prompts and answers, in
turns, where answers copy what was read and where they do not.

Greedy. Copies: order-desk prompts that end with the result of a tool, which a grammar has the answer repeat, as a model
that copies would; both engines pay for the grammar. Own words: answers as the model gives them. As in `draft_speed`,
each engine has answered everything once before it is measured. `--model smollm2` is one without a draft head.

    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python -m benchmarks.prompt_lookup_speed [--repeats 5] [--clock cpu]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any, NamedTuple

from benchmarks.draft_speed import Engine, order_desk_prompts
from benchmarks.machine import describe_machine

from turnkeep.engine.factory import resolve_dtype
from turnkeep.models.catalog import find_model
from turnkeep.models.demo.generator import conversation
from turnkeep.scheduler.request import SamplingParams
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.tokenizer import Tokenizer

NUM_COPIED_LINES = 6


class Workload(NamedTuple):
    """Prompts that are answered alike."""

    name: str
    prompts: list[list[int]]
    sampling: SamplingParams


def prompts_for(model: str, count: int, seed: int) -> tuple[list[list[int]], SamplingParams]:
    """Order-desk conversations: as the bundled model knows them, or their text in a message for others."""
    if model == "demo":
        return order_desk_prompts(count, seed)
    source = find_model(model)
    tokenizer = Tokenizer(source.tokenizer_json())
    template = ChatTemplate(source.chat_template() or "", bos_token=source.bos_token, eos_token=source.eos_token)
    prompts = []
    for number in range(count):
        messages = conversation(seed + number, 4).messages()
        text = "\n".join(message["content"] for message in messages if message.get("content"))
        question = {"role": "user", "content": f"{text}\nWrite a short report about this."}
        prompts.append(tokenizer.encode(template.render([question])))
    return prompts, SamplingParams(max_new_tokens=60, ignore_eos=True)


def workloads(model: str, count: int, seed: int) -> list[Workload]:
    prompts, sampling = prompts_for(model, count, seed)
    chance = random.Random(seed)
    names = [chance.choice(("lamps", "boards", "clocks", "shirts", "chairs")) for _ in range(NUM_COPIED_LINES)]
    lines = [f"order {name[0].upper()}{chance.randrange(10, 99)}: {chance.randrange(2, 40)} {name}\n" for name in names]
    result = "".join(lines)
    copied = Tokenizer(find_model(model).tokenizer_json()).encode(result)
    copying = [[*prompt, *copied] for prompt in prompts]
    stop_ids = tuple(sorted(find_model(model).eos_token_ids))
    grammar = {"grammars": [{"name": "top", "lark_grammar": f"start: {json.dumps(result)}"}]}
    return [
        Workload(
            "copies", copying, SamplingParams(max_new_tokens=400, stop_token_ids=stop_ids, grammar=json.dumps(grammar))
        ),
        Workload("own words", prompts, sampling),
    ]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    dtype = resolve_dtype(arguments.dtype)
    engines = {mode: Engine(mode, dtype, arguments.model) for mode in ("off", "ngram")}
    report: dict[str, Any] = {"dtype": dtype, "seed": arguments.seed, "clock": arguments.clock}
    report["model"] = arguments.model
    for workload in workloads(arguments.model, arguments.conversations, arguments.seed):
        for together in arguments.together:
            report[f"{workload.name}, {together} at once"] = _compare(workload, engines, together, arguments, clock)
    return report


def _compare(
    workload: Workload, engines: dict[str, Engine], together: int, arguments: argparse.Namespace, clock: Any
) -> dict[str, Any]:
    groups = [workload.prompts[start : start + together] for start in range(0, len(workload.prompts), together)]
    seconds: dict[str, list[float]] = {mode: [] for mode in engines}
    answers: dict[str, list[list[int]]] = {}
    for repeat in range(arguments.repeats + 1):
        for mode, engine in engines.items():
            started_s = clock()
            answers[mode] = [answer for group in groups for answer in engine.answers(group, workload.sampling)]
            if repeat:  # the first round warms up
                seconds[mode].append(clock() - started_s)
    # In bfloat16 two tokens are often equally good; which one wins depends on how many are computed together.
    num_different = sum(plain != drafted for plain, drafted in zip(answers["off"], answers["ngram"], strict=True))
    num_tokens = sum(map(len, answers["off"]))
    ratios = [plain / drafted for plain, drafted in zip(seconds["off"], seconds["ngram"], strict=True)]
    return {
        "answers": len(answers["off"]),
        "different_answers": num_different,
        "tokens": num_tokens,
        "plain_tokens_per_s": round(num_tokens / statistics.median(seconds["off"]), 1),
        "drafted_tokens_per_s": round(num_tokens / statistics.median(seconds["ngram"]), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seed", type=int, default=100)
    print(json.dumps(measure(parser.parse_args()) | describe_machine(), indent=2))


if __name__ == "__main__":
    main()
