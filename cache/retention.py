"""Which snapshots the next turn of a conversation will want: branches, supersession, and the end of a turn.

A branch is one line of a conversation: per kind it keeps the newest snapshots (turn_start, turn_end, suspended). A
request that resumes at a branch's deepest kept snapshot continues that branch; any other starts a new one (a side
call, a retry, a sub-agent), so a newer snapshot supersedes an older one only where it really is its descendant.
A snapshot kept by several branches is superseded when the last of them lets go. Nothing here frees memory, except
that the end of a turn drops a snapshot known to be useless.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from itertools import chain

from turnkeep.cache.boundary import BoundaryKind
from turnkeep.cache.config import CacheConfig
from turnkeep.cache.reclaim import Reclaimer
from turnkeep.cache.snapshot import PRIVATE_KINDS, Snapshot

ConversationKey = tuple[str, str | None]  # cache root, conversation id; None: a line without a tag


@dataclass(slots=True, eq=False)
class TurnHandle:
    """The end of a turn, until it is known how much of it the next prompt repeats. Opaque outside the cache."""

    branch: Branch
    snapshot: Snapshot
    is_own: bool  # made by this turn, not found
    num_hits: int  # of the snapshot when the turn ended
    is_settled: bool = False
    observed: object | None = None  # what a policy that follows turns calls this one


@dataclass(slots=True, eq=False)
class Branch:
    """num_turns counts finished turns, num_active open sequences (at most one continues a branch at a time)."""

    conversation: ConversationKey
    family: Hashable = None  # whose share its snapshots count to: its conversation, or the one that it forked from
    inherited: Snapshot | None = None  # where it left another branch
    last_used_s: float = 0.0
    kept: dict[BoundaryKind, list[Snapshot]] = field(default_factory=dict)  # oldest first
    open_turn: TurnHandle | None = None
    num_active: int = 0
    num_turns: int = 0
    is_abandoned: bool = False

    def snapshots(self) -> list[Snapshot]:
        """All that this branch keeps, the unsettled turn end included."""
        found = list(chain.from_iterable(self.kept.values()))
        if self.open_turn is not None:
            found.append(self.open_turn.snapshot)
        return found

    def deepest(self) -> Snapshot | None:
        return max(self.snapshots(), key=lambda snapshot: snapshot.num_tokens, default=None)


class Retention:
    """Branches exist while they keep a snapshot or a sequence is open on them; their number is bounded besides."""

    def __init__(
        self, reclaimer: Reclaimer, config: CacheConfig, clock: Callable[[], float], *, max_total_branches: int = 8192
    ) -> None:
        self._reclaimer = reclaimer
        self._ttl_s = config.idle_ttl_s
        self._clock = clock
        # Turns of a branch whose snapshots are kept side by side; None: all, until they are evicted.
        self._max_num_turns = config.max_num_turns if config.reuse_policy == "per_conversation" else None
        self._max_branches = config.max_branches
        self._max_total = max_total_branches
        self._branches: OrderedDict[Branch, None] = OrderedDict()  # least recently used first
        self._conversations: dict[ConversationKey, list[Branch]] = {}

    @property
    def num_branches(self) -> int:
        return len(self._branches)

    @property
    def num_conversations(self) -> int:
        return len(self._conversations)

    def branches(self) -> Iterable[Branch]:
        """For conservation checks, least recently used first."""
        return self._branches.keys()

    def resume(self, conversation: ConversationKey, snapshot: Snapshot | None) -> Branch:
        """The branch that a sequence resuming at `snapshot` (None: from nothing) belongs to; one more is active."""
        branch = self._continued(conversation, snapshot) if snapshot is not None else None
        if branch is None:
            branch = Branch(conversation, _family(conversation, snapshot), snapshot)
            self._branches[branch] = None
            if conversation[1] is not None:
                self._conversations.setdefault(conversation, []).append(branch)
            branch.num_active = 1
            if snapshot is not None and snapshot.kind in ("turn_start", "turn_end"):
                self.keep(branch, snapshot, snapshot.kind)
            self._enforce_limits(conversation)
        else:
            branch.num_active = 1
            self._branches.move_to_end(branch)
            lines = self._conversations.get(conversation)
            if lines is not None:
                lines.remove(branch)
                lines.append(branch)
            if branch.open_turn is not None:
                # Whoever resumes at the end of the turn proves that the next prompt repeats it.
                self._settle(branch.open_turn, is_kept=True)
        branch.last_used_s = self._clock()
        self._refresh_main_line(branch)
        return branch

    def adopt(self, conversation: ConversationKey, snapshot: Snapshot) -> None:
        """`snapshot` came back from a colder tier for a turn of this conversation that is about to be opened."""
        if snapshot.kind not in PRIVATE_KINDS:
            return
        branch = Branch(conversation, _family(conversation, None), last_used_s=self._clock())
        self._branches[branch] = None
        if conversation[1] is not None:
            self._conversations.setdefault(conversation, []).append(branch)
        self.keep(branch, snapshot, snapshot.kind)
        self._enforce_limits(conversation)

    def release(self, branch: Branch) -> None:
        """The sequence on `branch` closed."""
        branch.num_active -= 1
        branch.last_used_s = self._clock()
        self._discard_if_idle(branch)

    def keep(self, branch: Branch, snapshot: Snapshot, kind: BoundaryKind) -> None:
        """`branch` published (or found) `snapshot`; what it kept of that kind before is superseded."""
        if kind not in PRIVATE_KINDS:
            return
        if branch.is_abandoned:
            if not snapshot.keepers:
                self._reclaimer.supersede(snapshot)
            return
        kept = branch.kept.setdefault(kind, [])
        if snapshot in kept:
            kept.remove(snapshot)
        kept.append(snapshot)
        self._add_keeper(branch, snapshot)
        limit = 1 if kind == "suspended" else self._max_num_turns
        if limit is not None and len(kept) > limit:
            self._let_go(branch, kept.pop(0))
        if kind != "suspended":
            self._let_go_of_kind(branch, "suspended")

    def begin_turn_end(self, branch: Branch, snapshot: Snapshot, *, is_own: bool) -> TurnHandle:
        """A turn finished at `snapshot`. The turn end before it stays until this one is known to be repeated."""
        handle = TurnHandle(branch, snapshot, is_own, snapshot.num_hits)
        branch.num_turns += 1
        if branch.is_abandoned:
            handle.is_settled = True
            self.keep(branch, snapshot, "turn_end")
            return handle
        if branch.open_turn is not None:
            self._settle(branch.open_turn, is_kept=True)
        branch.open_turn = handle
        self._add_keeper(branch, snapshot)
        self._let_go_of_kind(branch, "suspended")
        return handle

    def end_turn(self, handle: TurnHandle, stable_tokens: int) -> Snapshot | None:
        """Settle a turn: the next prompt repeats `stable_tokens` tokens. Late and repeated calls do nothing.

        Returns a snapshot that is now useless and that the caller should drop. A snapshot that somebody resumed from
        in the meantime was repeated, whatever the caller believes.
        """
        if handle.is_settled:
            return None
        snapshot, branch = handle.snapshot, handle.branch
        is_proven = snapshot.num_pins > 0 or snapshot.num_hits > handle.num_hits
        if snapshot.num_tokens <= stable_tokens or is_proven:
            self._settle(handle, is_kept=True)
            return None
        self._settle(handle, is_kept=False)
        older = branch.kept.get("turn_end", [])
        branch.kept["turn_end"] = [one for one in older if one.num_tokens <= stable_tokens]
        for useless in older:
            self._let_go(branch, useless)
        self._discard_if_idle(branch)
        is_useless = handle.is_own and not snapshot.keepers and snapshot.kind in PRIVATE_KINDS
        return snapshot if is_useless else None

    def forget(self, snapshot: Snapshot) -> None:
        """`snapshot` left the cache."""
        for branch in list(snapshot.keepers):
            for kept in branch.kept.values():
                if snapshot in kept:
                    kept.remove(snapshot)
            if branch.open_turn is not None and branch.open_turn.snapshot is snapshot:
                branch.open_turn.is_settled = True
                branch.open_turn = None
            self._discard_if_idle(branch)
        snapshot.keepers.clear()

    def close_conversation(self, conversation: ConversationKey) -> list[Snapshot]:
        """It will not return. What only it kept is superseded; returned is what the caller should drop of that, which
        is all that no open sequence uses. Its open sequences go on and keep nothing new."""
        return [one for branch in list(self._conversations.get(conversation, ())) for one in self._let_all_go(branch)]

    def expired(self) -> list[Snapshot]:
        """Let go of the lines that nobody used for the time to live; returned is what the caller should drop."""
        useless: list[Snapshot] = []
        while self._ttl_s and self._branches:
            branch = next(iter(self._branches))
            if branch.num_active:
                self._branches.move_to_end(branch)
                break  # the others are looked at with the next call
            if branch.last_used_s + self._ttl_s > self._clock():
                break
            useless += self._let_all_go(branch)
        return useless

    def _let_all_go(self, branch: Branch) -> list[Snapshot]:
        kept = list(dict.fromkeys(branch.snapshots()))
        self._abandon(branch)
        return [one for one in kept if one.is_superseded and not one.num_pins]

    def _continued(self, conversation: ConversationKey, snapshot: Snapshot) -> Branch | None:
        for branch in reversed(snapshot.keepers):
            if branch.conversation == conversation and not branch.num_active and branch.deepest() is snapshot:
                return branch
        return None

    def _refresh_main_line(self, branch: Branch) -> None:
        """A side call shows that its conversation is alive: what it needs must not push out the line of work."""
        lines = self._conversations.get(branch.conversation, [])
        if len(lines) > 1:
            main = max(lines, key=lambda line: line.num_turns)
            if main is not branch:
                for snapshot in main.snapshots():
                    self._reclaimer.touch(snapshot)

    def _settle(self, handle: TurnHandle, *, is_kept: bool) -> None:
        handle.is_settled = True
        branch = handle.branch
        branch.open_turn = None
        if is_kept:
            self.keep(branch, handle.snapshot, "turn_end")
        else:
            self._let_go(branch, handle.snapshot)

    def _add_keeper(self, branch: Branch, snapshot: Snapshot) -> None:
        if branch not in snapshot.keepers:
            snapshot.keepers.append(branch)
        self._reclaimer.revive(snapshot)

    def _let_go_of_kind(self, branch: Branch, kind: BoundaryKind) -> None:
        for snapshot in branch.kept.pop(kind, ()):
            self._let_go(branch, snapshot)

    def _let_go(self, branch: Branch, snapshot: Snapshot) -> None:
        """`branch` dropped one of its references to `snapshot`; it may have others."""
        if any(other is snapshot for other in branch.snapshots()):
            return
        snapshot.keepers.remove(branch)
        if not snapshot.keepers:
            self._reclaimer.supersede(snapshot)

    def _abandon(self, branch: Branch) -> None:
        branch.is_abandoned = True
        if branch.open_turn is not None:
            branch.open_turn.is_settled = True
        let_go, branch.kept, branch.open_turn = branch.snapshots(), {}, None
        for snapshot in dict.fromkeys(let_go):
            self._let_go(branch, snapshot)
        self._remove(branch)

    def _discard_if_idle(self, branch: Branch) -> None:
        """A branch without a sequence goes when it has nothing left, or only what others keep anyway: a fork that
        came to nothing leaves no trace, and a snapshot that many forked from has no endless list of keepers."""
        if branch.num_active:
            return
        inherited = branch.inherited
        if all(snapshot is inherited and len(snapshot.keepers) > 1 for snapshot in branch.snapshots()):
            self._abandon(branch)

    def _remove(self, branch: Branch) -> None:
        self._branches.pop(branch, None)
        lines = self._conversations.get(branch.conversation)
        if lines is not None and branch in lines:
            lines.remove(branch)
            if not lines:
                del self._conversations[branch.conversation]

    def _enforce_limits(self, conversation: ConversationKey) -> None:
        lines = self._conversations.get(conversation, [])
        if len(lines) > self._max_branches:
            idle = [branch for branch in lines if not branch.num_active]
            if idle:
                # Side calls have one turn; the line of work has many and goes last, however old its last turn is.
                self._abandon(min(idle, key=lambda branch: min(branch.num_turns, 2)))
        if len(self._branches) > self._max_total:
            oldest = next((branch for branch in self._branches if not branch.num_active), None)
            if oldest is not None:
                self._abandon(oldest)


def _family(conversation: ConversationKey, snapshot: Snapshot | None) -> Hashable:
    """Who forks from another conversation's own snapshot belongs to its family: a sub-agent, in all likelihood."""
    if snapshot is not None and snapshot.keepers:
        return snapshot.keepers[-1].family
    return conversation if conversation[1] is not None else object()
