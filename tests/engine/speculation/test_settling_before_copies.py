"""Whatever copies pages out of a sequence, or into the pages of one that is gone, finds its draft entries made: what
was put off is never missing in a copy, and never written over one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_builders import LoopBench, make_demo_loop, submit

from turnkeep.cache.config import CacheConfig
from turnkeep.cache.copies import PageCopy, RowCopy
from turnkeep.cache.tiers.config import TierConfig
from turnkeep.engine.messages import Abort, EndTurn, Shutdown
from turnkeep.scheduler.drafts import TreeGrant
from turnkeep.scheduler.step_plan import StepOutput, StepPlan

PAGE_SIZE = 8
PROMPT = [300 + token for token in range(61)]
NUM_NEW = 11
NUM_LATE = 7  # slots of the last page, all of them of decoded tokens


class WatchedPages:
    """A loop in which nothing is drafted, and the draft entries that it copies and computes with.

    at_once: entries are made with every token, as they are where drafts could grow.
    """

    def __init__(self, *, at_once: bool = False, **settings: object) -> None:
        self.bench: LoopBench = make_demo_loop("head", num_pages=400, **settings)  # type: ignore[arg-type]
        self.bench.loop._scheduler._drafting.grant = lambda running: TreeGrant(0, 0, 0, 0) if at_once else None
        runner = self.bench.loop._runner
        self._storage, self._run, self._copy = runner._storage, runner.run, runner._storage.apply_copies
        self.copied: list[torch.Tensor] = []  # entries [layers, 2, slots, ...] of each copied page
        self.pages: dict[str, list[int]] = {}
        self.num_missing_before = 0  # of the entries that a step copied, before it began
        runner.run, self._storage.apply_copies = self._watched_run, self._watched_copy

    def entries(self, page: int, num_slots: int = PAGE_SIZE) -> torch.Tensor:
        return torch.stack([pool[:, page, :num_slots] for pool in self._storage.tensors.kv[-1:]])

    def entries_of(self, request_id: str, end: int) -> torch.Tensor:
        """Of the positions [1, end) of a sequence: [layers, 2, positions, ...]."""
        self.bench.loop._runner.settle(())
        pages = [self.entries(page) for page in self.pages[request_id]]
        return torch.cat(pages, dim=2)[:, :, 1:end]

    def answer(self, request_id: str, prompt: Sequence[int], num_new: int = NUM_NEW) -> list[int]:
        """A whole turn, up to its end."""
        self.begin(request_id, prompt, num_new)
        self.bench.run()
        self.bench.loop.receive(EndTurn(request_id, 1 << 30))
        return self.bench.tokens(request_id)

    def begin(self, request_id: str, prompt: Sequence[int], num_new: int = NUM_NEW) -> None:
        self.bench.loop.receive(submit(request_id, prompt, num_new, ignore_eos=True, conversation_id=request_id))

    def _watched_run(self, plan: StepPlan) -> StepOutput:
        for copy in plan.page_copies:
            self.num_missing_before += num_missing(self.entries(copy.source, copy.num_tokens))
        for item in plan.items:
            self.pages[item.request_id] = item.page_ids.tolist()
        return self._run(plan)

    def _watched_copy(self, page_copies: Sequence[PageCopy], row_copies: Sequence[RowCopy]) -> None:
        self.copied += [self.entries(copy.source, copy.num_tokens).clone() for copy in page_copies]
        self._copy(page_copies, row_copies)


def num_missing(entries: torch.Tensor) -> int:
    """Slots with nothing in them: pools are full of zeros at first."""
    return int((entries == 0).flatten(3).all(-1).all(1).sum())


@pytest.fixture(scope="module")
def plain() -> WatchedPages:
    """The same turns, where every entry is made at once."""
    return WatchedPages(at_once=True)


def test_a_page_is_copied_with_the_entries_that_were_put_off(plain: WatchedPages) -> None:
    watched = WatchedPages()
    answer = watched.answer("a", PROMPT)
    go_on(watched, answer, "bc")  # the second cannot write on in the same page
    assert watched.num_missing_before == NUM_LATE
    assert sum(entries.shape[2] for entries in watched.copied) == NUM_LATE
    assert [num_missing(entries) for entries in watched.copied] == [0] * len(watched.copied)
    assert_as_at_once(watched, "bc", plain, answer)


def test_entries_that_were_put_off_are_not_written_into_a_page_that_others_have_by_now(plain: WatchedPages) -> None:
    watched = WatchedPages()
    answer = watched.answer("a", PROMPT)
    watched.begin("gone", [7, *PROMPT], 30)
    for _ in range(20):
        watched.bench.loop.step()
    last_page = watched.pages["gone"][-1]
    watched.bench.loop.receive(Abort("gone"))
    go_on(watched, answer, "bcd")
    assert last_page in {page for name in "bcd" for page in watched.pages[name]}
    assert_as_at_once(watched, "bcd", plain, answer)


def test_a_conversation_is_saved_with_the_entries_that_were_put_off(plain: WatchedPages, tmp_path: Path) -> None:
    cache = CacheConfig(tiers=TierConfig(folder=str(tmp_path), disk_bytes=64 << 20))
    first = WatchedPages(cache=cache, fingerprint=b"demo")
    answer = first.answer("a", PROMPT)
    assert num_missing(first.entries(first.pages["a"][-1], NUM_LATE)) == NUM_LATE
    first.bench.loop.receive(Shutdown())
    second = WatchedPages(cache=cache, fingerprint=b"demo")
    go_on(second, answer, "b")
    assert second.bench.finished("b").num_cached_tokens == len(PROMPT) + NUM_NEW - 1
    second.bench.loop.receive(Shutdown())
    assert_as_at_once(second, "b", plain, answer)


def next_prompt(name: str, answer: Sequence[int]) -> list[int]:
    """After the answer to PROMPT: for each name another one."""
    return [*PROMPT, *answer, ord(name), 4]


def go_on(watched: WatchedPages, answer: Sequence[int], names: str) -> None:
    """All of these at once."""
    for name in names:
        watched.begin(name, next_prompt(name, answer))
    watched.bench.run()


def assert_as_at_once(watched: WatchedPages, names: str, plain: WatchedPages, answer: Sequence[int]) -> None:
    """Tokens and entries are those of turns in which every entry was made at once."""
    end = len(PROMPT) + NUM_NEW + 2 + NUM_NEW - 1
    for name in names:
        if name not in plain.pages:
            plain.answer(name, next_prompt(name, answer))
        assert watched.bench.tokens(name) == plain.bench.tokens(name)
        expected = plain.entries_of(name, end)
        torch.testing.assert_close(watched.entries_of(name, end), expected, atol=2e-4, rtol=1e-3)
