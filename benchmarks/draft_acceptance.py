"""How many tokens the trees of a drafter save: the bundled model writes turns of an order desk, with trees of 1 to 32
nodes proposed after every step and walked along what it wrote.

Measures acceptance by depth, tokens a step and the time of a proposal beside that of a decode step, greedy and sampled.
The model itself decodes plainly here, one conversation at a time: what is measured is the drafts, not the engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from benchmarks.machine import describe_machine
from rich.console import Console
from rich.progress import track
from rich.table import Table

from turnkeep.cache.storage import CacheStorage
from turnkeep.engine.batch_builder import BatchBuilder
from turnkeep.engine.sizing import cache_spec
from turnkeep.engine.speculation.drafter import Drafter, DraftRequest
from turnkeep.engine.speculation.head_drafter import HeadDrafter
from turnkeep.engine.speculation.prompt_lookup import PromptLookup
from turnkeep.kernels.sampling import SamplingBatch, SamplingRow, sample
from turnkeep.models.catalog import find_model
from turnkeep.models.config import ModelConfig
from turnkeep.models.demo.evaluation import cases_of
from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.rendering import END, TurnEncoder, load_tokenizer
from turnkeep.models.draft_heads.loading import load_draft_head, quickest_dtype
from turnkeep.models.weights import load_model
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import StepItem

PAGE_SIZE = 16
MAX_TOKENS = 8192
MAX_ANSWER_TOKENS = 96
MAX_DEPTH = 7
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@dataclass
class Written:
    """A message of the model: hidden states [n + m, size] of the prompt's n tokens and of the m answered ones."""

    prompt_ids: list[int]
    answer_ids: list[int]
    hidden: torch.Tensor
    sampling: SamplingParams
    decode_s: list[float]


