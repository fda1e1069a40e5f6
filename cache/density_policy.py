"""Follows requests and tells the order by density who waits for each snapshot, and where another one is worth a row.

The cache manager reports a sequence's arrival, its snapshots, its end and what the next prompt will repeat of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from turnkeep.cache.boundary import Boundary, BoundaryKind
from turnkeep.cache.branch_forecast import BranchForecast, FirstPrompt, LikelyBranch
from turnkeep.cache.density import DensityOrder, Record
from turnkeep.cache.encoded_tokens import TOKEN_BYTES, TokenIds
from turnkeep.cache.eviction import Evictable, Need
from turnkeep.cache.lines import ConversationKey, Line, LineRegistry, ResumeChance, Trunk
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.prefix_history import Mark, MarkIndex, PagePrefixes, PrefixHistory
from turnkeep.cache.prefix_match import MIN_BRANCH_TOKENS, PrefixMatch
from turnkeep.cache.return_forecast import ReturnForecast, WaitKind
from turnkeep.cache.sequence_cache import SequenceCache
from turnkeep.cache.snapshot import PRIVATE_KINDS, Snapshot
from turnkeep.cache.spares import SpareRule
from turnkeep.cache.spec import CacheSpec
from turnkeep.cache.turn_end_place import TurnEndPlaces

ADMIT_SHARE = 0.2  # of the density evicted lately: what promises less is not written
SPARE_SHARE = 1.0  # the same for one that is used only if the newer one is not


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a line, from its arrival until it is known how much of it the next prompt repeats."""

    line: Line
    prefixes: PagePrefixes
    num_known_pages: int
    resumed: int
    starts: list[Mark] = field(default_factory=list)  # ends of the user's words that were asked to be kept
    likely: dict[int, LikelyBranch] = field(default_factory=dict)  # by position
    spare: int = 0  # end of the prompt, where it is wanted in case that nothing else can be resumed from
    position: int = 0  # computed tokens at its end


