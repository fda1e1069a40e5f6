"""Replay histories: which slot holds the accepted tokens that a live row does not contain yet, and what is folded.

While drafts are verified a live row stays behind: it holds the state of num_folded_tokens tokens, and what the tokens
from there to num_computed_tokens added lies in the sequence's history slot. A fold moves a row on by the first of
them. Ids only; the runner moves the bytes, all sources before any target, before the copies of a step.
"""

from __future__ import annotations

from collections.abc import Iterable

from turnkeep.cache.copies import HistoryFold
from turnkeep.cache.sequence_cache import SequenceCache
from turnkeep.cache.spec import HistorySpec


class ReplaySlots:
    """Slots 0 .. num_slots - 1 of `capacity` tokens; one for every open sequence."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self.num_slots = num_slots
        self.capacity = capacity
        self._free = list(range(num_slots - 1, -1, -1))
        self._folds: dict[int, HistoryFold] = {}  # by target row: the newest is what its owner wants

    @classmethod
    def of(cls, spec: HistorySpec | None, num_slots: int) -> ReplaySlots:
        """None at all where no drafts are verified."""
        return cls(0, 0) if spec is None else cls(num_slots, spec.capacity)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open(self, seq: SequenceCache) -> None:
        """Give a new sequence a slot. Raises RuntimeError when none is free: callers bound what is open."""
        if not self._free:
            raise RuntimeError(f"all {self.num_slots} history slots are in use")
        seq.history_slot = self._free.pop()

    def close(self, seq: SequenceCache) -> None:
        """Free the slot. Folds that read it are carried out before anything of another owner is written there."""
        if seq.history_slot is not None:
            self._free.append(seq.history_slot)
            seq.history_slot = None

    def fold(self, seq: SequenceCache) -> None:
        """Bring the live row up to everything computed."""
        num_tokens = seq.num_history_tokens
        if not num_tokens:
            return
        slot, row = seq.history_slot, seq.state_row
        assert slot is not None
        assert row is not None
        self._folds[row] = HistoryFold(slot, num_tokens, row, row)
        seq.num_folded_tokens = seq.num_computed_tokens

    def rewind(self, seq: SequenceCache, position: int) -> None:
        """Forget what was computed behind a position, as far as the live row does not contain it."""
        if position < seq.num_computed_tokens:
            seq.num_computed_tokens = max(position, seq.num_folded_tokens, seq.num_committed_tokens)

    def drain(self) -> tuple[HistoryFold, ...]:
        """The folds planned since the last call, to be carried out as one batch."""
        if not self._folds:
            return ()
        folds, self._folds = tuple(self._folds.values()), {}
        return folds

    def check(self, sequences: Iterable[SequenceCache]) -> None:
        """Every open sequence has a slot of its own and a history that fits. Raises AssertionError."""
        taken = [seq.history_slot for seq in sequences]
        slots = [slot for slot in taken if slot is not None]
        expected = len(taken) if self.num_slots else 0
        assert len(slots) == expected, f"{len(slots)} of {len(taken)} open sequences have a history slot"
        assert sorted([*slots, *self._free]) == list(range(self.num_slots)), "history slots are shared or lost"
        for seq in sequences:
            length = seq.num_history_tokens
            assert 0 <= length <= self.capacity, f"a history of {length} tokens in a slot of {self.capacity}"