class Desk:
    """The model, its head and pools for one conversation."""

    def __init__(self, dtype: str) -> None:
        source = find_model("demo")
        config = ModelConfig.from_dict(source.config_dict())
        self.decoder = load_model(source, dtype=dtype)
        spec = cache_spec(config, PAGE_SIZE, dtype, has_draft_head=True)
        self.page_ids = np.arange(1, MAX_TOKENS // PAGE_SIZE + 1, dtype=np.int32)
        self.cache = CacheStorage(spec, num_pages=len(self.page_ids) + 1, num_state_rows=2).tensors
        self.builder = BatchBuilder(PAGE_SIZE, has_state=True, has_pages=True)
        head = load_draft_head(source, dtype=quickest_dtype(config, self.decoder.dtype))
        kv = self.cache.kv[config.num_attention_layers :]
        self.drafters: dict[str, Drafter] = {
            "head": HeadDrafter(self.decoder, head, kv, PAGE_SIZE),
            "lookup": PromptLookup(),
        }
        self.end_id = load_tokenizer().token_to_id(END)

    def write(self, prompt_ids: list[int], sampling: SamplingParams) -> Written:
        """Decode a message up to its end marker."""
        hidden, answer_ids, decode_s = [self._run(prompt_ids, 0)], [], []
        while True:
            position = len(prompt_ids) + len(answer_ids)
            row = SamplingRow(
                position=position,
                seed=sampling.seed,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
            )
            answer_ids.append(int(sample(self.decoder.logits(hidden[-1][-1:]), SamplingBatch([row]))))
            if answer_ids[-1] == self.end_id or len(answer_ids) >= MAX_ANSWER_TOKENS:
                return Written(prompt_ids, answer_ids, torch.cat(hidden), sampling, decode_s)
            started_s = time.perf_counter()
            hidden.append(self._run(answer_ids[-1:], position))
            self.decoder.logits(hidden[-1])
            decode_s.append(time.perf_counter() - started_s)

    def _run(self, token_ids: list[int], start: int) -> torch.Tensor:
        pages = self.page_ids[: -(-(start + len(token_ids)) // PAGE_SIZE)]
        batch = self.builder.build([StepItem("", token_ids, start, pages, 1, (), None)])
        return self.decoder.hidden(replace(batch, logit_indices=torch.arange(len(token_ids))), self.cache)


@dataclass
class Tally:
    """Steps with trees of one size. By depth: how many steps proposed a node there, and got one right."""

    grant: TreeGrant
    num_steps: int = 0
    num_tokens: int = 0
    num_nodes: int = 0
    num_proposed: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))
    num_right: list[int] = field(default_factory=lambda: [0] * (MAX_DEPTH + 1))
    num_predicted: float = 0.0
    propose_s: list[float] = field(default_factory=list)

    def add(self, tree: DraftTree | None, path: list[int]) -> None:
        """One step: the tree, and its nodes that were right."""
        self.num_steps += 1
        self.num_tokens += len(path) + 1
        if tree is None:
            return
        self.num_nodes += tree.num_nodes
        self.num_predicted += sum(tree.probabilities)
        for depth in range(1, max(tree.depths()) + 1):
            self.num_proposed[depth] += 1
            self.num_right[depth] += depth <= len(path)

    def report(self) -> dict[str, object]:
        """What is printed, as numbers."""
        steps = max(self.num_steps, 1)
        return {
            "max_nodes": self.grant.num_nodes,
            "steps": self.num_steps,
            "nodes": self.num_nodes / steps,
            "tokens_per_step": self.num_tokens / steps,
            "predicted_tokens_per_step": 1.0 + self.num_predicted / steps,
            "acceptance_by_depth": [
                round(right / proposed, 4)
                for right, proposed in zip(self.num_right[1:], self.num_proposed[1:], strict=True)
                if proposed
            ],
            "propose_ms": 1000.0 * statistics.median(self.propose_s),
        }


def right_path(tree: DraftTree | None, token_ids: Sequence[int]) -> list[int]:
    """The nodes of a tree that say what was said: token_ids are those after the root."""
    path: list[int] = []
    if tree is None:
        return path
    for token_id in token_ids:
        last = path[-1] if path else -1
        children = zip(tree.parents, tree.token_ids, strict=True)
        found = [node for node, (parent, token) in enumerate(children) if parent == last and token == token_id]
        if not found:
            break
        path += found
    return path


def replay(drafter: Drafter, page_ids: npt.NDArray[np.int32], written: Written, tally: Tally) -> None:
    """Go through a message as an engine with these trees would: a step proposes, what is right is skipped."""
    known, start, end = written.prompt_ids + written.answer_ids, 0, len(written.prompt_ids)
    while True:
        request = DraftRequest(
            request_id=f"{id(written)}-{tally.grant.num_nodes}",
            token_ids=known[start:end],
            start=start,
            next_token=known[end],
            hidden=written.hidden[start:end],
            previous_hidden=written.hidden[start - 1] if start else torch.zeros_like(written.hidden[0]),
            page_ids=page_ids[: end // PAGE_SIZE + 1],
            sampling=written.sampling,
            context_ids=None if start else [],
        )
        started_s = time.perf_counter()
        (tree,) = drafter.propose([request], tally.grant)
        if start:
            tally.propose_s.append(time.perf_counter() - started_s)
        if end + 1 >= len(known):
            return
        path = right_path(tree, known[end + 1 :])
        tally.add(tree, path)
        start, end = end, end + 1 + len(path)
        if end >= len(known):
            return


def prompts(num_conversations: int, num_turns: int) -> Iterator[list[int]]:
    """What stands before each message that the agent has to write."""
    encoder = TurnEncoder(load_tokenizer(), context_weight=0.0)
    for seed in range(num_conversations):
        for case in cases_of(conversation(seed, num_turns), encoder):
            written = [False, *case.written]
            for place, (before, own) in enumerate(pairwise(written)):
                if own and not before:
                    yield case.ids[:place]


def print_report(reports: list[dict[str, object]], title: str, console: Console) -> None:
    """One line for each size of trees."""
    table = Table("nodes up to", "nodes", "tokens a step", "predicted", "proposal", "right by depth", title=title)
    for report in reports:
        rates = " ".join(f"{rate:.3f}" for rate in report["acceptance_by_depth"])  # type: ignore[attr-defined]
        table.add_row(
            str(report["max_nodes"]),
            f"{report['nodes']:.1f}",
            f"{report['tokens_per_step']:.2f}",
            f"{report['predicted_tokens_per_step']:.2f}",
            f"{report['propose_ms']:.2f} ms",
            rates,
        )
    console.print(table)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--drafter", choices=("head", "lookup"), default="head")
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 0.7])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--max-children", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    desk = Desk(arguments.dtype)
    drafter = desk.drafters[arguments.drafter]
    all_prompts = list(prompts(arguments.conversations, arguments.turns))
    for temperature in arguments.temperature:
        tallies = [
            Tally(TreeGrant(size, size, min(size, MAX_DEPTH), arguments.max_children)) for size in arguments.sizes
        ]
        decode_s: list[float] = []
        for seed, prompt_ids in enumerate(track(all_prompts, f"temperature {temperature}", console=console)):
            sampling = SamplingParams(max_new_tokens=MAX_ANSWER_TOKENS, temperature=temperature, seed=seed)
            written = desk.write(prompt_ids, sampling)
            decode_s += written.decode_s
            for tally in tallies:
                replay(drafter, desk.page_ids, written, tally)
        decode_ms = 1000.0 * statistics.median(decode_s)
        reports = [tally.report() for tally in tallies]
        title = f"{arguments.drafter}, temperature {temperature}: {len(all_prompts)} messages, step {decode_ms:.2f} ms"
        print_report(reports, title, console)
        line = {"drafter": arguments.drafter, "temperature": temperature, "decode_ms": decode_ms, "trees": reports}
        print(json.dumps(line | {"machine": describe_machine()}))


if __name__ == "__main__":
    main()
