"""Drives a cache manager with a model that has no arithmetic: cells and rows hold a running hash of the history.

Every read is checked against the hash of the sequence's own tokens, so a page shared wrongly, a copy that is missing
or came too late, and a page freed too early all show as a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from turnkeep.cache.boundary import BoundaryKind
from turnkeep.cache.cache_manager import CacheManager, PrefixMatch, SequenceCache, TurnHandle
from turnkeep.cache.config import CacheConfig
from turnkeep.cache.page_node import PageNode
from turnkeep.cache.policies import EvictionPolicyName
from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec
from turnkeep.cache.tiers.cold_tiers import ColdTiers

ModelKind = Literal["hybrid", "attention_only", "attention_free"]
MODEL_KINDS: tuple[ModelKind, ...] = ("hybrid", "attention_only", "attention_free")
_EMPTY = 17


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def cache_spec(kind: ModelKind = "hybrid", page_size: int = 4) -> CacheSpec:
    kv = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")
    state = StateSpec((StatePart("ssm", 1, (4,), "float32"),))
    return CacheSpec(page_size, kv if kind != "attention_free" else None, state if kind != "attention_only" else None)


def decode_tokens(key: bytes) -> list[int]:
    """The tokens of a tree key."""
    return [int(token_id) for token_id in np.frombuffer(key, ">u4")]


def running_hashes(token_ids: Sequence[int], history: int = _EMPTY) -> list[int]:
    """Hash of a history and of what it becomes with each further token."""
    hashes = [history]
    for token_id in token_ids:
        hashes.append((hashes[-1] * 1_000_003 + token_id + 1) % ((1 << 61) - 1))
    return hashes


class Run:
    """One sequence of the driver with the tokens that it knows."""

    def __init__(self, seq: SequenceCache, token_ids: list[int], conversation_id: str | None, cache_root: str) -> None:
        self.seq = seq
        self.token_ids = token_ids
        self.conversation_id = conversation_id
        self.cache_root = cache_root
        self.num_reused = seq.num_computed_tokens
        self.exports: dict[int, int] = {}  # position -> row, asked for and not yet published

    @property
    def num_left(self) -> int:
        return len(self.token_ids) - self.seq.num_computed_tokens


class CacheDriver:
    """A manager, a fake model's memory, and one call per thing a test wants to happen."""

    def __init__(
        self,
        kind: ModelKind = "hybrid",
        *,
        page_size: int = 4,
        num_pages: int = 64,
        num_rows: int = 16,
        prefix_caching: bool = True,
        max_branches: int = 4,
        eviction_policy: EvictionPolicyName = "density",
        idle_ttl_s: float = 0.0,
        config: CacheConfig | None = None,
        checks: bool = True,
        make_tiers: Callable[[CacheDriver], ColdTiers] | None = None,
    ) -> None:
        """`config` takes the place of the four settings before it."""
        self.kind = kind
        self.checks = checks  # False for big trees: a check looks at everything
        self.clock = FakeClock()
        self.page_size = page_size
        self.cells = [[0] * page_size for _ in range(num_pages + 1)]
        self.rows = [0] * (num_rows + 1)
        self.cache = CacheManager(
            cache_spec(kind, page_size),
            config
            or CacheConfig(
                prefix_caching=prefix_caching,
                max_branches=max_branches,
                eviction_policy=eviction_policy,
                idle_ttl_s=idle_ttl_s,
            ),
            num_pages=num_pages + 1,
            num_state_rows=num_rows + 1,
            clock=self.clock,
            tiers=None if make_tiers is None else make_tiers(self),
        )
        self.num_copies = 0
        self.retention_s = 0.0  # what clients ask for from now on

    # One sequence

    def match(self, token_ids: Sequence[int], cache_root: str = "", conversation_id: str | None = None) -> PrefixMatch:
        return self.cache.match(cache_root, token_ids, conversation_id)

    def open(self, token_ids: Sequence[int], conversation_id: str | None = None, *, cache_root: str = "") -> Run | None:
        """Match and open; None when there is no room."""
        return self.open_match(self.cache.match(cache_root, list(token_ids), conversation_id), conversation_id)

    def open_match(
        self, match: PrefixMatch, conversation_id: str | None = None, *, is_preparation: bool = False
    ) -> Run | None:
        self.clock.now_s += 1.0
        seq = self.cache.open(
            match,
            match.token_ids,
            conversation_id=conversation_id,
            retention_s=self.retention_s,
            is_preparation=is_preparation,
        )
        if seq is None:
            return None
        return Run(seq, [int(token_id) for token_id in match.token_ids], conversation_id, match.cache_root)

    def step(self, run: Run, num_tokens: int | None = None, exports: Sequence[tuple[int, BoundaryKind]] = ()) -> bool:
        """Grow, reserve, copy, compute, advance: the next tokens (all known ones when None). False: no room."""
        self.clock.now_s += 1.0
        seq = run.seq
        start = seq.num_computed_tokens
        end = len(run.token_ids) if num_tokens is None else start + num_tokens
        if not self.cache.grow(seq, end):
            return False
        for position, kind in exports:
            self.reserve(run, position, kind)
        self.run_copies()
        self.compute(run, end)
        return True

    def reserve(self, run: Run, position: int, kind: BoundaryKind) -> None:
        row = self.cache.reserve_export(run.seq, position, kind)
        if row is not None:
            run.exports[position] = row

    def compute(self, run: Run, end: int) -> None:
        """The forward pass of one sequence, then advance. Reads everything before, writes everything new."""
        seq = run.seq
        self.verify(run)
        hashes = running_hashes(run.token_ids)
        for position in range(seq.num_computed_tokens, end):
            if self.cache.has_pages:
                page = int(seq.page_ids[position // self.page_size])
                self.cells[page][position % self.page_size] = hashes[position + 1]
            if position + 1 in run.exports:
                self.rows[run.exports[position + 1]] = hashes[position + 1]
        if seq.state_row is not None:
            self.rows[seq.state_row] = hashes[end]
        self.cache.advance(seq, end - seq.num_computed_tokens)

    def publish(self, run: Run) -> None:
        self.cache.commit(run.seq, run.token_ids)
        self.cache.publish_exports(run.seq, run.token_ids)
        run.exports = {p: row for p, row in run.exports.items() if p > run.seq.num_computed_tokens}

    def run_copies(self) -> None:
        """Carry out what is planned, all reads before all writes, as a batched copy would."""
        page_copies, row_copies = self.cache.drain_copies()
        self.num_copies += len(page_copies)
        targets = [copy.target for copy in page_copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {copy.source for copy in page_copies}
        contents = [self.cells[copy.source][: copy.num_tokens] for copy in page_copies]
        states = [self.rows[copy.source] for copy in row_copies]
        for page_copy, content in zip(page_copies, contents, strict=True):
            self.cells[page_copy.target][: page_copy.num_tokens] = content
        for row_copy, state in zip(row_copies, states, strict=True):
            self.rows[row_copy.target] = state

    # Whole turns

    def turn(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        conversation_id: str | None = None,
        *,
        trunk: int | None = None,
        turn_start: int | None = None,
        stable_tokens: int | None = None,
        cache_root: str = "",
    ) -> Run:
        """One request from match to the end of its turn, the last answer token sampled and not computed.

        stable_tokens None: the next prompt repeats all of it; -1: the end of the turn is never told.
        """
        run = self.open(prompt, conversation_id, cache_root=cache_root)
        assert run is not None, "no room for the turn"
        boundaries: list[tuple[int, BoundaryKind]] = []
        if trunk is not None:
            boundaries.append((trunk, "trunk"))
        if turn_start is not None:
            boundaries.append((turn_start, "turn_start"))
        handle = self.finish_turn(run, answer, boundaries)
        self.settle(handle, len(run.token_ids) if stable_tokens is None else stable_tokens)
        return run

    def finish_turn(
        self, run: Run, answer: Sequence[int], boundaries: Sequence[tuple[int, BoundaryKind]] = ()
    ) -> TurnHandle | None:
        ahead = [(position, kind) for position, kind in boundaries if position > run.seq.num_computed_tokens]
        assert self.step(run, None, ahead), "no room for the prompt"
        self.publish(run)
        for token_id in answer[:-1]:
            run.token_ids.append(token_id)
            assert self.step(run, 1), "no room for the answer"
            self.cache.commit(run.seq, run.token_ids)
        run.token_ids += answer[-1:]
        handle = self.cache.finish(run.seq, run.token_ids, keep_turn_end=True)
        self.check()
        return handle

    def settle(self, handle: TurnHandle | None, stable_tokens: int) -> None:
        if handle is not None and stable_tokens >= 0:
            self.cache.end_turn(handle, stable_tokens)
            self.check()

    # Checks

    def verify(self, run: Run) -> None:
        """The pages and the live row of an open sequence hold its own history."""
        seq = run.seq
        hashes = running_hashes(run.token_ids)
        if self.cache.has_pages:
            for position in range(seq.num_computed_tokens):
                page = int(seq.page_ids[position // self.page_size])
                content = self.cells[page][position % self.page_size]
                assert content == hashes[position + 1], f"page {page} does not hold position {position}"
        else:
            assert len(seq.page_ids) == 0
        if seq.state_row is not None and seq.num_computed_tokens > 0:
            state = self.rows[seq.state_row]
            assert state == hashes[seq.num_computed_tokens], f"row {seq.state_row} is not at its position"

    def check(self) -> None:
        """Conservation, and the content of everything that a match could reuse."""
        if not self.checks:
            return
        self.cache.check()
        waiting: list[tuple[int, PageNode]] = [(_EMPTY, root) for root in self.cache._tree.roots.values()]
        while waiting:
            history, parent = waiting.pop()
            for node in parent.children.values():
                hashes = running_hashes(decode_tokens(node.key), history)
                if self.cache.has_pages:
                    content = self.cells[node.page][: node.end - node.start]
                    assert content == hashes[1:], f"page {node.page} does not hold [{node.start}, {node.end})"
                for snapshot in node.snapshots.values():
                    state = self.rows[snapshot.row]
                    assert state == hashes[snapshot.num_tokens - node.start], f"row {snapshot.row} holds another state"
                waiting.append((hashes[-1], node))

    def nodes(self, cache_root: str | None = None) -> list[tuple[list[int], PageNode]]:
        """Every page node with the tokens from its root to its end."""
        found: list[tuple[list[int], PageNode]] = []
        for name, root in self.cache._tree.roots.items():
            if cache_root in (None, name):
                waiting: list[tuple[list[int], PageNode]] = [([], root)]
                while waiting:
                    path, node = waiting.pop()
                    for child in node.children.values():
                        waiting.append(([*path, *decode_tokens(child.key)], child))
                        found.append(waiting[-1])
        return found

    def snapshot_positions(self, kind: BoundaryKind | None = None, *, superseded: bool | None = None) -> list[int]:
        """Positions of the snapshots there are, ascending."""
        return sorted(
            snapshot.num_tokens
            for snapshot in self.cache._reclaimer.snapshots
            if kind in (None, snapshot.kind) and superseded in (None, snapshot.is_superseded)
        )

    def expect_match(self, token_ids: Sequence[int], cache_root: str = "") -> tuple[int, int]:
        """(usable, matched by pages), found by looking at everything."""
        limit = max(len(token_ids) - 1, 0)
        num_matched = num_usable = 0
        for path, node in self.nodes(cache_root):
            common = 0
            while common < min(len(path), limit) and path[common] == token_ids[common]:
                common += 1
            num_matched = max(num_matched, common)
            ends = node.snapshots if self.cache.has_state else {common: None}
            num_usable = max([num_usable, *(end for end in ends if end <= common)])
        return num_usable, num_matched

    def assert_empty(self) -> None:
        """Nothing is left of anything once all that may go is evicted."""
        self.cache.clear()
        self.cache.check()
        stats = self.cache.stats()
        assert stats.num_free_pages == stats.num_pages
        assert stats.num_free_rows == stats.num_rows
        assert (stats.num_branches, stats.num_conversations, stats.num_open_sequences) == (0, 0, 0)
        assert not self.cache._tree.roots
