"""The nodes of a step's drafts in one row, so that all of them are judged at once.

What holds along a path (depths, products of probabilities) is read off a table of ancestors, a line a level; there is
no loop over nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from turnkeep.scheduler.drafts import DraftTree

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NO_NODE = -1
CERTAIN = np.ones(1)


@dataclass(slots=True)
class ProposedNodes:
    """The nodes of several drafts, tree after tree, [N] each. A node is known by its place in the row."""

    starts: list[int]  # of each tree, and the end
    parents: Int64Array  # NO_NODE for a child of the root
    ancestors: Int64Array  # [D, N]: from the child of the root down to the node itself, after NO_NODE for lesser depths
    edges: Float64Array  # probability given the parent, as the drafter states it
    depths: Int64Array  # levels below the root, from 1
    trees: Int64Array  # number of each node's tree

    @classmethod
    def of(cls, drafts: Sequence[DraftTree]) -> ProposedNodes:
        counts = [draft.num_nodes for draft in drafts]
        starts = [0, *accumulate(counts)]
        num_nodes = starts[-1]
        trees = np.arange(len(drafts)).repeat(counts)
        # One place more is where NO_NODE leads, from any place and from itself: there everything is certain.
        parents = _row([draft.parents for draft in drafts], NO_NODE, np.int64, num_nodes)
        stated = _row([draft.probabilities for draft in drafts], 1.0, np.float64, num_nodes)
        if len(drafts) > 1:
            below = (parents >= 0).nonzero()[0]
            parents[below] += np.array(starts)[trees[below]]
        edges = np.minimum(stated / np.maximum(stated[parents], 1e-12), 1.0)
        ancestors = np.empty((max([draft.depth for draft in drafts], default=0), num_nodes), dtype=np.int64)
        if num_nodes:
            ancestors[-1] = np.arange(num_nodes)
        for level in range(len(ancestors) - 1, 0, -1):
            ancestors[level - 1] = parents[ancestors[level]]
        return cls(starts, parents[:-1], ancestors, edges[:-1], (ancestors >= 0).sum(axis=0), trees)

    def __len__(self) -> int:
        return self.starts[-1]

    def products(self, values: Float64Array) -> Float64Array:
        """Of the values [N] along each node's path from the root: [N]; where no value is above 1, in any rounding
        never more than the parent's."""
        with_none = np.concatenate((values, CERTAIN))  # NO_NODE leads to the last one
        products: Float64Array = np.multiply.reduce(with_none[self.ancestors], axis=0)
        return products

    def sums_of_siblings(self, values: Float64Array) -> Float64Array:
        """Of the values [N] of each node and its siblings: [N]."""
        # Children of a root have its tree's number, behind all places, for a parent.
        parents = np.where(self.parents < 0, len(self) + self.trees, self.parents)
        sums: Float64Array = np.bincount(parents, weights=values).astype(np.float64, copy=False)
        return sums[parents]

    def counts(self, is_kept: Flags) -> tuple[list[int], list[int], list[bool]]:
        """By tree: how many nodes are kept [N], how deep they reach, and whether they are its first ones."""
        starts = np.array(self.starts)
        sums = np.concatenate(([0], is_kept.cumsum()))
        before = sums[starts[:-1]]
        counts = sums[starts[1:]] - before
        are_first = sums[starts[:-1] + counts] - before == counts
        depths = np.maximum.reduceat(self.depths * is_kept, starts[:-1])
        return counts.tolist(), depths.tolist(), are_first.tolist()


def _row(parts: Sequence[Sequence[float]], last: float, dtype: type, num_nodes: int) -> npt.NDArray[Any]:
    return np.fromiter(chain(chain.from_iterable(parts), (last,)), dtype, num_nodes + 1)
