"""Which positions of a prompt get a snapshot: those that the template and the client name, as far as the policy wants
them, its own, and those that the cache finds when it looks at the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.config import SnapshotPolicy
from turnkeep.cache.eviction import TurnObserver
from turnkeep.cache.prefix_match import PrefixMatch
from turnkeep.cache.sequence_cache import SequenceCache


class SnapshotPlanner:
    """`observer` is the eviction policy where it follows turns: it knows more places worth a snapshot than a match."""

    def __init__(self, policy: SnapshotPolicy, observer: TurnObserver | None) -> None:
        self.policy = policy
        self._observer = observer

    def planned(self, given: Iterable[Boundary], num_prompt_tokens: int) -> tuple[Boundary, ...]:
        """Those inside the prompt, ascending, one a position.

        given: what the template and the client name; it goes before what the policy adds, and its kind decides how
        long the snapshot stays. Positions beyond the prompt are left out. O(number of snapshots).
        """
        found: dict[int, Boundary] = {}
        for boundary in (*filter(self._is_wanted, given), *self._fixed(num_prompt_tokens)):
            if 0 < boundary.position <= num_prompt_tokens:
                found.setdefault(boundary.position, boundary)
        return tuple(found[position] for position in sorted(found))

    def own(self, seq: SequenceCache, match: PrefixMatch) -> tuple[Boundary, ...]:
        """What the cache itself wants beyond the match that `seq` was opened with."""
        if self._observer is not None:
            wanted = self._observer.arrived(seq, match, seq.conversation)
        else:
            wanted = () if match.branch_position is None else (Boundary(match.branch_position, "branch"),)
        return tuple(filter(self._is_wanted, wanted))

    def _is_wanted(self, boundary: Boundary) -> bool:
        if boundary.kind == "declared":
            return self.policy.declared_boundaries
        if boundary.kind in ("branch", "likely_branch"):
            return self.policy.branch_snapshots
        return self.policy.template_boundaries or boundary.kind not in ("trunk", "turn_start", "turn_end")

    def _fixed(self, num_prompt_tokens: int) -> Iterator[Boundary]:
        policy = self.policy
        for offset in policy.additional_snapshot_offsets_from_start:
            yield Boundary(offset, "fixed")
        for offset in policy.additional_snapshot_offsets_from_end:
            yield Boundary(num_prompt_tokens - offset, "fixed")
        interval = policy.periodic_snapshot_interval
        if interval:
            for position in range(interval, num_prompt_tokens + 1, interval):
                yield Boundary(position, "periodic")
