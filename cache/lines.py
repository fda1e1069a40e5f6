"""Lines of conversation: who a snapshot waits for, where their turns ended, and how exactly they repeat themselves.

A conversation may have several lines (side calls, sub-agents, forks); a request continues the one whose turn ends its
prompt repeats. Without a conversation id the line that computed the prompt's known prefix is continued if the prompt
repeats it nearly to its end. Tokens decide, never ids alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count

from turnkeep.cache.prefix_history import Mark, PagePrefixes
from turnkeep.cache.return_forecast import Waiter
from turnkeep.cache.snapshot import Snapshot
from turnkeep.cache.turn_end_place import EndHabits

ConversationKey = tuple[str, str]  # cache root, conversation id

# Turn ends that a prompt failed to repeat: 0, 1, 2, 3, 4-7, 8-15, 16-31, more. Prior: ten prompts that repeat all, so
# that a snapshot which a newer one took the place of hurts nobody unless rewrites were really seen.
REWRITE_PRIOR = (10.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
UNSEEN_RETRIES = 0.4  # prior for a reply that is tried again: all that is lost then is the newest words
MAX_LOST_UNTAGGED = 2  # turn ends that a prompt without a tag may lose and still be the same line
MAX_MARKS = 512


@dataclass(slots=True, eq=False)
class Line(Waiter):
    """marks: turn ends that may be resumed from, ascending; they outlive their snapshots.

    snapshots: those that wait for this line's next turn, ascending. reply_class: whether the last reply called a tool
    and whether the next prompt drops it. held: end of the user's last words, in a loop of tool calls whose work the
    template will drop; else 0. num_dropped / num_replies: replies without tool calls.
    """

    number: int = 0
    conversation: ConversationKey | None = None
    marks: list[Mark] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)
    reply_class: tuple[bool, bool] = (False, False)
    held: int = 0
    is_kept_so_far: bool = False  # the last reply stays, and it is not known whether it called a tool
    num_active: int = 0
    num_dropped: int = 0
    num_replies: int = 0
    ends: EndHabits = field(default_factory=EndHabits)

    def num_marks_beyond(self, position: int) -> int:
        return len(self.marks) - bisect_right(self.marks, position, key=lambda mark: mark.position)

    def add_marks(self, marks: list[Mark], stable_tokens: int) -> None:
        """The turn ended so that the next prompt repeats `stable_tokens`: nothing deeper will be asked for."""
        kept = {mark.position: mark for mark in [*self.marks, *marks] if mark.position <= stable_tokens}
        self.marks = [kept[position] for position in sorted(kept)][-MAX_MARKS:]


@dataclass(slots=True, eq=False)
class Trunk(Waiter):
    """A prefix that several lines share; its record outlives its snapshot."""

    mark: Mark | None = None
    snapshot: Snapshot | None = None


class ResumeChance:
    """How far the next prompt repeats a line, learnt over all lines by the class of their last reply."""

    def __init__(self) -> None:
        self._lost: dict[tuple[bool, bool], list[float]] = {}
        self._num_dropped = 0
        self._num_replies = 0

    def observe(self, line: Line, num_lost: int) -> None:
        """The next prompt failed to repeat so many of the line's turn ends."""
        self._weights(line)[_lost_bin(num_lost)] += 1

    def observe_reply(self, line: Line, *, is_dropped: bool) -> None:
        """A reply without tool calls will (not) be dropped from the next prompt by the template."""
        self._num_replies += 1
        self._num_dropped += is_dropped
        line.num_replies += 1
        line.num_dropped += is_dropped

    def drop_rate(self, line: Line) -> float:
        """Chance that the template drops what follows the last user message once the agent has answered."""
        overall = (self._num_dropped + 1) / (self._num_replies + 2)
        return (line.num_dropped + 2 * overall) / (line.num_replies + 2)

    def chance(self, line: Line, position: int, deeper: int | None) -> float:
        """That the next turn resumes at `position`, and not at the next deeper snapshot there is."""
        weights = self._weights(line)

        def reach(place: int) -> float:
            return sum(weights[: _lost_bin(line.num_marks_beyond(place)) + 1])

        return (reach(position) - (reach(deeper) if deeper is not None else 0.0)) / sum(weights)

    def next_lost(self, line: Line) -> float:
        """Chance that the prompt after the next reply repeats everything but that reply."""
        weights = self._weights(line)
        return (weights[1] + UNSEEN_RETRIES) / (sum(weights) + UNSEEN_RETRIES)

    def seen_lost(self, line: Line) -> float:
        """The same by what was seen alone, and 1 before anything was: until it is known how often answers are rewritten
        they may be. Prompts show that whether or not there was a snapshot."""
        weights = self._weights(line)
        return (weights[1] + 1) / (sum(weights) - sum(REWRITE_PRIOR) + 1)

    def _weights(self, line: Line) -> list[float]:
        return self._lost.setdefault(line.reply_class, list(REWRITE_PRIOR))


