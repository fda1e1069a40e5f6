"""How often drafts are right: calibrated probabilities of nodes, counts by depth, and drafts that never are.

A drafter's probability for a node given its parent is replaced by the share of such nodes that were right (bins by
depth and probability, shrunk to what the drafter said), times a factor of the request's own, shrunk to one. Both are
needed: a common bias would ruin the choice of how many nodes pay, different ones between requests whose nodes.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from turnkeep.scheduler.drafts import DraftTree
from turnkeep.scheduler.proposed_nodes import Flags, Float64Array, Int64Array, ProposedNodes

log = logging.getLogger(__name__)

MAX_DEPTH = 16  # deeper nodes share a row of the table
EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98])
NUM_BINS = len(EDGES) + 1
TABLE_TRUST = 8.0  # nodes after which a bin counts as much as the drafter's word
TABLE_LIMIT = 512.0  # nodes of a bin, which is halved then: what was learnt long ago fades
REQUEST_TRUST = 3.0  # expected nodes after which a request's own factor counts as much as one
REQUEST_WINDOW = 8.0  # expected nodes that it remembers: an answer may turn to what the drafter does not know
MAX_FACTOR = 1.5

WINDOW_STEPS, WINDOW_EXPECTED = 32, 6.0  # with nothing accepted although so much was promised, a request rests
REST_STEPS, MAX_REST_STEPS = 64, 1024  # twice as long every time
ALARM_STEPS, ALARM_EXPECTED = 128, 40.0  # the same of all requests together


@dataclass(slots=True)
class AcceptanceCounts:
    """Since the engine started; by depth below the root, 1 for a child of it."""

    num_nodes: dict[int, int] = field(default_factory=dict)
    num_accepted: dict[int, int] = field(default_factory=dict)
    num_resets: int = 0
    num_alarms: int = 0


@dataclass(slots=True)
class _Promise:
    """What was promised, in steps and in nodes, since something was accepted."""

    num_steps: int = 0
    expected: float = 0.0

    def add(self, expected: float, num_accepted: int, num_steps: int = 1) -> None:
        if num_accepted:
            self.num_steps, self.expected = 0, 0.0
        else:
            self.num_steps += num_steps
            self.expected += expected

    def is_broken(self, num_steps: int, expected: float) -> bool:
        return self.num_steps >= num_steps and self.expected >= expected


@dataclass(slots=True)
class _Request:
    expected: float = 0.0
    accepted: float = 0.0
    promise: _Promise = field(default_factory=_Promise)
    rest_steps: int = 0
    next_rest: int = REST_STEPS
    factor: float = 1.0


class AcceptanceStatistics:
    """Requests are known by their ids, from their first draft until `forget`."""

    def __init__(self) -> None:
        self.counts = AcceptanceCounts()
        self._requests: dict[str, _Request] = {}
        self._promise = _Promise()
        self._trials = np.zeros((MAX_DEPTH + 1) * NUM_BINS)  # nodes put to the test, by depth and bin
        self._hits = np.zeros_like(self._trials)

    def rests(self, request_id: str) -> bool:
        """The request's drafts were never right lately and are not verified for a while. Counts one step of that."""
        request = self._requests.get(request_id)
        if request is None or request.rest_steps == 0:
            return False
        request.rest_steps -= 1
        return True

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)

    def path_probabilities(self, nodes: ProposedNodes, request_ids: Sequence[str]) -> Float64Array:
        """That each node and all above it are right, as experience has it: [N], never more than the parent's."""
        own = map(self._requests.get, request_ids)
        factors = np.array([1.0 if request is None else request.factor for request in own])
        edges = np.minimum(self._rates(nodes.edges, _cells(nodes)) * factors[nodes.trees], 1.0)
        edges /= np.maximum(nodes.sums_of_siblings(edges), 1.0)  # at most one of them is right
        return nodes.products(edges)

    def measured(
        self, request_ids: Sequence[str], drafts: Sequence[DraftTree], accepted: Sequence[Sequence[int]]
    ) -> list[str]:
        """What was right of verified drafts: places in the draft, along one path. Gives the requests that rest now.

        A request may be there several times, with several steps.
        """
        nodes = ProposedNodes.of(drafts)
        is_accepted = np.zeros(len(nodes), dtype=bool)
        is_accepted[[start + node for start, path in zip(nodes.starts, accepted, strict=False) for node in path]] = True
        # Only nodes below an accepted one were put to the test.
        is_tested = (nodes.parents < 0) | is_accepted[nodes.parents]
        depths = nodes.depths
        self._count(depths, is_accepted)
        cells, trees, stated = _cells(nodes)[is_tested], nodes.trees[is_tested], nodes.edges[is_tested]
        expected = np.bincount(trees, weights=self._rates(stated, cells), minlength=len(drafts))
        promised = np.bincount(trees, weights=stated, minlength=len(drafts))
        self._trials += np.bincount(cells, minlength=len(self._trials))
        self._hits += np.bincount(cells[is_accepted[is_tested]], minlength=len(self._hits))
        full = self._trials > TABLE_LIMIT
        self._trials[full] /= 2.0
        self._hits[full] /= 2.0
        resting = [
            request_id
            for request_id, own, stated_own, path in zip(
                request_ids, expected.tolist(), promised.tolist(), accepted, strict=True
            )
            if self._update_request(request_id, own, stated_own, len(path))
        ]
        self._watch_all(float(promised.sum()), sum(map(len, accepted)), max(Counter(request_ids).values()))
        return resting

    def _count(self, depths: Int64Array, is_accepted: Flags) -> None:
        for table, found in ((self.counts.num_nodes, depths), (self.counts.num_accepted, depths[is_accepted])):
            for depth, number in enumerate(np.bincount(found).tolist()):
                if number:
                    table[depth] = table.get(depth, 0) + number

    def _rates(self, edges: Float64Array, cells: Int64Array) -> Float64Array:
        rates: Float64Array = (self._hits[cells] + TABLE_TRUST * edges) / (self._trials[cells] + TABLE_TRUST)
        return rates

    def _update_request(self, request_id: str, expected: float, stated: float, num_accepted: int) -> bool:
        """True when the request rests from now on."""
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request()
        memory = math.exp(-expected / REQUEST_WINDOW)
        request.expected = memory * request.expected + expected
        request.accepted = memory * request.accepted + num_accepted
        request.factor = min((request.accepted + REQUEST_TRUST) / (request.expected + REQUEST_TRUST), MAX_FACTOR)
        request.promise.add(stated, num_accepted)
        if num_accepted:
            request.next_rest = REST_STEPS
            return False
        if not request.promise.is_broken(WINDOW_STEPS, WINDOW_EXPECTED):
            return False
        log.info("drafts of %s are reset: nothing of them was right in %d steps", request_id, request.promise.num_steps)
        self._requests[request_id] = _Request(
            rest_steps=request.next_rest, next_rest=min(2 * request.next_rest, MAX_REST_STEPS)
        )
        self.counts.num_resets += 1
        return True

    def _watch_all(self, stated: float, num_accepted: int, num_steps: int) -> None:
        self._promise.add(stated, num_accepted, num_steps)
        if self._promise.is_broken(ALARM_STEPS, ALARM_EXPECTED):
            log.error(
                "no draft of any request was right in %d steps, where the drafter promised %.0f tokens: drafting only "
                "costs time now (answers do not depend on it)",
                self._promise.num_steps,
                self._promise.expected,
            )
            self._promise = _Promise()
            self.counts.num_alarms += 1


def _cells(nodes: ProposedNodes) -> Int64Array:
    """Where the table keeps nodes like these."""
    cells: Int64Array = np.minimum(nodes.depths, MAX_DEPTH) * NUM_BINS + EDGES.searchsorted(nodes.edges)
    return cells
