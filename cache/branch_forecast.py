"""Where will others leave a prompt that nobody had asked before? Snapshots there serve its second use, not the third.

Learnt online from every prompt that left the first prompt of another line where nobody had left it yet. The history of
prefixes shows that whether or not a snapshot was there, so nothing is ever written in order to learn. Where it does
not happen nothing is planned. Knows nothing of pools, pages in the tree or snapshots.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from turnkeep.cache.lines import Line
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.prefix_match import MIN_BRANCH_TOKENS
from turnkeep.cache.return_forecast import ReturnForecast, Waiter

# What it costs to write a snapshot, in tokens of prefill: 15 exports in a scan of 2,000 tokens take about 5 % of it
# (benchmarks/state_exports.py), and a scan is only a part of a step.
EXPORT_TOKENS = 8
PRIOR_PROMPTS = 10.0  # worth of prompts that nobody left; they go first, until some were really seen to be left
MAX_PROMPTS = 4096  # after so many half of what was counted is forgotten: habits change in a long uptime
MAX_WAITING = 8192  # first prompts that are watched

ZoneKey = tuple[Literal["start", "end"], int]


@dataclass(slots=True, frozen=True)
class Zone:
    """Tokens [start, end) after the base of a prompt."""

    start: int
    end: int
    key: ZoneKey


@dataclass(slots=True, eq=False)
class FirstPrompt(Waiter):
    """The prompt that began `line`: it computed [base, end) itself, and waits for somebody to leave it in there."""

    line: Line | None = None
    base: int = 0
    end: int = 0


@dataclass(slots=True, frozen=True, eq=False)
class LikelyBranch:
    """A position of a prompt that is worth a snapshot. share: of those who leave the prompt, how many would resume
    here, over what is usual for a prompt (so that long ones can count more than one)."""

    position: int
    prompt: FirstPrompt
    share: float


class BranchForecast:
    """Chances by zone: distance from the nearer end of what a prompt computed, in powers of two of pages."""

    def __init__(self, page_size: int, cost: PrefillCost, returns: ReturnForecast) -> None:
        """returns: forecasts when a prompt will be left, by the kind of wait `branch`."""
        self._page_size = page_size
        self._cost = cost
        self._returns = returns
        self._num_prompts = 0.0
        self._num_exposed: defaultdict[ZoneKey, float] = defaultdict(float)  # prompts that have such a zone
        self._num_left: defaultdict[ZoneKey, float] = defaultdict(float)  # times one was left there
        self._waiting: OrderedDict[int, FirstPrompt] = OrderedDict()

    def opened(self, line: Line, base: int, end: int, now_s: float) -> list[LikelyBranch]:
        """A line begins with a prompt of which [base, end) is new to everybody. Where to take snapshots, ascending.

        O(log2(prompt)^2).
        """
        if end - base < 2 * self._page_size:
            return []
        prompt = FirstPrompt(line=line, base=base, end=end)
        zones = self._zones(end - base)
        planned = self._plan(prompt, zones)
        self._num_prompts += 1
        for zone in zones:
            self._num_exposed[zone.key] += 1
        if self._num_prompts > MAX_PROMPTS:
            self._forget_half()
        before = self._waiting.pop(line.number, None)
        if before is not None:  # the line was rewritten from its start: nobody will leave what it began with
            self._returns.give_up(before)
        self._returns.wait(prompt, "branch", now_s)
        self._waiting[line.number] = prompt
        if len(self._waiting) > MAX_WAITING:
            self._returns.give_up(self._waiting.popitem(last=False)[1])
        return planned

    def left(self, line_number: int, position: int, resumable: int, now_s: float) -> None:
        """Another line's prompt left at `position` what this line had computed first.

        resumable: deepest position before it where others were seen to leave. Ignored near there, outside of the
        line's first prompt, and where nothing is known of the line.
        """
        prompt = self._waiting.get(line_number)
        if prompt is None or not prompt.base < position < prompt.end:
            return
        if position - max(prompt.base, resumable) < MIN_BRANCH_TOKENS:
            return
        length = position - prompt.base
        zone = next(zone for zone in self._zones(prompt.end - prompt.base) if zone.start <= length < zone.end)
        self._num_left[zone.key] += 1
        self._returns.returned(prompt, now_s)
        prompt.num_uses += 1
        self._returns.wait(prompt, "branch", now_s)

    def index(self, branch: LikelyBranch) -> float:
        """Return index of those who would resume at a likely branch."""
        return self._returns.index(branch.prompt) * branch.share

    def _zones(self, num_tokens: int) -> list[Zone]:
        """They cover [0, num_tokens), ascending."""
        half = num_tokens / 2
        edges, width = [0], self._page_size
        while width < half:
            edges.append(width)
            width *= 2
        middle = num_tokens - num_tokens // 2
        left = [Zone(start, end, ("start", number)) for number, (start, end) in enumerate(pairwise([*edges, middle]))]
        ends = [*edges, num_tokens // 2]
        right = [
            Zone(num_tokens - far, num_tokens - near, ("end", number))
            for number, (near, far) in enumerate(pairwise(ends))
        ]
        return [zone for zone in [*left, *reversed(right)] if zone.start < zone.end]

    def _chance(self, key: ZoneKey) -> float:
        return self._num_left.get(key, 0.0) / (self._num_exposed.get(key, 0.0) + PRIOR_PROMPTS)

    def _plan(self, prompt: FirstPrompt, zones: list[Zone]) -> list[LikelyBranch]:
        """The set of zone starts with the most expected seconds saved over seconds spent on writing.

        Who leaves in a zone resumes at the deepest planned start at or before it: best sets are found from the end.
        """
        if not self._num_left:
            return []
        chances = [self._chance(zone.key) for zone in zones]
        price_s = self._cost.seconds(0, EXPORT_TOKENS)
        places = [(prompt.base + zone.start) // self._page_size * self._page_size for zone in zones]
        num_zones = len(zones)
        best, follower = [0.0] * (num_zones + 1), [num_zones] * (num_zones + 1)
        for first in range(num_zones - 1, -1, -1):
            saved_s = self._cost.seconds(prompt.base, places[first])
            if places[first] - prompt.base < MIN_BRANCH_TOKENS:
                break
            chance, gain, choice = 0.0, -1.0, num_zones
            for after in range(first + 1, num_zones + 1):
                chance += chances[after - 1]
                if chance * saved_s + best[after] > gain:
                    gain, choice = chance * saved_s + best[after], after
            best[first], follower[first] = gain - price_s, choice
        usual = max(sum(self._num_left.values()) / (self._num_prompts + PRIOR_PROMPTS), 1e-9)
        place = max(range(num_zones), key=lambda index: best[index])
        planned: list[LikelyBranch] = []
        if best[place] <= 0:
            return planned
        while place < num_zones:
            share = sum(chances[place : follower[place]]) / usual
            planned.append(LikelyBranch(places[place], prompt, share))
            place = follower[place]
        return planned

    def _forget_half(self) -> None:
        self._num_prompts /= 2
        for counts in (self._num_exposed, self._num_left):
            for key in counts:
                counts[key] /= 2
