"""Scheduling never changes tokens: hit == cold, split == whole, batched == alone, suspended == not (demo model)."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from order_desk_prompts import order_desk_prompts
from stepped_engine import Outcome, SteppedEngine

from turnkeep.scheduler.request import SamplingParams

NUM_PROMPTS = 50
NUM_NEW_TOKENS = 12  # 50 prompts of 12 tokens: 600 compared tokens a test
MAX_LOGIT_DIFFERENCE = 1e-4


@cache
def prompts() -> list[list[int]]:
    return order_desk_prompts(NUM_PROMPTS)


@cache
def cold() -> list[Outcome]:
    """Each prompt alone, in one chunk, with nothing cached or drafted: what everything else must equal."""
    engine = SteppedEngine(speculation="off", prefix_caching=False, max_step_tokens=4096)
    outcomes = [engine.run([prompt], max_new_tokens=NUM_NEW_TOKENS)[0] for prompt in prompts()]
    cold_logits.update({index: engine.logits[outcome.request_id] for index, outcome in enumerate(outcomes)})
    return outcomes


cold_logits: dict[int, list[torch.Tensor]] = {}


def assert_same(outcomes: list[Outcome], engine: SteppedEngine) -> None:
    assert len(outcomes) == NUM_PROMPTS
    for index, (outcome, reference) in enumerate(zip(outcomes, cold(), strict=True)):
        assert outcome.token_ids == reference.token_ids, f"prompt {index}"
        for row, expected in zip(engine.logits[outcome.request_id], cold_logits[index], strict=True):
            assert (row - expected).abs().max().item() <= MAX_LOGIT_DIFFERENCE
    assert sum(len(outcome.token_ids) for outcome in outcomes) >= 512


@pytest.mark.parametrize("max_step_tokens", [7, 64])
def test_split_prefill_equals_whole(max_step_tokens: int) -> None:
    engine = SteppedEngine(prefix_caching=False, max_step_tokens=max_step_tokens)
    assert_same([engine.run([prompt], max_new_tokens=NUM_NEW_TOKENS)[0] for prompt in prompts()], engine)


def test_cache_hit_equals_cold() -> None:
    engine = SteppedEngine()
    generator = random.Random(1)
    hits = []
    for prompt in prompts():
        # Snapshots at arbitrary offsets; the second run resumes at the deepest one before the end.
        offsets = sorted(generator.sample(range(1, len(prompt)), 2))
        engine.run([prompt], max_new_tokens=3, boundaries=offsets)
        (hit,) = engine.run([prompt], max_new_tokens=NUM_NEW_TOKENS)
        assert hit.num_cached_tokens >= offsets[-1]
        hits.append(hit)
    assert_same(hits, engine)


def test_continued_conversation_equals_cold() -> None:
    engine = SteppedEngine()
    continued = []
    for prompt in prompts():
        cut = max(1, len(prompt) - 9)
        (first,) = engine.run([prompt[:cut]], max_new_tokens=1)
        (second,) = engine.run([prompt], max_new_tokens=NUM_NEW_TOKENS)
        assert second.num_cached_tokens >= cut - (first.token_ids[0] != prompt[cut])
        continued.append(second)
    assert_same(continued, engine)


def test_batch_of_eight_equals_alone() -> None:
    engine = SteppedEngine(max_step_tokens=96, max_running=8)
    outcomes = []
    for start in range(0, NUM_PROMPTS, 8):
        outcomes += engine.run(prompts()[start : start + 8], max_new_tokens=NUM_NEW_TOKENS)
    assert_same(outcomes, engine)


def test_suspended_equals_not_suspended() -> None:
    # Long answers outgrow what admission sets aside for each, in a pool for little more than one of them.
    chosen = sorted(prompts(), key=len)[:8]
    num_new_tokens = 120
    ample = SteppedEngine(speculation="off", prefix_caching=False, max_step_tokens=4096)
    alone = [ample.run([prompt], max_new_tokens=num_new_tokens)[0] for prompt in chosen]
    longest = max(len(prompt) for prompt in chosen) + num_new_tokens
    tight = SteppedEngine(num_pages=longest // 16 + 10, num_state_rows=9, max_running=6, max_step_tokens=64)
    outcomes = tight.run(chosen, max_new_tokens=num_new_tokens)
    assert sum(outcome.finished.num_suspensions for outcome in outcomes if outcome.finished) > 0
    assert [outcome.token_ids for outcome in outcomes] == [outcome.token_ids for outcome in alone]


def drafting_engine(**options: object) -> SteppedEngine:
    """Everything that the draft head proposes is verified, whatever it costs."""
    engine = SteppedEngine(speculation="mtp", **options)
    engine.loop._scheduler._drafting._budget = None
    return engine


def test_drafts_of_the_models_own_head_equal_plain_decoding() -> None:
    engine = drafting_engine(prefix_caching=False)
    assert_same([engine.run([prompt], max_new_tokens=NUM_NEW_TOKENS)[0] for prompt in prompts()], engine)
    assert engine.loop.stats().counters["num_steps"] < 0.6 * NUM_PROMPTS * NUM_NEW_TOKENS


def test_copies_from_the_prompt_equal_plain_decoding_cold_and_resumed() -> None:
    engine = SteppedEngine(speculation="ngram")
    engine.loop._scheduler._drafting._budget = None
    for _ in range(2):
        runs = [engine.run([prompt], max_new_tokens=NUM_NEW_TOKENS, boundaries=[61])[0] for prompt in prompts()]
        assert_same(runs, engine)
    assert sum(run.num_cached_tokens for run in runs) > 0
    counters = engine.loop.stats().counters
    assert counters["num_steps"] < counters["num_generated_tokens"]


def test_drafts_of_eight_conversations_and_of_resumed_ones_equal_plain_decoding() -> None:
    engine = drafting_engine(max_running=8)
    for turn in range(2):
        outcomes = []
        for start in range(0, NUM_PROMPTS, 8):
            together = prompts()[start : start + 8]
            outcomes += engine.run(together, max_new_tokens=NUM_NEW_TOKENS, boundaries=[61 + turn])
        assert_same(outcomes, engine)
    assert sum(outcome.num_cached_tokens for outcome in outcomes) > 61 * NUM_PROMPTS // 2


def test_sampled_tokens_do_not_depend_on_scheduling() -> None:
    sampling = SamplingParams(
        max_new_tokens=NUM_NEW_TOKENS, temperature=1.0, top_p=0.95, top_k=40, seed=7, ignore_eos=True
    )
    whole = SteppedEngine(speculation="off", prefix_caching=False, max_step_tokens=4096)
    alone = [whole.run([prompt], sampling=sampling)[0] for prompt in prompts()]
    mixed = SteppedEngine(max_step_tokens=50, max_running=8)
    together = mixed.run(prompts(), sampling=sampling)
    again = mixed.run(prompts(), sampling=sampling)
    assert [outcome.token_ids for outcome in together] == [outcome.token_ids for outcome in alone]
    assert [outcome.token_ids for outcome in again] == [outcome.token_ids for outcome in alone]
    drafted = drafting_engine(max_running=8).run(prompts(), sampling=sampling)
    assert [outcome.token_ids for outcome in drafted] == [outcome.token_ids for outcome in alone]
