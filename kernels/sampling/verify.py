"""Lossless acceptance of draft trees: the walk from the root along the tokens that plain sampling chooses.

At a node the token is chosen as `sample` chooses it, with the noise of its own position; the walk goes on at the child
that carries this token. What comes out is the plain token stream whatever was drafted (Gumbel coupling of draft and
target, Daliri et al., "Coupling without Communication"), and a tree of one node is a plain decode. Logits are changed
for the nodes on the walk alone, so penalties and grammars see the path of their node and never have to be taken back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from turnkeep.kernels.sampling.reference import InvalidLogitsError, sample_reference
from turnkeep.kernels.sampling.sampling_batch import GREEDY, SamplingBatch, SamplingRow

# Nodes x vocabulary up to which tokens are chosen at all nodes in one call; on a processor larger ones cost more than
# the calls they save.
MAX_CHOSEN_AHEAD = 1 << 15


@dataclass(slots=True, frozen=True)
class TreeToVerify:
    """The drafted tree of one request: nodes in an order in which parents come first.

    token_ids[0] is the root, a token that is known already; parents[0] is -1. `row_after(path)` says how the token
    after the root and the drafted tokens `path` is chosen. None: none may be chosen there (the path ends with a stop
    token, or a grammar cannot go on), and the walk ends with the last token of the path. It is asked along the walk
    alone unless `any_path`: then it costs little and may be asked for any node.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    row_after: Callable[[Sequence[int]], SamplingRow | None]
    any_path: bool = False


@dataclass(slots=True)
class VerifiedTree:
    """nodes: the accepted ones, root first. token_ids[i] was chosen after nodes[i]; the last one is not in the tree.

    Both are empty when no token could be chosen after the root. A node after which none could be chosen is not
    accepted: its token is the last of token_ids, and what is wrong shows again when it is a root.
    """

    nodes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def verify_trees(logits: torch.Tensor, trees: Sequence[TreeToVerify]) -> list[VerifiedTree]:
    """Accepted path and chosen tokens of each tree: logits [N, V] float32 of all nodes, tree after tree.

    A tree's result depends on its own logits and rows alone. Raises ValueError for sizes, parents or ids that do not
    fit; never InvalidLogitsError.
    """
    starts = [0, *accumulate(len(tree.token_ids) for tree in trees)]
    if logits.dim() != 2 or logits.shape[0] != starts[-1]:
        raise ValueError(f"verify_trees: logits {tuple(logits.shape)} for {starts[-1]} nodes")
    chooser = _Chooser(logits)
    walks = [_Walk(tree, start) for tree, start in zip(trees, starts, strict=False)]
    verified = [walk.verified for walk in walks]
    chooser.choose_ahead(walks)
    while walks:
        rows = [(walk, walk.next_row()) for walk in walks]
        going = [(walk, row) for walk, row in rows if row is not None]
        chosen = chooser.choose([walk.place for walk, _ in going], [row for _, row in going])
        walks = [walk for (walk, _), token in zip(going, chosen, strict=True) if walk.goes_on(token)]
    return verified


class _Walk:
    """One tree, as far as it is accepted."""

    def __init__(self, tree: TreeToVerify, start: int) -> None:
        parents = tree.parents
        if len(parents) != len(tree.token_ids) or not parents or parents[0] != -1:
            raise ValueError(f"verify_trees: parents {list(parents)} for {len(tree.token_ids)} nodes, the first is -1")
        if any(not 0 <= parents[node] < node for node in range(1, len(parents))):
            raise ValueError(f"verify_trees: a parent must be an earlier node: {list(parents)}")
        self.verified = VerifiedTree()
        self._tree = tree
        self._start = start
        self._node = 0

    @property
    def place(self) -> int:
        """Row of the logits."""
        return self._start + self._node

    @property
    def may_choose_ahead(self) -> bool:
        return self._tree.any_path and len(self._tree.parents) > 1

    @property
    def num_nodes(self) -> int:
        return len(self._tree.parents)

    def next_row(self) -> SamplingRow | None:
        return self._tree.row_after(self.verified.token_ids)

    def goes_on(self, token: int | None) -> bool:
        """Take the token chosen at the present node; whether a child carries it."""
        if token is None:
            return False
        self.verified.nodes.append(self._node)
        self.verified.token_ids.append(token)
        tree, parent = self._tree, self._node
        for child in range(parent + 1, len(tree.parents)):
            if tree.parents[child] == parent and tree.token_ids[child] == token:
                self._node = child
                return True
        return False

    def rows(self) -> Iterator[tuple[int, SamplingRow]]:
        """Place and row of every node after which a token may be chosen by noise."""
        tree = self._tree
        paths: list[tuple[int, ...]] = [()]
        for node in range(len(tree.parents)):
            if node > 0:
                paths.append((*paths[tree.parents[node]], tree.token_ids[node]))
            row = tree.row_after(paths[node])
            if row is not None and row is not GREEDY:
                yield self._start + node, row


class _Chooser:
    """Tokens at single rows of the logits. The largest of all rows are found at once, when first needed."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._largest: list[int | None] | None = None
        self._ahead: dict[int, int | None] = {}  # by place

    def choose_ahead(self, walks: Sequence[_Walk]) -> None:
        """One call for whole trees instead of one a level, where that is cheaper."""
        wide = [walk for walk in walks if walk.may_choose_ahead]
        num_nodes = sum(walk.num_nodes for walk in wide)
        if self._logits.device.type == "cpu" and num_nodes * self._logits.shape[1] > MAX_CHOSEN_AHEAD:
            return
        found = [pair for walk in wide for pair in walk.rows()]
        if found:
            places, rows = [place for place, _ in found], [row for _, row in found]
            self._ahead = dict(zip(places, self._sample(places, rows), strict=True))

    def choose(self, places: Sequence[int], rows: Sequence[SamplingRow]) -> list[int | None]:
        """None where the logits give no token."""
        others = [i for i, row in enumerate(rows) if row is not GREEDY and places[i] not in self._ahead]
        chosen: list[int | None] = [self._ahead.get(place) for place in places]
        if any(row is GREEDY for row in rows):
            largest = self._largest_of_all()
            chosen = [
                largest[place] if row is GREEDY else chosen[i]
                for i, (place, row) in enumerate(zip(places, rows, strict=True))
            ]
        if others:
            sampled = self._sample([places[index] for index in others], [rows[index] for index in others])
            for index, token in zip(others, sampled, strict=True):
                chosen[index] = token
        return chosen

    def _largest_of_all(self) -> list[int | None]:
        if self._largest is None:
            values, ids = self._logits.max(dim=-1)  # NaN counts as largest; the lowest id among equal ones
            found = zip(values.tolist(), ids.tolist(), strict=True)
            self._largest = [token if math.isfinite(value) else None for value, token in found]
        return self._largest

    def _sample(self, places: list[int], rows: list[SamplingRow]) -> list[int | None]:
        everywhere = places == list(range(self._logits.shape[0]))
        logits = self._logits if everywhere else self._logits[places]
        try:
            return list(sample_reference(logits, SamplingBatch(rows)).tolist())
        except InvalidLogitsError as error:
            broken = set(error.rows)
        valid = [index for index in range(len(rows)) if index not in broken]
        chosen: list[int | None] = [None] * len(rows)
        if valid:
            sampled = self._sample([places[index] for index in valid], [rows[index] for index in valid])
            for index, token in zip(valid, sampled, strict=True):
                chosen[index] = token
        return chosen
