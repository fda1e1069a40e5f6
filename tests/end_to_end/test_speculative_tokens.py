"""Speculative == plain, token by token, over trees of 1 to 32 nodes and 1 to 7 levels: accepted and not, fresh and
resumed at every offset of a page, alone and together.

TURNKEEP_SPECULATION_SEEDS raises the number of random workloads (7 are more than 20,000 tokens).
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
from engine_builders import VOCAB_SIZE, LoopBench, make_drafting_loop, make_loop, submit
from scripted_drafter import ScriptedDrafter

from turnkeep.engine.messages import EndTurn
from turnkeep.models.tiny import TinyKind
from turnkeep.scheduler.speculation_config import SpeculationConfig

SEEDS = range(int(os.environ.get("TURNKEEP_SPECULATION_SEEDS", "1")))
PAGE_SIZE = 8
NUM_NEW = 24
LIMITS = SpeculationConfig(max_draft_len=7, dynamic_tree_max_topk=31, max_total_draft_tokens=31)
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}


def run(
    bench: LoopBench, prompts: dict[str, list[int]], together: bool, sampling: dict[str, object]
) -> dict[str, list[int]]:
    for name, prompt in prompts.items():
        bench.loop.receive(
            submit(
                name, prompt, NUM_NEW, boundaries=[(len(prompt), "turn_start")], conversation_id=name[1:], **sampling
            )
        )
        if not together:
            bench.run()
    bench.run()
    for name in prompts:
        bench.loop.receive(EndTurn(name, 1 << 30))
    return {name: bench.tokens(name) for name in prompts}


def first_prompts(seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, VOCAB_SIZE) for _ in range(11 + offset)] for offset in range(PAGE_SIZE)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "eight"])
@pytest.mark.parametrize("kind", ["hybrid", "gated_delta"])
def test_speculative_tokens_are_the_plain_ones(
    kind: TinyKind, together: bool, right: float, sampling: dict[str, object], seed: int
) -> None:
    known: dict[str, Sequence[int]] = {}
    plain = make_loop(kind, prefix_caching=False)
    drafting = make_drafting_loop(kind, ScriptedDrafter(known, VOCAB_SIZE, right=right, seed=seed), LIMITS)
    prompts = {f"a{index}": prompt for index, prompt in enumerate(first_prompts(seed))}
    for turn in ("b", "c"):
        expected = run(plain, prompts, True, sampling)
        known |= {name: [*prompts[name], *output] for name, output in expected.items()}
        assert run(drafting, prompts, together, sampling) == expected
        if turn == "c":
            for name in prompts:  # all but the last sampled token, which was never fed, and the new ones
                assert drafting.finished(name).num_cached_tokens == len(prompts[name]) - 4
        prompts = {f"{turn}{name[1:]}": [*prompts[name], *output, 3, 4, 5] for name, output in expected.items()}
