"""Tokens per second with prompt lookup (`--speculation ngram`) against plain decoding: the same prompts and answers, in
turns, where answers copy what was read and where they do not.

Greedy. Copies: order-desk prompts that end with the result of a tool, which a grammar has the answer repeat, as a
model that copies would; both engines pay for the grammar. Own words: answers as the model gives them. `--model smollm2`
is one without a draft head.

    OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python -m benchmarks.prompt_lookup_speed [--repeats 5] [--clock cpu]
"""

from __future__ import annotations

import argparse
import json
import random
from typing import NamedTuple

from benchmarks.paired_speed import PairedSpeed, in_groups, options, order_desk_prompts, text_of

from turnkeep.models.catalog import find_model
from turnkeep.models.demo.generator import conversation
from turnkeep.scheduler.request import SamplingParams
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
    tokenizer, template = text_of(find_model(model))
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


def measure(arguments: argparse.Namespace) -> PairedSpeed:
    paired = PairedSpeed(arguments)
    paired.report["model"] = arguments.model
    engines = paired.engines("ngram", arguments.model)
    for workload in workloads(arguments.model, arguments.conversations, arguments.seed):
        for together in arguments.together:
            # In bfloat16 two tokens are often equally good; which one wins depends on how many are computed together.
            name = f"{workload.name}, {together} at once"
            paired.compare(name, engines, in_groups(workload.prompts, together), workload.sampling)
    return paired


if __name__ == "__main__":
    parser = options(__doc__ or "")
    parser.add_argument("--model", default="demo")
    measure(parser.parse_args()).print()
