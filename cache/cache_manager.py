"""The one public face of the cache: what a scheduler asks of it for one sequence, each call atomic.

A call either succeeds or changes nothing (`match`, `can_provide` and `stats` never change anything). Ids only: the
bytes move when the copies of `drain_copies` are carried out. Single-threaded, like the engine loop that owns it.
Life of a sequence: match, open, then per step grow, reserve_export, drain_copies, [the step runs], advance, commit,
publish_exports; at last finish, suspend or close.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from turnkeep.cache.boundary import Boundary, BoundaryKind
from turnkeep.cache.commit import Committer
from turnkeep.cache.config import CacheConfig
from turnkeep.cache.conservation import check_conservation
from turnkeep.cache.conversation_leaves import ConversationLeaves
from turnkeep.cache.copies import HistoryFold, PageCopy, RowCopy
from turnkeep.cache.encoded_tokens import TokenIds, encode_tokens
from turnkeep.cache.eviction import EvictionPolicy, TurnObserver
from turnkeep.cache.keeping_rules import KeepingRules
from turnkeep.cache.opening import Opener
from turnkeep.cache.page_pool import PagePool
from turnkeep.cache.pending_copies import PendingCopies
from turnkeep.cache.policies import make_policy
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.prefix_match import PrefixMatch, PrefixSearch
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.replay_slots import ReplaySlots
from turnkeep.cache.retention import Retention, TurnHandle
from turnkeep.cache.sequence_cache import SequenceCache
from turnkeep.cache.snapshot_plan import SnapshotPlanner
from turnkeep.cache.spec import CacheSpec
from turnkeep.cache.state_pool import StatePool
from turnkeep.cache.statistics import CacheCounters, CacheStats, read_stats
from turnkeep.cache.tiers.cold_tiers import ColdTiers
from turnkeep.cache.turn_snapshots import TurnSnapshots

__all__ = ["CacheManager", "CacheStats", "PrefixMatch", "SequenceCache", "TokenIds", "TurnHandle"]


class CacheManager:
    """Pages 1 .. num_pages - 1 and rows 1 .. num_state_rows - 1 of one model on one device.

    Models without attention need no pages (page ids are then empty), models without recurrent layers no rows.
    `policy` replaces the configured one; `cost`, which it weighs with, may go on being measured. `tiers` take in what
    leaves the pools. num_history_slots: so many sequences are open at most where drafts are verified (`spec.history`).
    Raises ValueError for pools in which nothing could ever run.
    """

    def __init__(
        self,
        spec: CacheSpec,
        config: CacheConfig | None = None,
        *,
        num_pages: int,
        num_state_rows: int,
        num_history_slots: int = 0,
        clock: Callable[[], float],
        policy: EvictionPolicy | None = None,
        cost: PrefillCost | None = None,
        tiers: ColdTiers | None = None,
    ) -> None:
        config = config if config is not None else CacheConfig()
        self.page_size = spec.page_size
        self.has_pages = spec.kv is not None
        self.has_state = spec.state is not None
        self.has_history = spec.history is not None
        self.prefix_caching = config.prefix_caching
        spec.check_pools(num_pages, num_state_rows)
        self._counters = counters = CacheCounters()
        self._pages = PagePool(num_pages if self.has_pages else 0)
        self._rows = StatePool(num_state_rows if self.has_state else 0)
        if policy is None:
            policy = make_policy(config.eviction_policy, spec, clock, cost or PrefillCost())
        self._keeps_snapshots = self.has_state and self.prefix_caching
        self._observer = policy if self._keeps_snapshots and isinstance(policy, TurnObserver) else None
        self._planner = SnapshotPlanner(config.snapshots, self._observer)
        rules = KeepingRules(policy, config, self._rows.num_usable, clock)
        self._reclaimer = reclaimer = Reclaimer(
            spec, pages=self._pages, rows=self._rows, policy=rules, clock=clock, counters=counters
        )
        self._tree = reclaimer.tree
        self._search = PrefixSearch(self._tree, reclaimer.memory, reclaimer.skipped, needs_snapshot=self.has_state)
        self._committer = Committer(spec.page_size, reclaimer, counters)
        self._retention = Retention(reclaimer, config, clock)
        self._leaves = ConversationLeaves(reclaimer)
        reclaimer.on_removed = self._retention.forget
        self._copies = PendingCopies(reclaimer)
        self._replay = ReplaySlots.of(spec.history, num_history_slots)
        self._snapshots = TurnSnapshots(reclaimer, self._committer, self._retention, counters, self._observer, rules)
        self._opener = Opener(
            spec.page_size, search=self._search, reclaimer=reclaimer, copies=self._copies, counters=counters
        )
        self._open: set[SequenceCache] = set()
        self.tiers = tiers if self.prefix_caching else None
        if self.tiers is not None:
            self.tiers.attach(reclaimer, self._retention)

    # Admission

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold positions [0, num_tokens); 0 for models without attention."""
        return -(-num_tokens // self.page_size) if self.has_pages else 0

    def num_new_pages(self, match: PrefixMatch, capacity_tokens: int) -> int:
        """Pages that `open` and then `grow` to capacity_tokens take from the pool: what to ask `can_provide` for."""
        return self._opener.num_new_pages(match, self.pages_for(capacity_tokens)) if self.has_pages else 0

    def match(self, cache_root: str, token_ids: TokenIds, conversation_id: str | None = None) -> PrefixMatch:
        """The longest usable prefix of a prompt, at most all but its last token. Changes nothing.

        Prefixes are never shared between cache roots. conversation_id is a hint for finding it faster; tokens decide.
        Raises ValueError for token ids outside [0, 2**32).
        """
        if not self.prefix_caching:
            return self.cold_match(cache_root, token_ids)
        encoded = encode_tokens(token_ids)
        known = self._leaves.find((cache_root, conversation_id), encoded, len(token_ids) - 1)
        return self._search.find(cache_root, token_ids, encoded, known)

    def cold_match(self, cache_root: str, token_ids: TokenIds) -> PrefixMatch:
        """A match that reuses nothing.

        A match pins its snapshot with its row and tail page on top of what the sequence takes. When no sequence is
        open and `can_provide` still refuses a match, the cold one fits if the request can fit at all.
        """
        return PrefixMatch(cache_root, token_ids, encode_tokens(token_ids))

    def can_provide(self, num_pages: int, num_rows: int, match: PrefixMatch | None = None) -> bool:
        """Whether so many pages and rows are free or can be had by evicting what `match` does not need."""
        return self._opener.can_provide(num_pages, num_rows, match)

    def planned_boundaries(self, given: Iterable[Boundary], num_prompt_tokens: int) -> tuple[Boundary, ...]:
        """Where a prompt gets snapshots, beyond what its match says: those given that the policy wants, and its own."""
        return self._planner.planned(given, num_prompt_tokens)

    def open(
        self,
        match: PrefixMatch,
        token_ids: TokenIds,
        *,
        conversation_id: str | None = None,
        retention_s: float = 0.0,
        is_preparation: bool = False,
    ) -> SequenceCache | None:
        """Start a sequence at the end of `match`: shared pages, a copy of the partly used one, a live state row.

        A partly filled page that nobody writes and that ends exactly here is written on without a copy. Returns None,
        with nothing changed, when a row or the page cannot be had even by evicting. A match that went stale is found
        again: num_computed_tokens of the result says where to start. Raises ValueError when token_ids do not start
        with what was matched. retention_s: for how long the client asks that what this leaves behind stays.
        is_preparation: for no request; it ends with finish_preparation, suspend or close.
        """
        opened = self._opener.open(match, token_ids, is_preparation=is_preparation)
        if opened is None:
            return None
        seq, match = opened
        if conversation_id is not None:
            seq.conversation = (match.cache_root, conversation_id)
        if self._keeps_snapshots:
            seq.branch = self._retention.resume((match.cache_root, conversation_id), match.snapshot)
            seq.boundaries = () if is_preparation else self._planner.own(seq, match)
            self._snapshots.resumed(seq, retention_s)
        if self.has_history:
            self._replay.open(seq)
        self._open.add(seq)
        return seq

    # One step

    def grow(self, seq: SequenceCache, capacity_tokens: int) -> bool:
        """Own page slots for positions [0, capacity_tokens), evicting for them. False: impossible, nothing changed
        (where nothing is left to evict, what colder tiers have brought in part is given up, whether that helps or not).

        At last the sequence gives up its pin on the snapshot it resumed from: one that is alone can use the whole pool.
        """
        if capacity_tokens <= seq.capacity_tokens:
            return True
        self._require_open(seq)
        if not self.has_pages:
            seq.capacity_tokens = capacity_tokens
            return True
        num_new = self.pages_for(capacity_tokens) - seq.num_pages
        if num_new > self._pages.num_free:
            if not self._reclaimer.find_room(num_new, 0) and not self._snapshots.give_up_resumed(seq, num_new):
                return False
            self._reclaimer.make_room(num_new, 0)
        self._counters.count_new_pages(num_new, seq.num_pages + num_new - self.pages_for(seq.num_prompt_tokens))
        seq.append_pages(self._pages.allocate(num_new))
        seq.capacity_tokens = seq.num_pages * self.page_size
        return True

    def reserve_export(self, seq: SequenceCache, position: int, kind: BoundaryKind) -> int | None:
        """A state row for a snapshot at `position`, which the coming step computes; the same row when asked again.

        None where none is to be written: an equal snapshot exists, no row can be had (both counted), or the model or
        the configuration keeps no snapshots. Raises ValueError when the position is computed already.
        """
        self._require_open(seq)
        if position <= seq.num_computed_tokens:
            raise ValueError(f"position {position} is computed already ({seq.num_computed_tokens} tokens are)")
        return self._snapshots.reserve(seq, position, kind) if self._keeps_snapshots else None

    def drain_copies(self) -> tuple[tuple[PageCopy, ...], tuple[RowCopy, ...]]:
        """The copies planned since the last call. They must be carried out before the next forward pass, after the
        folds of `drain_folds`.

        No target is the source or target of another one, so each tuple may be carried out as one batch.
        """
        return self._copies.drain()

    def drain_folds(self) -> tuple[HistoryFold, ...]:
        """The folds planned since the last call, to be carried out before anything else reads a row."""
        return self._replay.drain()

    def history_room(self, seq: SequenceCache, num_tokens: int) -> tuple[int, int]:
        """The history slot of `seq` and the tokens in it, after a fold where num_tokens more would not fit.

        num_tokens: the longest path that the coming step may accept. Raises ValueError for one that never fits.
        """
        slot, capacity = seq.history_slot, self._replay.capacity
        if not 0 < num_tokens <= capacity or slot is None:  # a closed sequence has no slot
            raise ValueError(f"a path of {num_tokens} tokens in a history of {capacity}")
        if seq.num_computed_tokens - seq.num_folded_tokens + num_tokens > capacity:
            self._replay.fold(seq)
        return slot, seq.num_computed_tokens - seq.num_folded_tokens

    def fold(self, seq: SequenceCache) -> None:
        """Bring the live row up to everything computed, for a step that goes on from the row alone."""
        self._replay.fold(seq)

    def rewind(self, seq: SequenceCache, position: int) -> None:
        """Only what was computed before `position` will be repeated: end there, or as near behind it as the live row
        allows, which is never trimmed."""
        self._replay.rewind(seq, position)

    def advance(self, seq: SequenceCache, num_tokens: int, *, in_history: bool = False) -> None:
        """The step ran: the keys, values and state of num_tokens more tokens are written.

        in_history: not into the live row, but into the history slot. Raises ValueError beyond the capacity of either,
        when the sequence's copies were never drained, or when the row was moved on past a history.
        """
        self._require_open(seq)
        before = seq.num_computed_tokens
        computed = before + num_tokens
        if num_tokens < 0 or computed > seq.capacity_tokens:
            raise ValueError(f"{computed} tokens computed in a capacity of {seq.capacity_tokens}")
        if seq in self._copies:
            raise ValueError("the copies of this sequence were not carried out before the step")
        if in_history:
            if computed - seq.num_folded_tokens > self._replay.capacity:
                raise ValueError(f"{computed - seq.num_folded_tokens} tokens in a history of {self._replay.capacity}")
        elif before != seq.num_folded_tokens:
            raise ValueError(f"the live row is {seq.num_history_tokens} tokens behind and was moved on")
        else:
            seq.num_folded_tokens = computed
        seq.num_computed_tokens = computed

    def commit(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """Publish the full pages computed so far; token_ids: the known tokens, at least the computed ones.

        A page that is there already is freed and shared. Partly filled pages are published where a snapshot needs
        them, and at the end of the sequence.
        """
        self._require_open(seq)
        if self.prefix_caching:
            self._committer.commit_full_pages(seq, token_ids)

    def publish_exports(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """Make the snapshots reserved at computed positions matchable; commits up to them."""
        if not seq.exports:
            return
        self._require_open(seq)
        self._committer.commit_full_pages(seq, token_ids)
        self._snapshots.publish(seq, token_ids)

    # The end of a sequence

    def finish(self, seq: SequenceCache, token_ids: TokenIds, *, keep_turn_end: bool) -> TurnHandle | None:
        """The request is done: keep what it computed, the live row as a `turn_end` snapshot (None when there is none),
        perhaps before its last tokens, and close. Usable at once; `end_turn` says later if it is worth its place."""
        self._publish_rest(seq, token_ids)
        handle = None
        keep_turn_end = keep_turn_end and self._planner.policy.template_boundaries
        if keep_turn_end and seq.branch is not None and seq.num_computed_tokens > 0:
            self._snapshots.choose_end(seq, token_ids)
            self._replay.fold(seq)
            handle = self._snapshots.finish(seq, token_ids)
        if self.tiers is not None and not self.has_state:
            self.tiers.offloader.turn_ended(seq.conversation, seq.tail or seq.path)
        self._remember_leaf(seq)
        self.close(seq)
        return handle

    def finish_preparation(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """All of a preparation is computed: keep it for the conversation's next turn, and close."""
        self._publish_rest(seq, token_ids)
        if seq.branch is not None and seq.num_computed_tokens > 0:
            self._snapshots.prepared(seq, token_ids)
        else:
            self._counters.num_prepared_tokens += seq.num_computed_tokens - seq.num_reused_tokens
        self._remember_leaf(seq)
        self.close(seq)

    def end_turn(self, handle: TurnHandle, stable_tokens: int, *, has_tool_call: bool | None = None) -> None:
        """The next prompt will repeat `stable_tokens` tokens: keep the turn's end or drop it. Only the first call
        counts; without one the snapshot stays like any other. has_tool_call: a program answers."""
        self._snapshots.end_turn(handle, stable_tokens, has_tool_call=has_tool_call)

    def suspend(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """Close, but keep what is computed so that a match of the known tokens finds it unless it is evicted."""
        self._publish_rest(seq, token_ids)
        if seq.branch is not None and seq.num_computed_tokens > 0:
            self._replay.fold(seq)
            self._snapshots.suspend(seq, token_ids)
        self._remember_leaf(seq)
        self.close(seq)

    def close(self, seq: SequenceCache) -> None:
        """Release everything the sequence holds; what it committed stays as far as it can be used. Idempotent."""
        if seq.is_closed:
            return
        seq.is_closed = True
        self._open.discard(seq)
        self._copies.cancel(seq)
        self._replay.close(seq)
        for export in seq.exports:
            if export.row is not None:
                self._rows.release(export.row)
        seq.exports = []
        if seq.state_row is not None:
            self._rows.release(seq.state_row)
            seq.state_row = None
        self._pages.release_all(seq.page_ids)
        seq.num_pages = seq.capacity_tokens = 0
        if seq.tail is not None:
            tail, seq.tail = seq.tail, None
            tail.writer = None
            self._reclaimer.release(tail)
        self._snapshots.release_resumed(seq)
        self._reclaimer.release(seq.path)
        if seq.branch is not None:
            self._retention.release(seq.branch)
        if self._observer is not None:
            self._observer.closed(seq)

    def distrust(self, rows: Collection[int]) -> None:
        """A step that was to write these rows failed: snapshots in them are dropped. No open sequence needs them."""
        self._reclaimer.drop_rows(rows)

    def close_conversation(self, cache_root: str, conversation_id: str) -> None:
        """It will not return: what only it kept is free at once (in models without state: goes first)."""
        self._snapshots.drop_all(self._retention.close_conversation((cache_root, conversation_id)))
        self._leaves.close((cache_root, conversation_id))
        if self.tiers is not None:
            self.tiers.forget(cache_root, conversation_id)
        if self._observer is not None:
            self._observer.conversation_closed((cache_root, conversation_id))

    def clear(self) -> None:
        """Evict everything that no open sequence holds."""
        self.trim(0)

    def trim(self, memory_bytes: int) -> None:
        """Evict until pages and rows in use hold at most so many bytes together, or nothing may go any more."""
        self._reclaimer.trim(memory_bytes)

    # Reports

    def stats(self) -> CacheStats:
        """One reading; O(snapshots)."""
        tiers = None if self.tiers is None else self.tiers.reading()
        return read_stats(
            self._reclaimer, self._retention, num_open_sequences=len(self._open), counters=self._counters, tiers=tiers
        )

    def check(self) -> None:
        """Recompute every count and reference. Raises AssertionError naming what is wrong. O(everything)."""
        check_conservation(self._reclaimer, self._retention, self._copies, self._open, self.tiers)
        self._replay.check(self._open)

    def _remember_leaf(self, seq: SequenceCache) -> None:
        """The conversation's next prompt is looked for here first."""
        if seq.conversation is not None and self.prefix_caching:
            self._leaves.finished(seq.conversation, seq)

    def _require_open(self, seq: SequenceCache) -> None:
        if seq.is_closed:
            raise ValueError("the sequence is closed")

    def _publish_rest(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """What a sequence leaves behind besides its live row: pages, and snapshots that were computed."""
        self._require_open(seq)
        if not self.prefix_caching:
            return
        self.publish_exports(seq, token_ids)
        self._committer.commit_full_pages(seq, token_ids)
        if not self.has_state:
            self._committer.commit_tail(seq, token_ids)
