"""Faults that users of hybrid models reported of speculation together with prefix caches: crashes, hangs and leaks.

40, 42 resume at every offset of a page while drafting, short drafts and long ones; 41 a position that is computed with
another page size than the state's; 43 what was matched is evicted before it is used; 44 one token left to prefill; 45 a
request near the limit of the pool that is prefilled and put back for ever.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from engine_builders import VOCAB_SIZE, LoopBench, make_drafting_loop, make_loop, submit
from scripted_drafter import ScriptedDrafter

from turnkeep.engine.messages import EndTurn
from turnkeep.models.tiny import TinyKind
from turnkeep.scheduler.speculation_config import SpeculationConfig

KINDS: tuple[TinyKind, ...] = ("hybrid", "gated_delta")
PAGE_SIZE = 8
SHORT, LONG = SpeculationConfig(3, 4, 9), SpeculationConfig(15, 2, 30)
NUM_TOKENS = 60


def prompt_of(length: int) -> list[int]:
    chance = random.Random(length)
    return [chance.randrange(3, VOCAB_SIZE) for _ in range(length)]


@cache
def continuation(kind: TinyKind, length: int) -> list[int]:
    """The prompt of a length and what follows it."""
    bench = make_loop(kind, prefix_caching=False)
    bench.loop.receive(submit("r", prompt_of(length), NUM_TOKENS))
    bench.run()
    return [*prompt_of(length), *bench.tokens("r")]


class EveryRequest(dict[str, list[int]]):
    """The same truth under every name but those given."""

    def __init__(self, whole: list[int], **others: list[int]) -> None:
        super().__init__(others)
        self._whole = whole

    def __missing__(self, name: str) -> list[int]:
        return self._whole


def drafting(
    kind: TinyKind, whole: list[int], limits: SpeculationConfig, *, sibling: list[int] | None = None, **settings: Any
) -> LoopBench:
    drafter = ScriptedDrafter(EveryRequest(whole, sibling=sibling or []), VOCAB_SIZE, right=0.7)
    return make_drafting_loop(kind, drafter, limits, **{"page_size": PAGE_SIZE, **settings})


def generate(bench: LoopBench, name: str, known: list[int], num_tokens: int, **options: Any) -> list[int]:
    bench.loop.receive(submit(name, known, num_tokens, conversation_id="c", **options))
    bench.run()
    bench.loop.receive(EndTurn(name, 1 << 30))
    bench.loop._scheduler._cache.check()
    return bench.tokens(name)


@pytest.mark.parametrize("limits", [SHORT, LONG], ids=["40_short_drafts", "42_long_drafts"])
@pytest.mark.parametrize("kind", KINDS)
def test_40_42_drafting_goes_on_from_every_offset_of_a_page(kind: TinyKind, limits: SpeculationConfig) -> None:
    whole = continuation(kind, 13)
    bench = drafting(kind, whole, limits)
    for offset in range(PAGE_SIZE + 1):
        end = 13 + 8 + offset
        assert generate(bench, f"first{offset}", whole[:13], end - 13) == whole[13:end]
        # One token further than what the first turn left behind, so that it is resumed exactly there.
        assert generate(bench, f"next{offset}", whole[:end], 12) == whole[end : end + 12]
        assert bench.finished(f"next{offset}").num_cached_tokens == end - 1
    # All offsets at once, from what is cached.
    for offset in range(PAGE_SIZE):
        bench.loop.receive(submit(f"all{offset}", whole[: 21 + offset], 9))
    bench.run()
    for offset in range(PAGE_SIZE):
        assert bench.tokens(f"all{offset}") == whole[21 + offset : 30 + offset]
    assert sum(bench.finished(f"all{offset}").num_cached_tokens for offset in range(PAGE_SIZE)) > 0


@pytest.mark.parametrize("page_size", [1, 3, 7, 16, 64])
def test_41_no_page_size_changes_tokens_or_what_is_reused(page_size: int) -> None:
    whole = continuation("hybrid", 21)
    prompt = [*whole[:10], 5, 6]
    sibling = [*prompt, *generate(make_loop("hybrid"), "sibling", prompt, 9)]
    bench = drafting("hybrid", whole, SHORT, sibling=sibling, page_size=page_size, num_pages=20 + 800 // page_size)
    assert generate(bench, "first", whole[:21], 17, boundaries=[(10, "trunk")]) == whole[21:38]
    assert generate(bench, "next", whole[:38], 15) == whole[38:53]
    assert bench.finished("next").num_cached_tokens == 37
    assert generate(bench, "sibling", prompt, 9) == sibling[12:]
    assert bench.finished("sibling").num_cached_tokens == 10


@pytest.mark.parametrize("kind", KINDS)
def test_43_what_was_matched_may_be_evicted_before_it_is_used(kind: TinyKind) -> None:
    whole = continuation(kind, 13)
    bench = drafting(kind, whole, SHORT)
    cache_manager = bench.loop._scheduler._cache
    generate(bench, "first", whole[:13], 17)
    found = cache_manager.match("", whole[:30], "c")
    assert found.num_tokens == 29
    cache_manager.clear()
    sequence = cache_manager.open(found, whole[:30], conversation_id="c")
    assert sequence is not None
    assert sequence.num_computed_tokens == 0, "a match that went stale is found again"
    cache_manager.close(sequence)
    bench.loop.receive(submit("next", whole[:30], 12, conversation_id="c"))
    cache_manager.clear()  # between the request's arrival and its admission
    bench.run()
    assert bench.tokens("next") == whole[30:42]
    cache_manager.check()


@pytest.mark.parametrize("num_beside", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_44_a_prompt_of_one_token_more_than_its_pages_is_no_decode(kind: TinyKind, num_beside: int) -> None:
    """One token is left after the cached ones, or after a chunk: computed with others that verify drafts."""
    length = 3 * PAGE_SIZE + 1
    whole = continuation(kind, length)
    bench = drafting(kind, whole, SHORT, max_step_tokens=PAGE_SIZE + 6 * num_beside)
    for number in range(num_beside):
        message = submit(f"beside{number}", whole[:length], 30)
        message.cache_root = f"other {number}"
        bench.loop.receive(message)
        bench.loop.step()
    assert generate(bench, "cold", whole[:length], 9, boundaries=[(length - 1, "turn_start")]) == whole[length:][:9]
    assert generate(bench, "hit", whole[:length], 9) == whole[length : length + 9]
    assert bench.finished("hit").num_cached_tokens == length - 1
    for number in range(num_beside):
        assert bench.tokens(f"beside{number}") == whole[length : length + 30]


def test_45_what_is_admitted_ends_and_what_can_never_fit_is_refused_at_once() -> None:
    whole = continuation("hybrid", 13)
    bench = drafting("hybrid", whole, LONG, num_pages=7, num_state_rows=6, max_running=4, max_model_len=40)
    fits = 40 - 13  # five pages of the six that may be used
    for name, num_tokens in (("fits", fits), ("too long", fits + 1), ("beside", fits), ("short", 9)):
        bench.loop.receive(submit(name, whole[:13], num_tokens))
    refused = bench.finished("too long")
    assert refused.reason == "refused"
    assert "41 tokens together, max_model_len is 40" in (refused.message or "")
    bench.run(max_steps=4 * NUM_TOKENS)
    for name in ("fits", "beside", "short"):
        assert bench.finished(name).reason == "length"
        assert bench.tokens(name) == whole[13:][: len(bench.tokens(name))]
    assert bench.finished("fits").num_suspensions == 0, "the oldest never gives way"
    bench.loop._scheduler._cache.check()
    pools = bench.loop._scheduler._cache.stats()
    assert bench.loop._scheduler._cache.can_provide(pools.num_pages, pools.num_rows)
