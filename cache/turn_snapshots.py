"""The snapshots of one sequence: reserved before a step, published after it, kept or dropped when its turn ends.

Also the pin on the snapshot that a sequence resumed from, which stays until one of its own takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnkeep.cache.boundary import BoundaryKind
from turnkeep.cache.commit import Committer
from turnkeep.cache.encoded_tokens import TOKEN_BYTES, TokenIds
from turnkeep.cache.eviction import TurnObserver
from turnkeep.cache.keeping_rules import KeepingRules
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.retention import Retention, TurnHandle
from turnkeep.cache.sequence_cache import Export, SequenceCache
from turnkeep.cache.snapshot import PRIVATE_KINDS, Snapshot
from turnkeep.cache.statistics import CacheCounters


class TurnSnapshots:
    """For models with state and prefix caching only. `observer` is the eviction policy where it follows turns."""

    def __init__(
        self,
        reclaimer: Reclaimer,
        committer: Committer,
        retention: Retention,
        counters: CacheCounters,
        observer: TurnObserver | None,
        rules: KeepingRules,
    ) -> None:
        self._reclaimer = reclaimer
        self._committer = committer
        self._retention = retention
        self._counters = counters
        self._observer = observer
        self._rules = rules

    def reserve(self, seq: SequenceCache, position: int, kind: BoundaryKind) -> int | None:
        """A row for a snapshot at a position not computed yet; None, counted, where none is to be written."""
        for export in seq.exports:
            if export.position == position:
                return export.row
        if kind == "page_end":
            return self._reserve_page_end(seq, position)
        reclaimer, skipped = self._reclaimer, self._counters.skipped_snapshots
        row = None
        if reclaimer.tree.find_snapshot(seq.path, seq.encoded, position) is not None:
            skipped["duplicate"] += 1
        elif self._observer is not None and not self._observer.wants(seq, position, kind):
            skipped["not_worth"] += 1
            return None
        elif reclaimer.can_make_room(0, 1):
            reclaimer.make_room(0, 1)
            row = reclaimer.rows.allocate()
        else:
            skipped["no_row"] += 1
            if position <= len(seq.encoded) // TOKEN_BYTES:
                reclaimer.skipped.remember_position(seq.path, seq.encoded, position)
            return None
        seq.exports.append(Export(position, row, kind))
        return row

    def publish(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """Those reserved at computed positions. Full pages must be committed."""
        computed = seq.num_computed_tokens
        ready = [export for export in seq.exports if export.position <= computed and export.kind != "page_end"]
        seq.exports = [export for export in seq.exports if export.position > computed or export.kind == "page_end"]
        for export in ready:
            snapshot, _ = self._committer.publish_snapshot(seq, token_ids, export.position, export.row, export.kind)
            if snapshot is not None:
                assert seq.branch is not None
                if self._observer is not None:
                    self._observer.published(seq, snapshot)
                self._retention.keep(seq.branch, snapshot, export.kind)
                self._count_and_hold(seq, snapshot)
                if seq.resumed_from is not None and export.position > seq.resumed_from.num_tokens:
                    self.release_resumed(seq)

    def choose_end(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """The turn ends where the observer wants, if the state there is at hand: in the row of its last full page, or
        because its live row is behind. Full pages must be committed."""
        place = seq.num_computed_tokens if self._observer is None else self._observer.turn_end(seq, token_ids)
        if not seq.num_committed_tokens <= place < seq.num_computed_tokens:
            return
        for export in seq.exports:
            if export.kind == "page_end" and export.position == place and seq.state_row is not None:
                seq.exports.remove(export)
                self._reclaimer.rows.release(seq.state_row)
                seq.state_row, seq.num_folded_tokens = export.row, place
                break
        if seq.num_folded_tokens <= place:
            seq.num_computed_tokens = place

    def finish(self, seq: SequenceCache, token_ids: TokenIds) -> TurnHandle:
        """The live row becomes the turn's end. Everything else of the sequence must be published."""
        assert seq.branch is not None
        row, seq.state_row = seq.state_row, None
        snapshot, is_new = self._committer.publish_snapshot(seq, token_ids, seq.num_computed_tokens, row, "turn_end")
        assert snapshot is not None
        handle = self._retention.begin_turn_end(seq.branch, snapshot, is_own=is_new)
        self._count_and_hold(seq, snapshot)
        if self._observer is not None:
            self._observer.published(seq, snapshot)
            handle.observed = self._observer.finished(seq, is_suspended=False)
        return handle

    def end_turn(self, handle: TurnHandle, stable_tokens: int, *, has_tool_call: bool | None) -> None:
        """The next prompt repeats `stable_tokens` tokens: the turn's end stays or goes. Only the first call counts."""
        if self._observer is not None and handle.observed is not None:
            self._observer.settled(handle.observed, stable_tokens, has_tool_call=has_tool_call)
            handle.observed = None
        useless = self._retention.end_turn(handle, stable_tokens)
        if useless is not None:
            self._counters.dropped_snapshots[useless.kind] += 1
            self._reclaimer.drop(useless)

    def suspend(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """The live row becomes the place to go on from."""
        assert seq.branch is not None
        row, seq.state_row = seq.state_row, None
        snapshot, _ = self._committer.publish_snapshot(seq, token_ids, seq.num_computed_tokens, row, "suspended")
        assert snapshot is not None
        self._retention.keep(seq.branch, snapshot, "suspended")
        self._count_and_hold(seq, snapshot)
        if self._observer is not None:
            self._observer.published(seq, snapshot)
            self._observer.finished(seq, is_suspended=True)

    def prepared(self, seq: SequenceCache, token_ids: TokenIds) -> None:
        """The live row becomes a place for the next turn to begin at, instead of the end of the last."""
        assert seq.branch is not None
        row, seq.state_row = seq.state_row, None
        snapshot, is_new = self._committer.publish_snapshot(seq, token_ids, seq.num_computed_tokens, row, "turn_end")
        assert snapshot is not None
        if is_new:
            snapshot.num_prepared_tokens = seq.num_computed_tokens - seq.num_reused_tokens
            self._counters.num_prepared_tokens += snapshot.num_prepared_tokens
        self._retention.keep(seq.branch, snapshot, "turn_end")
        if self._observer is not None:
            self._observer.prepared(seq, snapshot)

    def resumed(self, seq: SequenceCache, retention_s: float) -> None:
        """The sequence was opened, perhaps at a snapshot: who asks for more time gets it from now on, and who was
        not heard of for the time to live is let go of."""
        self.drop_all(self._retention.expired())
        seq.retention_s = retention_s
        if seq.resumed_from is not None and retention_s:
            self._rules.hold(seq.resumed_from, retention_s)

    def drop_all(self, useless: Iterable[Snapshot]) -> None:
        """Snapshots of conversations that will not return: their rows and pages are free at once."""
        for snapshot in useless:
            self._counters.dropped_snapshots[snapshot.kind] += 1
            self._reclaimer.drop(snapshot)

    def _count_and_hold(self, seq: SequenceCache, snapshot: Snapshot) -> None:
        assert seq.branch is not None
        if snapshot.kind in PRIVATE_KINDS:
            self._rules.assign(snapshot, seq.branch.family, seq.branch.conversation[0])
        if seq.retention_s and not snapshot.is_superseded and not self._rules.hold(snapshot, seq.retention_s):
            self._counters.num_refused_holds += 1

    def _reserve_page_end(self, seq: SequenceCache, position: int) -> int | None:
        """One row a sequence, which moves on from page to page; and only while all that run could be given another."""
        reclaimer = self._reclaimer
        for index, export in enumerate(seq.exports):
            if export.kind == "page_end":
                seq.exports[index] = Export(position, export.row, "page_end")
                return export.row
        num_live = reclaimer.rows.num_usable - reclaimer.rows.num_free - len(reclaimer.snapshots)
        if not reclaimer.can_make_room(0, 1 + num_live):
            return None
        reclaimer.make_room(0, 1)
        row = reclaimer.rows.allocate()
        seq.exports.append(Export(position, row, "page_end"))
        return row

    def release_resumed(self, seq: SequenceCache) -> None:
        """Unpin what the sequence resumed from, if it still holds it."""
        if seq.resumed_from is not None:
            snapshot, seq.resumed_from = seq.resumed_from, None
            self._reclaimer.unpin(snapshot)

    def give_up_resumed(self, seq: SequenceCache, num_pages: int) -> bool:
        """Unpin what `seq` resumed from if, and only if, that makes room for num_pages."""
        snapshot = seq.resumed_from
        num_freed = self._reclaimer.num_pages_pinned_only_by(snapshot) if snapshot is not None else 0
        if snapshot is None or not self._reclaimer.can_make_room(num_pages - num_freed, 0):
            return False
        self._counters.num_released_pins += 1
        self.release_resumed(seq)
        return True
