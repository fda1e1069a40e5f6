"""Which nodes draft trees are made of: the likeliest of all that a level by level growth came across.

A node is reached when the target follows its whole path, so its worth is the product of the probabilities of its
edges; as no child is worth more than its parent, the worthiest nodes of all requests together are whole trees, and no
other trees of as many nodes are worth more. Arrays only: no tensors, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from turnkeep.scheduler.drafts import DraftTree, TreeGrant

# A node that is reached less often than this costs a step more than it saves, on any machine.
LEAST_PROBABILITY = 0.01

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Frontier(NamedTuple):
    """Nodes whose children are wanted, F of every request; requests with fewer are filled up with others of theirs."""

    rows: Ints  # [R, F] which row of the last level each is a child of
    token_ids: Ints  # [R, F]


class TreeGrowth:
    """Candidates of R requests, N of each: level by level, parents before their children."""

    def __init__(
        self,
        num_requests: int,
        grant: TreeGrant,
        least_probability: float = LEAST_PROBABILITY,
        ends: Sequence[Sequence[int]] = (),
    ) -> None:
        """ends [R]: tokens of each request that nothing follows."""
        self._grant = grant
        self._floor = float(np.log(least_probability))
        self._requests = np.arange(num_requests)[:, None]
        self._ends = _padded(ends)
        self._token_ids: list[Ints] = []
        self._parents: list[Ints] = []  # index among a request's candidates, -1 for the root
        self._worths: list[Floats] = []  # log of the probability of the whole path
        self._num_candidates = 0
        self._expanded = np.full((num_requests, 1), -1, dtype=np.int64)  # the candidates that `add` gives children
        self._expanded_worths = np.zeros((num_requests, 1), dtype=np.float32)

    def add(self, token_ids: Ints, edges: Floats) -> None:
        """Children [R, F, K] of the frontier, of the root at first; edges: logs of their probabilities, <= 0."""
        num_requests, _, num_children = token_ids.shape
        worths = (self._expanded_worths[:, :, None] + edges).reshape(num_requests, -1)
        self._token_ids.append(token_ids.reshape(num_requests, -1))
        self._parents.append(self._expanded.repeat(num_children, axis=1))
        self._worths.append(worths)
        self._num_candidates += worths.shape[1]

    def frontier(self) -> Frontier | None:
        """The candidates of the last level that may still have children among the best; None when there are none."""
        worths, token_ids = self._worths[-1], self._token_ids[-1]
        if self._ends is not None:
            worths = np.where((token_ids[:, :, None] == self._ends).any(2), np.float32(-np.inf), worths)
        order = (-worths).argsort(axis=1, kind="stable")[:, : self._grant.max_children]
        ordered = worths[self._requests, order]
        is_open = ordered > self._bar()
        width = int(is_open.sum(axis=1).max())
        if width == 0:
            return None
        order, is_open = order[:, :width], is_open[:, :width]
        num_children = worths.shape[1] // self._expanded.shape[1]
        self._expanded = order + (self._num_candidates - worths.shape[1])
        # What only fills up a request has no children that count.
        self._expanded_worths = np.where(is_open, ordered[:, :width], np.float32(-np.inf))
        return Frontier(order // num_children, token_ids[self._requests, order])

    def _bar(self) -> Floats | float:
        """What a candidate's worth must exceed, by request [R, 1], to be among the best with all that is known."""
        bar: Floats | float = self._floor
        limit, num_nodes = self._grant.max_nodes_per_request, self._grant.num_nodes
        if self._num_candidates <= limit and self._num_candidates * len(self._requests) <= num_nodes:
            return bar
        worths = np.concatenate(self._worths, axis=1)
        if worths.size > num_nodes:
            bar = max(bar, float(np.partition(worths, -num_nodes, axis=None)[-num_nodes]))
        if worths.shape[1] > limit:
            bar = np.maximum(bar, np.partition(worths, -limit, axis=1)[:, -limit:][:, :1])
        return bar

    def trees(self) -> list[DraftTree | None]:
        """The best nodes within the grant, the best first; None for a request without any."""
        worths, requests = np.concatenate(self._worths, axis=1), self._requests
        # Stable: of equals the earlier first, and parents come earlier than their children.
        order = (-worths).argsort(axis=1, kind="stable")[:, : self._grant.max_nodes_per_request]
        ordered = worths[requests, order]
        best = (-ordered).argsort(axis=None, kind="stable")[: self._grant.num_nodes]
        counts = np.bincount(best // ordered.shape[1], minlength=len(ordered))
        counts = np.minimum(counts, (ordered > self._floor).sum(axis=1))
        token_ids = np.concatenate(self._token_ids, axis=1)[requests, order]
        # A node's place among the chosen ones of its request, by its number among all candidates; the root's is last.
        places = np.full((len(order), worths.shape[1] + 1), -1, dtype=np.int64)
        places[requests, order] = np.arange(order.shape[1])
        parents = places[requests, np.concatenate(self._parents, axis=1)[requests, order]]
        probabilities = np.exp(ordered)
        return [
            DraftTree(
                tuple(token_ids[r, :count].tolist()),
                tuple(parents[r, :count].tolist()),
                tuple(probabilities[r, :count].tolist()),
            )
            if count
            else None
            for r, count in enumerate(counts.tolist())
        ]


def _padded(ends: Sequence[Sequence[int]]) -> Ints | None:
    """[R, 1, S], with -1 where a request has fewer; None when there are none at all."""
    width = max(map(len, ends), default=0)
    if width == 0:
        return None
    return np.array([[[*own, *[-1] * (width - len(own))]] for own in ends], dtype=np.int64)
