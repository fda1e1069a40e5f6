"""Drafts as values: the tokens that are proposed to follow a request's last one, and how many may be proposed.

A drafter makes trees within a grant, the scheduler hands each to the next step of its request, and the model says
which path of it is what it would have said itself. No tensors here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class TreeGrant:
    """What may be proposed for the next step. A root (the last sampled token) is not counted anywhere."""

    num_nodes: int  # of all trees together
    max_nodes_per_request: int
    max_depth: int  # levels below the root
    max_children: int  # of one node


@dataclass(slots=True)
class DraftTree:
    """The nodes below a root, parents first; a parent is an earlier node, or -1 for the root. Never changed.

    probabilities: of each node's whole path being accepted, as the drafter sees it; never more than its parent's.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]
    # Levels below the root: so many tokens can be accepted. Asked for several times in a step: a tree knows it, from
    # whoever made it or by looking.
    depth: int = field(default=0, repr=False, compare=False)
    num_nodes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.num_nodes = len(self.token_ids)
        if self.depth == 0:
            self.depth = max(self.depths(), default=0)

    def depths(self) -> list[int]:
        """Levels below the root of each node; its children have 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def first(self, num_nodes: int, depth: int = 0) -> DraftTree:
        """The tree of the first nodes alone: parents come first, so any number of them is a tree. depth: its depth,
        where that is known."""
        if num_nodes >= self.num_nodes:
            return self
        return DraftTree(self.token_ids[:num_nodes], self.parents[:num_nodes], self.probabilities[:num_nodes], depth)

    def within_depth(self, max_depth: int) -> DraftTree | None:
        """The tree of the nodes at most so many levels below the root; None when that is none."""
        if self.depth <= max_depth:
            return self if self.token_ids else None
        kept = [node for node, depth in enumerate(self.depths()) if depth <= max_depth]
        return self.picked(kept, max_depth) if kept else None

    def picked(self, nodes: Sequence[int], depth: int = 0) -> DraftTree:
        """The tree of some nodes, ascending, each with its parent among them. depth: its depth, where that is known."""
        places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        return DraftTree(
            tuple([self.token_ids[node] for node in nodes]),
            tuple([places[self.parents[node]] for node in nodes]),
            tuple([self.probabilities[node] for node in nodes]),
            depth,
        )
