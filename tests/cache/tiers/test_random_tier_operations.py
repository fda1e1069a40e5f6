"""Random operations with colder tiers below tiny pools: loads, damage and deaths between any two of them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cache_driver import MODEL_KINDS, CacheDriver, ModelKind, Run
from cache_machine import CacheMachine, conversations, index, roots, run_machine, tokens
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from tier_driver import AMPLE, TieredDriver

from turnkeep.cache.tiers import loader
from turnkeep.cache.tiers.offloader import QUIET_S
from turnkeep.cache.tiers.record import TierBudget

# TURNKEEP_TIER_EXAMPLES=600 gives each model kind about 36,000 operations.
NUM_EXAMPLES = int(os.environ.get("TURNKEEP_TIER_EXAMPLES", "25"))

budgets = st.sampled_from([AMPLE, AMPLE, TierBudget(2000, 2000), TierBudget(600, 1 << 20), TierBudget(0, 0)])


class TierMachine(CacheMachine):
    """The cache's machine, with a folder that outlives it. Every answer of a tier is checked by its content."""

    driver: TieredDriver

    @initialize(
        host=budgets,
        disk=budgets,
        has_disk=st.sampled_from([True, True, True, False]),
        slice_s=st.sampled_from([0.0, 1.0]),
    )
    def make_folder(self, host: TierBudget, disk: TierBudget, has_disk: bool, slice_s: float) -> None:
        """slice_s 0: what is loaded is handed over piece by piece, with other operations in between."""
        loader.SLICE_S = slice_s
        self.folder = Path(tempfile.mkdtemp())
        self.tier_options = {"host": host, "disk": disk, "has_disk": has_disk}
        if hasattr(self, "driver"):
            self.restart()

    def make_driver(self, **options: Any) -> CacheDriver:
        self.options = {**options, "prefix_caching": True}
        if not hasattr(self, "folder"):
            self.folder, self.tier_options = Path(tempfile.mkdtemp()), {"has_disk": True}
        return self.new_process()

    def new_process(self) -> TieredDriver:
        tiers = dict(self.tier_options)
        folder = self.folder if tiers.pop("has_disk") else None
        return TieredDriver(folder, self.kind, **tiers, **self.options)

    def restart(self) -> None:
        """Whatever ran is gone; the folder is as it is."""
        self.runs, self.matches, self.handles = [], [], []
        self.driver = self.new_process()

    # Out

    @rule(seconds=st.sampled_from([0.0, QUIET_S, 3 * QUIET_S]))
    def idle(self, seconds: float) -> None:
        self.driver.clock.now_s += seconds
        self.driver.tiers.use_idle_time(is_awaited=False)

    @rule(num_bytes=st.integers(0, 1500))
    def evict(self, num_bytes: int) -> None:
        self.driver.cache.trim(num_bytes)

    @rule(number=st.integers(1, 4))
    def something_ends_in_the_background(self, number: int) -> None:
        self.driver.background.run(number)
        self.driver.tiers.poll()

    # In

    @rule(which=index, keep=index, suffix=tokens, root=roots, conversation=conversations)
    def load(self, which: int, keep: int, suffix: list[int], root: str, conversation: str | None) -> None:
        self.bring(self.prompt(which, keep, suffix), root, conversation)

    @rule(which=index, conversation=conversations)
    def load_whole_history(self, which: int, conversation: str | None) -> None:
        self.bring([*self.histories[which % len(self.histories)], 1], "", conversation)

    @precondition(lambda self: len(self.runs) < 4)
    @rule(which=index, conversation=conversations)
    def wait_for_a_load_and_go_on(self, which: int, conversation: str | None) -> None:
        prompt = [*self.histories[which % len(self.histories)], 2]
        self.bring(prompt, "", conversation)
        self.driver.settle_background()
        self.open(self.driver.match(prompt), conversation)

    @rule()
    def what_is_handed_over_gives_way(self) -> None:
        self.driver.tiers.loader.give_way()

    def grow(self, run: Run, capacity: int) -> bool:
        if self.driver.tiers.loader.is_handing_over:  # what is there of it may be given up in vain
            return self.driver.cache.grow(run.seq, capacity)
        return super().grow(run, capacity)

    def bring(self, prompt: list[int], root: str, conversation: str | None) -> None:
        tiers = self.driver.tiers
        match = self.driver.match(prompt, root)
        cold = tiers.find(match)
        if cold is None:
            return
        assert match.num_tokens < cold.position < len(prompt)
        state = tiers.load(cold, match, conversation)
        after = self.driver.match(prompt, root).num_tokens
        assert after >= cold.position if state == "done" else True

    @rule(root=roots, conversation=st.sampled_from(["a", "b", "unknown"]))
    def expect(self, root: str, conversation: str) -> None:
        self.driver.tiers.expect(root, conversation)

    @rule(
        which=index,
        answer=tokens,
        conversation=conversations,
        way=st.sampled_from(["evict", "evict", "restart"]),
        expects=st.booleans(),
        lost=st.sampled_from([0, 0, 1, 5]),
        suffix=tokens,
    )
    def away_and_back(
        self,
        which: int,
        answer: list[int],
        conversation: str | None,
        way: str,
        expects: bool,
        lost: int,
        suffix: list[int],
    ) -> None:
        """What a tier is for: a conversation has a turn, is written, leaves the device, and its next turn comes."""
        self.whole_turn(which, 0, suffix, answer, [(1, "trunk"), (len(suffix), "turn_start")], conversation, lost)
        history = self.histories[-1]
        self.driver.idle()
        if way == "restart":
            self.restart()
        else:
            self.driver.cache.clear()
        if expects and conversation is not None:
            self.driver.tiers.expect("", conversation)
        prompt = [*history[: max(len(history) - lost, 0)], *suffix]
        self.bring(prompt, "", conversation)
        self.driver.settle_background()
        if len(self.runs) < 4:
            self.open(self.driver.match(prompt), conversation)

    # What a disk and a machine do

    @rule(which=index, how=st.sampled_from(["cut", "flip", "erase"]), at=index)
    def damage_a_file(self, which: int, how: str, at: int) -> None:
        files = sorted(self.folder.iterdir())
        if not files:
            return
        path = files[which % len(files)]
        content = bytearray(path.read_bytes())
        if how == "erase" or not content:
            path.unlink()
        elif how == "cut":
            path.write_bytes(content[: at % len(content)])
        else:
            content[at % len(content)] ^= 4
            path.write_bytes(content)

    @rule(number=st.integers(0, 6), often=st.integers(0, 2))
    def die_and_start_again(self, number: int, often: int) -> None:
        if often == 0:
            self.driver.background.run(number)
            self.restart()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.settle_background()
            super().teardown()
            self.driver.settle_background()
            shutil.rmtree(self.folder)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_any_order_of_operations_and_deaths_keeps_contents_and_counts(
    kind: ModelKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "MIN_LOAD_TOKENS", 1)
    monkeypatch.setattr(loader, "SLICE_S", loader.SLICE_S)
    monkeypatch.setattr("turnkeep.cache.tiers.takeover.PIECE_BYTES", 64)
    monkeypatch.setattr("turnkeep.cache.tiers.takeover.MAX_PIECE_PAGES", 2)
    monkeypatch.setattr("turnkeep.cache.tiers.offloader.RUN_BYTES", 64)
    monkeypatch.setattr("turnkeep.cache.tiers.offloader.IDLE_BYTES", 100)
    run_machine(TierMachine, kind, NUM_EXAMPLES)
