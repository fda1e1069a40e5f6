"""Speculative == plain, token by token, over trees of 1 to 32 nodes and 1 to 7 levels: accepted and not, fresh and
resumed at every offset of a page, alone and together; random weights of both recurrent kinds, and the bundled model.

TURNKEEP_SPECULATION_SEEDS raises the number of random workloads: 9 are more than 20,000 tokens of each model, greedy,
and as many sampled.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from functools import cache
from typing import Literal

import pytest
from engine_builders import VOCAB_SIZE, LoopBench, make_demo_loop, make_drafting_loop, make_loop, submit
from order_desk_prompts import order_desk_prompts
from scripted_drafter import ScriptedDrafter

from turnkeep.engine.messages import EndTurn
from turnkeep.models.tiny import TinyKind
from turnkeep.scheduler.speculation_config import SpeculationConfig

SEEDS = range(int(os.environ.get("TURNKEEP_SPECULATION_SEEDS", "1")))
PAGE_SIZE = 8
NUM_NEW = 24
DEMO_NUM_NEW = NUM_NEW if len(SEEDS) > 1 else 9
DEMO_VOCAB_SIZE = 1280
LIMITS = SpeculationConfig(max_draft_len=7, dynamic_tree_max_topk=31, max_total_draft_tokens=31)
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}

Kind = TinyKind | Literal["demo"]
Prompts = dict[str, list[int]]

Sampled = pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
Together = pytest.mark.parametrize("together", [False, True], ids=["alone", "eight"])
Seeds = pytest.mark.parametrize("seed", SEEDS)


def run(bench: LoopBench, prompts: Prompts, num_new: int, *, together: bool, sampled: bool) -> Prompts:
    for name, prompt in prompts.items():
        bench.loop.receive(
            submit(
                name,
                prompt,
                num_new,
                boundaries=[(len(prompt), "turn_start")],
                conversation_id=name[1:],
                **(SAMPLED if sampled else {}),
            )
        )
        if not together:
            bench.run()
    bench.run()
    for name in prompts:
        bench.loop.receive(EndTurn(name, 1 << 30))
    return {name: bench.tokens(name) for name in prompts}


def first_prompts(kind: Kind, seed: int) -> list[list[int]]:
    """Eight that end at every offset of a page."""
    if kind == "demo":
        own = order_desk_prompts(PAGE_SIZE * (seed + 1))[PAGE_SIZE * seed :]
        return [prompt[: len(prompt) - (len(prompt) - index) % PAGE_SIZE] for index, prompt in enumerate(own)]
    chance = random.Random(seed)
    return [[chance.randrange(3, VOCAB_SIZE) for _ in range(11 + offset)] for offset in range(PAGE_SIZE)]


@cache
def plain_turns(kind: Kind, seed: int, num_new: int, sampled: bool) -> list[tuple[Prompts, Prompts]]:
    """Two turns of eight conversations, prompts and answers by name, with nothing cached or drafted."""
    plain = make_demo_loop(prefix_caching=False) if kind == "demo" else make_loop(kind, prefix_caching=False)
    prompts = {f"a{index}": prompt for index, prompt in enumerate(first_prompts(kind, seed))}
    assert sorted(len(prompt) % PAGE_SIZE for prompt in prompts.values()) == list(range(PAGE_SIZE))
    turns = []
    for turn in ("b", "c"):
        answers = run(plain, prompts, num_new, together=True, sampled=sampled)
        turns.append((prompts, answers))
        prompts = {f"{turn}{name[1:]}": [*prompts[name], *answer, 3, 4, 5] for name, answer in answers.items()}
    return turns


def whole(turns: list[tuple[Prompts, Prompts]]) -> dict[str, Sequence[int]]:
    return {name: [*prompt, *answers[name]] for prompts, answers in turns for name, prompt in prompts.items()}


def compare(drafting: LoopBench, turns: list[tuple[Prompts, Prompts]], num_new: int, **options: bool) -> None:
    for prompts, answers in turns:
        assert run(drafting, prompts, num_new, **options) == answers
    for name, prompt in turns[-1][0].items():  # all but the last sampled token, which was never fed, and the new ones
        assert drafting.finished(name).num_cached_tokens == len(prompt) - 4


@Seeds
@Sampled
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@Together
@pytest.mark.parametrize("kind", ["hybrid", "gated_delta"])
def test_speculative_tokens_are_the_plain_ones(
    kind: TinyKind, together: bool, right: float, sampled: bool, seed: int
) -> None:
    turns = plain_turns(kind, seed, NUM_NEW, sampled)
    drafting = make_drafting_loop(kind, ScriptedDrafter(whole(turns), VOCAB_SIZE, right=right, seed=seed), LIMITS)
    compare(drafting, turns, NUM_NEW, together=together, sampled=sampled)


@Seeds
@Sampled
@pytest.mark.parametrize("drafts", ["head", 0.0, 1.0])
@Together
def test_speculative_tokens_of_the_bundled_model_are_the_plain_ones(
    together: bool, drafts: Literal["head"] | float, sampled: bool, seed: int
) -> None:
    """Its trained head in trees of every size, and drafts that are never and always right."""
    turns = plain_turns("demo", seed, DEMO_NUM_NEW, sampled)
    drafter = "head" if drafts == "head" else ScriptedDrafter(whole(turns), DEMO_VOCAB_SIZE, right=drafts, seed=seed)
    drafting = make_demo_loop(drafter, LIMITS)
    compare(drafting, turns, DEMO_NUM_NEW, together=together, sampled=sampled)
    accepted = sum(drafting.finished(name).num_accepted_nodes for name in whole(turns))
    assert (accepted > 0) == (drafts != 0.0)