class DensityPolicy:
    """An EvictionPolicy and a TurnObserver. `cost` may go on being measured while it is in use."""

    def __init__(self, spec: CacheSpec, clock: Callable[[], float], cost: PrefillCost | None = None) -> None:
        self.cost = cost if cost is not None else PrefillCost()
        self._page_size = spec.page_size
        self._clock = clock
        self._order = DensityOrder(spec, self.cost, self._value)
        self._forecast = ReturnForecast()
        self._branches = BranchForecast(spec.page_size, self.cost, self._forecast)
        self._chance = ResumeChance()
        self._lines = LineRegistry()
        self._spares = SpareRule(spec, self.cost)
        self._ends = TurnEndPlaces(spec.page_size, self.cost)
        self._history = PrefixHistory()
        self._trunks: MarkIndex[Trunk] = MarkIndex()
        self._turns: dict[SequenceCache, Turn] = {}

    def __len__(self) -> int:
        return len(self._order)

    # EvictionPolicy

    def added(self, item: Evictable) -> None:
        self._order.added(item)

    def removed(self, item: Evictable) -> None:
        self._order.removed(item)

    def changed(self, item: Evictable) -> None:
        self._order.changed(item)

    def victim(self, need: Need) -> Evictable | None:
        self._age()
        return self._order.victim(need)

    # TurnObserver

    def arrived(
        self, seq: SequenceCache, match: PrefixMatch, conversation: ConversationKey | None
    ) -> tuple[Boundary, ...]:
        self._age()
        prefixes = PagePrefixes(
            match.cache_root, match.encoded, self._page_size, match.path, match.known_digests, match.next_digests
        )
        num_known = self._history.num_known_pages(prefixes)
        known_line = self._history.line_of(prefixes.digests[num_known]) if num_known else None
        line = self._lines.find(conversation, known_line, prefixes)
        trunks = list(self._trunks.on_path(prefixes))
        self._returned(line, prefixes)
        turn = self._turns[seq] = Turn(line, prefixes, num_known, match.num_tokens)
        line.num_active += 1
        seq.may_end_early = self._ends.may_be_cut(line.ends, turn.resumed, prefixes.num_tokens)
        if conversation is not None:
            self._leave_others(line, conversation)
        self._use_trunk(line, match.snapshot, [trunk for _, trunk in trunks])
        depths = [mark.position for mark, _ in trunks[-1:]] + [mark.position for mark in line.marks[-1:]]
        seen = max([num_known * self._page_size, match.num_matched_tokens, *depths])
        is_foreign = seen > 0 and (known_line is None or self._lines.is_foreign(known_line, line))
        if known_line is not None and known_line != line.number:
            if is_foreign:
                used = max((mark.position for mark, _ in trunks), default=0)
                self._branches.left(known_line, seen, used, self._clock())
            else:
                self._remember_parting(turn, seen)
        if not line.marks:
            likely = self._branches.opened(line, max(seen, turn.resumed), turn.prefixes.num_tokens, self._clock())
            turn.likely = {branch.position: branch for branch in likely}
        return self._wanted(turn, seen, trunks, is_foreign=is_foreign)

    def wants(self, seq: SequenceCache, position: int, kind: BoundaryKind) -> bool:
        turn = self._turns.get(seq)
        if turn is None or kind not in ("trunk", "branch", "likely_branch", "turn_start", "turn_end"):
            return True
        mark = turn.prefixes.mark(position) if position <= turn.prefixes.num_tokens else None
        share, is_guess = ADMIT_SHARE, False
        if kind == "likely_branch":
            likely = turn.likely.get(position)
            share, value = SPARE_SHARE, self._branches.index(likely) if likely is not None else 0.0
        elif kind in ("trunk", "branch"):
            trunk = self._trunks.get(mark) if mark is not None else None
            value = self._forecast.first_index("trunk") if trunk is None else self._forecast.index(trunk)
            if kind == "trunk" and (trunk is None or not trunk.num_uses):
                share = SPARE_SHARE  # named by the template, and no other conversation was ever seen to share it
        else:
            if kind == "turn_start" and mark is not None and self._ends_words(turn, position):
                self._user_spoke(turn, mark)
            drop_rate, chance = self._chance.drop_rate(turn.line), self._chance.next_lost(turn.line)
            is_needed = kind == "turn_start" and drop_rate >= 0.5
            is_spare = kind == "turn_start" and (not is_needed or position == turn.spare)
            if is_spare and self._has_near_spare(turn, seq, position):
                return False
            if is_needed:
                chance = max(chance, drop_rate)
            else:
                share, is_guess = SPARE_SHARE, is_spare
            value = self._forecast.index(turn.line) * chance
        base = max([turn.resumed, *(export.position for export in seq.exports if export.position < position)])
        if is_guess and not self._spares.pays(self._chance.seen_lost(turn.line), base, position):
            return False
        if not self._order.is_full:
            return True
        return self._order.expected_density(value, base, position) >= share * self._order.level

    def published(self, seq: SequenceCache, snapshot: Snapshot) -> None:
        turn = self._turns.get(seq)
        record = self._order.record(snapshot)
        if turn is None or record.owner is not None:
            return
        turn.prefixes.extend(seq.encoded)
        record.mark = turn.prefixes.mark(snapshot.num_tokens)
        if snapshot.kind == "likely_branch":
            record.likely = turn.likely.get(snapshot.num_tokens)
        if snapshot.kind in PRIVATE_KINDS or record.likely is not None:
            self._give_to_line(turn.line, snapshot, record)
        else:
            self._give_to_trunk(snapshot, record)

    def prepared(self, seq: SequenceCache, snapshot: Snapshot) -> None:
        record, conversation = self._order.record(snapshot), seq.conversation
        if conversation is None or record.owner is not None or not self._lines.lines_of(conversation):
            return
        line = self._lines.lines_of(conversation)[-1]
        record.mark = PagePrefixes(conversation[0], seq.encoded, self._page_size, seq.path).mark(snapshot.num_tokens)
        line.marks = [mark for mark in line.marks if mark.position < snapshot.num_tokens] + [record.mark]
        self._give_to_line(line, snapshot, record)

    def turn_end(self, seq: SequenceCache, token_ids: TokenIds) -> int:
        turn = self._turns.get(seq)
        if turn is None:
            return seq.num_computed_tokens
        places = [turn.resumed, *(snapshot.num_tokens for snapshot in turn.line.snapshots)]
        return self._ends.ended(turn.line.ends, turn.prefixes, seq, token_ids, places)

    def finished(self, seq: SequenceCache, *, is_suspended: bool) -> object | None:
        turn = self._turns.pop(seq, None)
        if turn is None:
            return None
        line, prefixes = turn.line, turn.prefixes
        turn.position = seq.num_computed_tokens
        prefixes.extend(bytes(seq.encoded[: turn.position * TOKEN_BYTES]))
        self._history.remember(prefixes, turn.num_known_pages, line.number)
        seq.digests = prefixes.digests
        self._order.look_again()  # here, where nobody waits, and not when the next prompt comes
        line.num_active -= 1
        line.num_uses += not is_suspended
        line.add_marks([prefixes.mark(turn.position)], turn.position)
        self._wait(line, "suspended" if is_suspended else "text")
        return turn

    def settled(self, turn: object, stable_tokens: int, *, has_tool_call: bool | None) -> None:
        assert isinstance(turn, Turn)
        line = turn.line
        if line.num_active or not line.is_waiting:
            return  # the next turn came first and showed what it repeats
        left = self._ends.settled(line.ends, stable_tokens)
        is_dropped = stable_tokens < turn.position
        if is_dropped or has_tool_call is False:
            self._chance.observe_reply(line, is_dropped=is_dropped)
        line.is_kept_so_far = not is_dropped and has_tool_call is None
        is_held = is_dropped or self._chance.drop_rate(line) >= 0.5
        line.add_marks([*(turn.starts if is_held else []), *([left] if left is not None else [])], stable_tokens)
        if is_dropped or has_tool_call is False or not is_held:
            line.held = 0
        elif turn.starts:
            line.held = turn.starts[-1].position
        line.reply_class = (bool(has_tool_call), is_dropped)
        for snapshot in [snapshot for snapshot in line.snapshots if snapshot.num_tokens > stable_tokens]:
            self._give_up(line, snapshot)
        self._wait(line, "tool" if has_tool_call else "text")

    def closed(self, seq: SequenceCache) -> None:
        turn = self._turns.pop(seq, None)
        if turn is None:
            return
        turn.line.num_active -= 1
        if not turn.line.num_active:
            self._wait(turn.line, turn.line.kind or "text")

    def conversation_closed(self, conversation: ConversationKey) -> None:
        for line in list(self._lines.lines_of(conversation)):
            for snapshot in list(line.snapshots):
                self._give_up(line, snapshot)
            self._forecast.give_up(line)
        self._lines.forget_conversation(conversation)

    # Value of a snapshot, without seconds and bytes

    def _value(self, snapshot: Snapshot, record: Record) -> float:
        owner = record.owner
        if record.is_useless:
            return 0.0
        if owner is None:
            return self._forecast.first_index("text")
        index = self._forecast.index(owner)
        if isinstance(owner, Trunk):
            return index
        if owner.num_uses < 2 and owner.kind == "text":
            main = self._lines.main_line(owner)
            if main is not owner and main.snapshots:
                index = min(index, self._forecast.index(main))  # a side call never outlives the line of work
        place = owner.snapshots.index(snapshot)
        deeper = owner.snapshots[place + 1].num_tokens if place + 1 < len(owner.snapshots) else None
        chance = self._chance.chance(owner, snapshot.num_tokens, deeper)
        if snapshot.num_tokens == owner.held:
            # When the agent has answered at last, the template drops all its work since the user's last words.
            chance = max(chance, self._chance.drop_rate(owner))
        return index * chance + (self._branches.index(record.likely) if record.likely is not None else 0.0)

    # Parts

    def _age(self) -> None:
        for waiter in self._forecast.advance(self._clock()):
            owner = waiter.line if isinstance(waiter, FirstPrompt) else waiter
            self._revalue(owner if isinstance(owner, Line | Trunk) else None)

    def _wait(self, owner: Line | Trunk, kind: WaitKind) -> None:
        self._forecast.wait(owner, kind, self._clock())
        self._revalue(owner)

    def _revalue(self, owner: Line | Trunk | None) -> None:
        snapshots: list[Snapshot] = []
        if isinstance(owner, Line):
            snapshots = owner.snapshots
        elif owner is not None and owner.snapshot is not None:
            snapshots = [owner.snapshot]
        for snapshot in snapshots:
            self._order.push(snapshot, self._order.records[snapshot])

    def _returned(self, line: Line, prefixes: PagePrefixes) -> None:
        """The line's next prompt is here: learn when it came and how much it repeats."""
        if not line.is_waiting:
            return
        kind = line.kind
        self._ends.returned(line.ends, prefixes)
        self._forecast.returned(line, self._clock())
        repeated = [mark for mark in line.marks if prefixes.repeats(mark)]
        if kind in ("tool", "text"):
            self._chance.observe(line, len(line.marks) - len(repeated))
        line.marks = repeated
        for snapshot in list(line.snapshots):
            mark = self._order.records[snapshot].mark
            if mark is not None and not prefixes.repeats(mark):
                self._give_up(line, snapshot)

    def _leave_others(self, line: Line, conversation: ConversationKey) -> None:
        """The conversation goes on elsewhere: its other lines may be finished sub-agents, or wait for one.

        Every such sign of life renews the wait of the line that does the work.
        """
        main = self._lines.main_line(line)
        for other in self._lines.lines_of(conversation):
            if (
                other is not line
                and not other.num_active
                and other.is_waiting
                and (other.kind != "left" or other is main)
            ):
                self._wait(other, "left")

    def _use_trunk(self, line: Line, snapshot: Snapshot | None, trunks: list[Trunk]) -> None:
        """What served another line than its own is shared from now on; a use of a shared prefix is learnt from."""
        used = None
        if snapshot is not None:
            record = self._order.record(snapshot)
            if isinstance(record.owner, Line) and record.owner is not line and record.mark is not None:
                record.owner.snapshots.remove(snapshot)
                self._revalue(record.owner)
                record.owner = None
                self._give_to_trunk(snapshot, record)
            if isinstance(record.owner, Trunk):
                used = record.owner
        if trunks and not line.num_uses:
            used = trunks[-1]
        if used is not None:
            self._forecast.returned(used, self._clock())
            used.num_uses += 1
            if used.mark is not None:
                self._trunks.put(used.mark, used)
            self._wait(used, "trunk")

    def _remember_parting(self, turn: Turn, position: int) -> None:
        """A conversation left its own line. Mostly it rewrote that one, and nobody will come to this place again; a
        snapshot is for the next of its lines that leaves here, as sub-agents do that start from the same words."""
        if MIN_BRANCH_TOKENS <= position < turn.prefixes.num_tokens:
            mark = turn.prefixes.mark(position)
            if self._trunks.get(mark) is None:
                self._trunks.put(mark, Trunk(mark=mark))

    def _ends_words(self, turn: Turn, position: int) -> bool:
        """Whether the user's words end here. The prompt's end, which was wanted in case that all else is lost, stands
        in for them only where the template named no end of theirs, and where it was not a tool that answered."""
        return position != turn.spare or (not turn.starts and not turn.line.reply_class[0])

    def _user_spoke(self, turn: Turn, mark: Mark) -> None:
        """The user's words end at `mark`."""
        turn.starts.append(mark)
        if turn.line.is_kept_so_far:  # the reply before them stayed
            turn.line.is_kept_so_far = False
            self._chance.observe_reply(turn.line, is_dropped=False)

    def _wanted(
        self, turn: Turn, seen: int, trunks: list[tuple[Mark, Trunk]], *, is_foreign: bool
    ) -> tuple[Boundary, ...]:
        num_tokens = turn.prefixes.num_tokens
        wanted: dict[int, BoundaryKind] = {}
        marks = [mark.position for mark in turn.line.marks if mark.position > turn.resumed]
        if marks:
            wanted[marks[-1]] = "turn_end"
        elif not self._spares.is_near([turn.resumed, *(one.num_tokens for one in turn.line.snapshots)], num_tokens):
            wanted[num_tokens] = "turn_start"
            turn.spare = num_tokens
        if is_foreign and seen - turn.resumed >= MIN_BRANCH_TOKENS and seen < num_tokens:
            wanted.setdefault(seen, "branch")
        for position in turn.likely:
            wanted.setdefault(position, "likely_branch")
        for mark, trunk in trunks:
            if trunk.num_uses and turn.resumed < mark.position < num_tokens:
                wanted.setdefault(mark.position, "branch")
        return tuple(Boundary(position, kind) for position, kind in sorted(wanted.items()))

    def _has_near_spare(self, turn: Turn, seq: SequenceCache, position: int) -> bool:
        """Whether something else is there to resume from if the turn's end is not repeated, so close before `position`
        that the tokens in between take no more room than another row."""
        exports = [export.position for export in seq.exports if export.kind in PRIVATE_KINDS]
        return self._spares.is_near([*exports, *(snapshot.num_tokens for snapshot in turn.line.snapshots)], position)

    def _give_to_line(self, line: Line, snapshot: Snapshot, record: Record) -> None:
        record.owner = line
        line.snapshots.append(snapshot)
        line.snapshots.sort(key=lambda other: other.num_tokens)
        self._order.disturb(snapshot)
        for other in line.snapshots:
            self._order.disturb(other)

    def _give_to_trunk(self, snapshot: Snapshot, record: Record) -> None:
        assert record.mark is not None
        record.likely = None  # what others may ask for is now known to be asked for
        trunk = self._trunks.get(record.mark) or Trunk(mark=record.mark)
        trunk.snapshot = snapshot
        record.owner = trunk
        self._trunks.put(record.mark, trunk)
        if not trunk.is_waiting:
            self._forecast.wait(trunk, "trunk", self._clock())
        self._order.disturb(snapshot)

    def _give_up(self, line: Line, snapshot: Snapshot) -> None:
        """Nobody will ask for it any more: the first to go."""
        line.snapshots.remove(snapshot)
        record = self._order.records[snapshot]
        record.owner = None
        record.is_useless = True
        self._order.push(snapshot, record)