def _lost_bin(num_lost: int) -> int:
    return num_lost if num_lost < 3 else min(len(REWRITE_PRIOR) - 1, 1 + num_lost.bit_length())


class LineRegistry:
    """All lines, the least recently used idle ones forgotten beyond max_lines."""

    def __init__(self, max_lines: int = 8192, max_per_conversation: int = 4) -> None:
        self._max_lines = max_lines
        self._max_per_conversation = max_per_conversation
        self._lines: OrderedDict[int, Line] = OrderedDict()
        self._conversations: dict[ConversationKey, list[Line]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._lines)

    def lines_of(self, conversation: ConversationKey) -> list[Line]:
        """Most recently used last."""
        return self._conversations.get(conversation, [])

    def main_line(self, line: Line) -> Line:
        """The line of its conversation that did most of the work; side calls have one turn, it has many."""
        if line.conversation is None:
            return line
        return max(self.lines_of(line.conversation), key=lambda other: (other.num_uses, other is line), default=line)

    def find(self, conversation: ConversationKey | None, known_line: int | None, prefixes: PagePrefixes) -> Line:
        """The line that a prompt continues, or a new one. known_line: who computed the known part of the prompt."""
        if conversation is None:
            line = self._lines.get(known_line) if known_line is not None else None
            if line is None or line.conversation is not None or not self._is_continued(line, prefixes):
                line = self._new(None)
        else:
            line = self._find_tagged(conversation, prefixes)
        self._lines.move_to_end(line.number)
        if line.conversation is not None:
            lines = self._conversations[line.conversation]
            lines.remove(line)
            lines.append(line)
        return line

    def is_foreign(self, number: int, line: Line) -> bool:
        """Whether the line of that number is neither `line` nor one of its conversation's. True once it is forgotten:
        nobody knows whose it was."""
        other = self._lines.get(number)
        if other is line:
            return False
        return other is None or other.conversation is None or other.conversation != line.conversation

    def forget_conversation(self, conversation: ConversationKey) -> None:
        for line in self._conversations.pop(conversation, []):
            del self._lines[line.number]
            line.conversation = None

    def _is_continued(self, line: Line, prefixes: PagePrefixes) -> bool:
        num_repeated = sum(prefixes.repeats(mark) for mark in line.marks)
        return not line.num_active and num_repeated > 0 and len(line.marks) - num_repeated <= MAX_LOST_UNTAGGED

    def _find_tagged(self, conversation: ConversationKey, prefixes: PagePrefixes) -> Line:
        lines = self.lines_of(conversation)
        best, best_depth = None, 0
        for line in lines:
            marks = line.marks if line.ends.places is None else [*line.marks, line.ends.places[0]]
            depth = max((mark.position for mark in marks if prefixes.repeats(mark)), default=0)
            if not line.num_active and depth > best_depth:
                best, best_depth = line, depth
        if best is None:
            best = self._new(conversation)
        return best

    def _new(self, conversation: ConversationKey | None) -> Line:
        line = Line(number=next(self._numbers), conversation=conversation)
        self._lines[line.number] = line
        if conversation is not None:
            lines = self._conversations.setdefault(conversation, [])
            if lines:  # who leaves one line for another keeps its habits
                line.mean_log_gaps = dict(lines[-1].mean_log_gaps)
                line.num_dropped, line.num_replies = lines[-1].num_dropped, lines[-1].num_replies
            lines.append(line)
            idle = [other for other in lines if not other.num_active and other is not line]
            if len(lines) > self._max_per_conversation and idle:
                # The line of work goes last, however long its side calls and sub-agents have been at it.
                main = self.main_line(line)
                self._forget(next((other for other in idle if other is not main), idle[0]))
        if len(self._lines) > self._max_lines:
            oldest = next((other for other in self._lines.values() if not other.num_active and other is not line), None)
            if oldest is not None:
                self._forget(oldest)
        return line

    def _forget(self, line: Line) -> None:
        self._lines.pop(line.number, None)
        if line.conversation is not None:
            lines = self._conversations[line.conversation]
            lines.remove(line)
            if not lines:
                del self._conversations[line.conversation]
            line.conversation = None
