"""How deep drafting would pay at the next step, judged by what was proposed lately.

Keeps the path probabilities of recent nodes, by depth, as those of an average decoding request. For each depth the
best number of them is found as for a step (see tree_budget.py), with the time that drafting so deep takes on top.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from turnkeep.scheduler.cost_model import DraftLoad, StepCost
from turnkeep.scheduler.proposed_nodes import Float64Array, Int64Array

MAX_SAMPLES, MAX_NODES = 8, 384  # steps that are remembered, and nodes of them
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
        self._samples: deque[tuple[float, Int64Array, Float64Array]] = deque(maxlen=MAX_SAMPLES)
        self._num_nodes = 0
        self._offset = 0
        self.has_news = False  # something was proposed since the last judgement

    def saw(self, num_decodes: int, depths: Int64Array, paths: Float64Array) -> None:
        """The nodes that were proposed for a step with so many decodes, [N] each, the worthiest first."""
        self.has_news = True
        num_alike = float(num_decodes)
        every = -(-len(paths) // MAX_NODES)
        if every > 1:  # some of each depth stand for all of them, others every time
            self._offset = (self._offset + 1) % every
            seen = depths.astype(np.int16).argsort(kind="stable")[self._offset :: every]
            depths, paths, num_alike = depths[seen], paths[seen], num_decodes / every
        if len(self._samples) == MAX_SAMPLES:
            self._num_nodes -= len(self._samples[0][1])
        self._samples.append((num_alike, depths, paths))
        self._num_nodes += len(depths)
        while self._num_nodes > MAX_NODES and len(self._samples) > 1:
            self._num_nodes -= len(self._samples.popleft()[1])

    @property
    def num_samples(self) -> int:
        """Steps that it knows of."""
        return len(self._samples)

    def forget(self) -> None:
        """What was proposed lately says nothing any more."""
        self._samples.clear()
        self._num_nodes = 0

    def best(self, num_decodes: int, num_pairs: float) -> Outlook:
        """For a step with so many decodes and (query, key) pairs of them."""
        self.has_news = False
        if not self._samples:
            return Outlook(0, 0.0)
        share, depths, paths = self._average(num_decodes)
        order = (-paths).argsort()
        levels = np.arange(1, self._max_depth + 1)
        # [D, N]: with drafts so deep, the n best nodes; those that lie deeper add nothing.
        is_within = depths[order] <= levels[:, None]
        numbers = share * is_within.cumsum(axis=1)
        expected = share * (is_within * paths[order]).cumsum(axis=1)
        drafting_s = np.array(
            [
                self._cost.draft_s(DraftLoad(depth, num_decodes, round(number)))
                for depth, number in zip(levels.tolist(), numbers[:, -1].tolist(), strict=True)
            ]
        )
        steps_s = self._cost.decode_s(num_decodes, num_pairs, numbers) + drafting_s[:, None]
        rates = (num_decodes + expected) / steps_s
        rates[numbers == 0] = 0.0
        places = rates.argmax(axis=1)
        plain_s = float(self._cost.decode_s(num_decodes, num_pairs, np.zeros(1))[0])
        best, best_rate = Outlook(0, 0.0), num_decodes / plain_s
        for depth, place in enumerate(places.tolist(), start=1):
            rate = float(rates[depth - 1, place])
            is_free = best.depth == 0 and drafting_s[depth - 1] < CHEAP_DRAFTING * plain_s
            if rate > best_rate or is_free:
                best, best_rate = Outlook(depth, float(numbers[depth - 1, place]) / num_decodes), rate
        return best

    def _average(self, num_decodes: int) -> tuple[float, Int64Array, Float64Array]:
        """Nodes [N] by depth and probability, and how many nodes of a step with so many decodes each stands for.

        Levels that were not proposed lately go on as the ones above did.
        """
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
