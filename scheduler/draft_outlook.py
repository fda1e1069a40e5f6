"""How deep drafting would pay at the next step, judged by what was proposed lately.

Keeps the path probabilities of recent nodes, by depth, as those of an average decoding request. For each depth the
best number of them is found as for a step (see tree_budget.py), with the time that drafting so deep takes on top.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from turnkeep.scheduler.acceptance import Float64Array, Int64Array
from turnkeep.scheduler.cost_model import DraftLoad, StepCost

UNKNOWN_ACCEPTANCE = 0.9  # of a node given the one above, before any was seen: deep drafts are tried first
MAX_SAMPLES, MAX_NODES = 16, 384  # steps that are remembered, and nodes of them
CHEAP_DRAFTING = 0.02  # of a plain step: drafting that costs less is always done, its result is judged when it is there


@dataclass(slots=True, frozen=True)
class Outlook:
    """Levels to draft, 0 for none, and nodes of a request that would then be verified, on average."""

    depth: int
    nodes_per_request: float


class DraftOutlook:
    """`max_depth`: of any draft."""

    def __init__(self, cost: StepCost, max_depth: int) -> None:
        self._cost = cost
        self._max_depth = max_depth
        self._samples: deque[tuple[int, Int64Array, Float64Array]] = deque(maxlen=MAX_SAMPLES)
        self._num_nodes = 0

    def saw(self, num_decodes: int, depths: Int64Array, paths: Float64Array) -> None:
        """The nodes that were proposed for a step with so many decodes, [N] each."""
        if len(self._samples) == MAX_SAMPLES:
            self._num_nodes -= len(self._samples[0][1])
        self._samples.append((num_decodes, depths, paths))
        self._num_nodes += len(depths)
        while self._num_nodes > MAX_NODES and len(self._samples) > 1:
            self._num_nodes -= len(self._samples.popleft()[1])

    def best(self, num_decodes: int, num_pairs: float) -> Outlook:
        """For a step with so many decodes and (query, key) pairs of them."""
        share, depths, paths = self._average(num_decodes)
        order = np.argsort(-paths)
        depths, paths = depths[order], paths[order]
        # Seconds of a step at whole numbers of nodes; the average request has fractions of them.
        steps = self._cost.decode_s(num_decodes, num_pairs, math.ceil(len(paths) * share) + 1)
        places = np.arange(len(steps))
        best, best_rate = Outlook(0, 0.0), num_decodes / steps[0]
        for depth in range(1, self._max_depth + 1):
            own = paths[depths <= depth]
            numbers = share * np.arange(1, len(own) + 1)
            drafting_s = self._cost.draft_s(DraftLoad(depth, num_decodes, round(share * len(own))))
            rates = (num_decodes + share * np.cumsum(own)) / (np.interp(numbers, places, steps) + drafting_s)
            number = int(rates.argmax())
            is_free = best.depth == 0 and drafting_s < CHEAP_DRAFTING * steps[0]
            if rates[number] > best_rate or is_free:
                best, best_rate = Outlook(depth, float(numbers[number]) / num_decodes), float(rates[number])
        return best

    def _average(self, num_decodes: int) -> tuple[float, Int64Array, Float64Array]:
        """Nodes [N] by depth and probability, and how many nodes of a step with so many decodes each stands for.

        Levels that were not proposed lately go on as the ones above did.
        """
        if not self._samples:
            depths = np.arange(1, self._max_depth + 1, dtype=np.int64)
            return float(num_decodes), depths, np.power(UNKNOWN_ACCEPTANCE, depths.astype(np.float64))
        depths = np.concatenate([sample[1] for sample in self._samples])
        paths = np.concatenate([sample[2] for sample in self._samples])
        sums = np.bincount(depths, weights=paths)
        last = len(sums) - 1
        above = sums[-2] if last > 1 else sum(sample[0] for sample in self._samples)
        ratio = min(float(sums[-1] / above), 1.0) if above > 0 else 0.0
        level = paths[depths == last]
        deeper = range(last + 1, self._max_depth + 1)
        all_depths = np.concatenate((depths, *(np.full(len(level), depth) for depth in deeper)))
        all_paths = np.concatenate((paths, *(level * ratio ** (depth - last) for depth in deeper)))
        share = num_decodes / sum(sample[0] for sample in self._samples)
        return share, all_depths, all_paths
