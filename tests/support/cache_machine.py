"""Random operations in tiny pools: conservation, contents and matches are checked after every one of them."""

from __future__ import annotations

import os
from typing import Any

from cache_driver import CacheDriver, ModelKind, Run
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from turnkeep.cache.boundary import BoundaryKind
from turnkeep.cache.cache_manager import PrefixMatch, TurnHandle
from turnkeep.cache.encoded_tokens import EncodedTokens

# TURNKEEP_CACHE_EXAMPLES=1000 gives each model kind about 60,000 operations.
NUM_EXAMPLES = int(os.environ.get("TURNKEEP_CACHE_EXAMPLES", "60"))
NUM_OPERATIONS = 60

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=20)
conversations = st.sampled_from([None, "a", "b"])
roots = st.sampled_from(["", "tenant"])
kinds: st.SearchStrategy[BoundaryKind] = st.sampled_from(["trunk", "turn_start", "turn_start", "declared"])
index = st.integers(0, 1000)


class CacheMachine(RuleBasedStateMachine):
    """The life of many sequences, in every order that the contract allows."""

    kind: ModelKind = "hybrid"

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        num_rows=st.sampled_from([6, 9, 4, 2, 1]),
        num_pages=st.integers(6, 40),
        prefix_caching=st.sampled_from([True, True, True, True, False]),
        max_branches=st.integers(1, 3),
        idle_ttl_s=st.sampled_from([0.0, 0.0, 20.0]),
    )
    def make_cache(
        self,
        page_size: int,
        num_rows: int,
        num_pages: int,
        prefix_caching: bool,
        max_branches: int,
        idle_ttl_s: float,
    ) -> None:
        self.driver = self.make_driver(
            page_size=page_size,
            num_pages=max(num_pages * 4 // page_size, 3),  # about as many tokens for each page size
            num_rows=num_rows,
            prefix_caching=prefix_caching,
            max_branches=max_branches,
            idle_ttl_s=idle_ttl_s,
        )
        self.runs: list[Run] = []
        self.matches: list[PrefixMatch] = []
        self.handles: list[tuple[TurnHandle, int]] = []
        self.histories: list[list[int]] = [[0, 1, 2, 0, 1]]

    def make_driver(self, **options: Any) -> CacheDriver:
        return CacheDriver(self.kind, **options)

    @rule(seconds=st.sampled_from([0.0, 3.0, 30.0, 1e6]))
    def ask_to_keep(self, seconds: float) -> None:
        self.driver.retention_s = seconds

    # Starting

    def prompt(self, which: int, keep: int, suffix: list[int]) -> list[int]:
        """A part of something that ran before, and then something new."""
        history = self.histories[which % len(self.histories)]
        return [*history[: keep % (len(history) + 1)], *suffix]

    @rule(which=index, keep=index, suffix=tokens, root=roots, conversation=conversations, is_encoded=st.booleans())
    def find(
        self, which: int, keep: int, suffix: list[int], root: str, conversation: str | None, is_encoded: bool
    ) -> None:
        """Whatever the tag, and in whatever form the tokens are: what is found is what is there."""
        prompt = self.prompt(which, keep, suffix)
        before = self.picture()
        match = self.driver.match(EncodedTokens(prompt) if is_encoded else prompt, root, conversation)
        assert self.picture() == before
        if match.known_pages is not None and match.path is not None:
            known = match.known_pages[: match.path.end // self.driver.page_size].tolist()
            assert match.path.page_path()[: len(known)] == known
        assert (match.num_tokens, match.num_matched_tokens) == self.driver.expect_match(prompt, root)
        assert match.num_tokens <= match.num_matched_tokens < len(prompt)
        self.matches = [*self.matches[-3:], match]

    @precondition(lambda self: self.matches and len(self.runs) < 4)
    @rule(which=index, conversation=conversations)
    def open_earlier_match(self, which: int, conversation: str | None) -> None:
        self.open(self.matches[which % len(self.matches)], conversation)

    @precondition(lambda self: len(self.runs) < 4)
    @rule(which=index, keep=index, suffix=tokens, root=roots, conversation=conversations)
    def open_prompt(self, which: int, keep: int, suffix: list[int], root: str, conversation: str | None) -> None:
        self.open(self.driver.match(self.prompt(which, keep, suffix), root, conversation), conversation)

    @precondition(lambda self: len(self.runs) < 4)
    @rule(which=index, conversation=conversations)
    def resume_whole_history(self, which: int, conversation: str | None) -> None:
        history = self.histories[which % len(self.histories)]
        self.open(self.driver.match([*history, 1], "", conversation), conversation)

    def open(self, match: PrefixMatch, conversation: str | None) -> None:
        cache = self.driver.cache
        before = self.picture()
        capacity = len(match.token_ids)
        fits = cache.can_provide(cache.num_new_pages(match, capacity), 1, match)
        assert self.picture() == before
        run = self.driver.open_match(match, conversation)
        if run is None:
            assert not fits
            assert self.picture() == before
            return
        if fits:
            assert cache.grow(run.seq, capacity), "can_provide promised the pages"
        self.runs.append(run)

    @rule(
        which=index,
        lost=st.sampled_from([0, 0, 0, 1, 2, 5]),
        suffix=tokens,
        answer=tokens,
        boundaries=st.lists(st.tuples(st.integers(1, 12), kinds), max_size=3),
        conversation=conversations,
        stable=st.sampled_from([0, 0, 0, 1, 4, None]),
    )
    def whole_turn(
        self,
        which: int,
        lost: int,
        suffix: list[int],
        answer: list[int],
        boundaries: list[tuple[int, BoundaryKind]],
        conversation: str | None,
        stable: int | None,
    ) -> None:
        """What really happens most: a history goes on, gets an answer, and its end is judged."""
        history = self.histories[which % len(self.histories)]
        prompt = [*history[: max(len(history) - lost, 0)][:36], *suffix]
        run = self.driver.open(prompt, conversation)
        if run is None:
            return
        start = run.seq.num_computed_tokens
        wanted = [(start + offset, kind) for offset, kind in boundaries if start + offset <= len(prompt)]
        self.runs.append(run)
        run.token_ids += answer
        for num_tokens, exports in ((len(prompt) - start, wanted), (len(answer) - 1, [])):
            if not self.grow(run, run.seq.num_computed_tokens + num_tokens):
                return
            assert self.driver.step(run, num_tokens, exports)
            self.driver.publish(run)
        self.take(len(self.runs) - 1)
        handle = self.driver.cache.finish(run.seq, run.token_ids, keep_turn_end=True)
        if handle is not None and stable is not None:
            self.driver.cache.end_turn(handle, len(run.token_ids) - 1 - stable)

    @rule(which=index, keep=index, suffix=tokens, conversation=conversations, is_interrupted=st.booleans())
    def prepare(self, which: int, keep: int, suffix: list[int], conversation: str | None, is_interrupted: bool) -> None:
        """Idle time: a prefix is computed for nobody, wholly or as far as it comes."""
        cache = self.driver.cache
        prefix = self.prompt(which, keep, suffix)
        before = cache.stats().counters
        run = self.driver.open_match(self.driver.match(prefix, "", conversation), conversation, is_preparation=True)
        after = cache.stats().counters
        assert (after.num_opens, after.num_hits, after.num_reused_tokens) == (
            before.num_opens,
            before.num_hits,
            before.num_reused_tokens,
        )
        if run is None:
            return
        self.runs.append(run)
        if not self.grow(run, len(prefix) - is_interrupted):
            return
        assert self.driver.step(run, len(prefix) - is_interrupted - run.seq.num_computed_tokens)
        self.take(len(self.runs) - 1)
        if is_interrupted:
            cache.suspend(run.seq, run.token_ids)
        else:
            cache.finish_preparation(run.seq, run.token_ids)
            if cache.prefix_caching:
                assert self.driver.match([*prefix, 1], "", conversation).num_tokens == len(prefix)

    @rule(prompt=tokens)
    def alone_everything_that_fits_is_admitted(self, prompt: list[int]) -> None:
        """With nothing open, a cold match of whatever fits in the pools can be opened and grown."""
        cache = self.driver.cache
        if self.runs or cache.pages_for(len(prompt)) > cache.stats().num_pages:
            return
        run = self.driver.open_match(cache.cold_match("", prompt))
        assert run is not None
        assert cache.grow(run.seq, len(prompt))
        self.runs.append(run)

    # Working

    @precondition(lambda self: self.runs)
    @rule(
        which=index,
        num_tokens=st.integers(1, 12),
        exports=st.lists(st.tuples(st.integers(1, 12), kinds), max_size=3),
        new_tokens=tokens,
        publishes=st.booleans(),
    )
    def step(
        self,
        which: int,
        num_tokens: int,
        exports: list[tuple[int, BoundaryKind]],
        new_tokens: list[int],
        publishes: bool,
    ) -> None:
        run = self.runs[which % len(self.runs)]
        if not run.num_left:
            run.token_ids += new_tokens  # generated in the meantime
        num_tokens = min(num_tokens, run.num_left)
        start = run.seq.num_computed_tokens
        wanted = [(start + offset, kind) for offset, kind in exports if offset <= num_tokens]
        if not self.grow(run, start + num_tokens):
            return
        assert self.driver.step(run, num_tokens, wanted)
        if publishes:
            self.driver.publish(run)

    @precondition(lambda self: self.runs)
    @rule(which=index, num_tokens=st.integers(1, 30))
    def grow_far(self, which: int, num_tokens: int) -> None:
        run = self.runs[which % len(self.runs)]
        self.grow(run, run.seq.num_computed_tokens + num_tokens)

    def grow(self, run: Run, capacity: int) -> bool:
        cache = self.driver.cache
        before = self.picture()
        has_grown = cache.grow(run.seq, capacity)
        if not has_grown:
            assert self.picture() == before
            is_alone = len(self.runs) == 1 and run.seq not in cache._copies
            assert not (is_alone and cache.pages_for(capacity) <= cache.stats().num_pages), (
                "alone, all pages are its own"
            )
        return has_grown

    @precondition(lambda self: self.runs)
    @rule(which=index, offset=st.integers(1, 8), kind=kinds)
    def reserve_without_a_step(self, which: int, offset: int, kind: BoundaryKind) -> None:
        run = self.runs[which % len(self.runs)]
        position = run.seq.num_computed_tokens + offset
        if position <= len(run.token_ids):
            self.driver.reserve(run, position, kind)

    @precondition(lambda self: self.runs)
    @rule(which=index)
    def commit(self, which: int) -> None:
        run = self.runs[which % len(self.runs)]
        self.driver.cache.commit(run.seq, run.token_ids)

    @precondition(lambda self: self.runs)
    @rule(which=index)
    def publish(self, which: int) -> None:
        self.driver.publish(self.runs[which % len(self.runs)])

    @rule()
    def drain(self) -> None:
        self.driver.run_copies()

    # Ending

    def take(self, which: int) -> Run:
        run = self.runs.pop(which % len(self.runs))
        computed = run.token_ids[: run.seq.num_computed_tokens]
        if computed and run.cache_root == "":
            self.histories = [*self.histories[-7:], computed]
        return run

    @precondition(lambda self: self.runs)
    @rule(which=index, keeps=st.sampled_from([True, True, True, False]))
    def finish(self, which: int, keeps: bool) -> None:
        run = self.take(which)
        position = run.seq.num_computed_tokens
        handle = self.driver.cache.finish(run.seq, run.token_ids, keep_turn_end=keeps)
        if handle is not None:
            self.handles.append((handle, position))

    @precondition(lambda self: self.handles)
    @rule(which=index, change=st.integers(-3, 3))
    def end_turn(self, which: int, change: int) -> None:
        """Late, early, again, with any opinion on what is stable."""
        handle, position = self.handles[which % len(self.handles)]
        self.driver.cache.end_turn(handle, position + change)

    @precondition(lambda self: self.runs)
    @rule(which=index)
    def suspend(self, which: int) -> None:
        run = self.take(which)
        self.driver.cache.suspend(run.seq, run.token_ids)

    @precondition(lambda self: self.runs)
    @rule(which=index, again=st.booleans())
    def abort(self, which: int, again: bool) -> None:
        run = self.take(which)
        self.driver.cache.close(run.seq)
        if again:
            self.driver.cache.close(run.seq)

    @rule(root=roots, conversation=st.sampled_from(["a", "b", "unknown"]))
    def close_conversation(self, root: str, conversation: str) -> None:
        self.driver.cache.close_conversation(root, conversation)

    @rule(often=st.integers(0, 7))
    def clear(self, often: int) -> None:
        if often == 0:
            self.driver.cache.clear()
            if not self.runs:
                self.driver.assert_empty()

    # Always

    def picture(self) -> object:
        """What a call that fails must leave alone."""
        stats = self.driver.cache.stats()
        return (
            stats.num_free_pages,
            stats.num_free_rows,
            stats.num_evictable_pages,
            stats.num_evictable_rows,
            stats.num_tree_pages,
            stats.num_snapshots,
            stats.counters.evicted_snapshots,
            stats.counters.num_evicted_pages,
            stats.num_branches,
        )

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.check()
        for run in self.runs:
            if run.seq not in self.driver.cache._copies:
                self.driver.verify(run)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            for run in self.runs:
                self.driver.cache.close(run.seq)
            self.driver.run_copies()
            self.driver.check()
            self.driver.assert_empty()


def run_machine(machine: type[CacheMachine], kind: ModelKind, num_examples: int = NUM_EXAMPLES) -> None:
    """Random operations on a model kind; the failing ones are printed so that they can be repeated."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        type("Machine", (machine,), {"kind": kind}),
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=NUM_OPERATIONS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
