"""The draft trees of one step, padded to one size: who is an ancestor of whom, and the decays along their paths.

A tree has its nodes in an order in which parents come first; -1 is the parent of a root, whose path goes on into the
history: accepted tokens, oldest first, that the stored state does not contain yet. Decays are sums of non-positive
terms only: neither a difference of running sums, nor an exponential that is masked afterwards, is ever formed.

Letters: R requests, N nodes of all trees, W nodes of the largest tree, h tokens of the longest history, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from turnkeep.kernels.decay import MIN_LOG_DECAY


class PathDecays(NamedTuple):
    """Factors in [0, 1], float32, along the path to each node i: from a history token, from the state before all of
    them, from a node, i itself with 1. Nodes that are not on the path have 0."""

    history: torch.Tensor  # [R, H, W (i), h]
    state: torch.Tensor  # [R, H, W (i)]
    tree: torch.Tensor  # [R, H, W (i), W]


class DraftTrees:
    """Made once a step and used by every layer. Padding nodes repeat a node of their own tree and are nobody's
    ancestor, so what they hold never matters.
    """

    def __init__(self, num_nodes: Sequence[int], parents: Sequence[int]) -> None:
        """num_nodes [R]; parents [N], packed, each counted within its own tree.

        Raises ValueError unless the lengths add up and every parent is an earlier node of its tree, or -1.
        """
        if min(num_nodes, default=1) < 1 or sum(num_nodes) != len(parents):
            raise ValueError(f"trees of {list(num_nodes)} nodes with {len(parents)} parents")
        self.num_nodes = tuple(num_nodes)
        self.width = max(num_nodes, default=0)
        self.parents = tuple(parents)
        self.starts: list[int] = []  # of each tree among the packed nodes
        self.depths: list[int] = []  # [N], 0 for a root
        ancestors = np.zeros((len(num_nodes), self.width, self.width), dtype=np.float32)
        start = 0
        for own, count in zip(ancestors, num_nodes, strict=True):
            self.starts.append(start)
            for node in range(count):
                parent = parents[start + node]
                if not -1 <= parent < node:
                    raise ValueError(f"a parent must be an earlier node of its tree, or -1: {list(parents)}")
                if parent >= 0:
                    own[node] = own[parent]
                self.depths.append(self.depths[start + parent] + 1 if parent >= 0 else 0)
                own[node, node] = 1.0
            start += count
        self.ancestors = torch.from_numpy(ancestors)  # [R, W, W]: 1 where j lies on the path to i, i itself counted
        self._is_even = all(count == self.width for count in num_nodes)
        self._padding: tuple[torch.Tensor, torch.Tensor] | None = None  # padded from packed, and back
        self._remembered: dict[Hashable, torch.Tensor] = {}

    @property
    def num_trees(self) -> int:
        return len(self.num_nodes)

    def padded(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed [N, ...] -> [R, W, ...]."""
        if not self._is_even:
            packed = packed.index_select(0, self._places()[0])
        return packed.view(self.num_trees, self.width, *packed.shape[1:])

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """[R, W, ...] -> packed [N, ...]."""
        flat = padded.flatten(0, 1)
        return flat if self._is_even else flat.index_select(0, self._places()[1])

    def decays(self, nodes: torch.Tensor, history: torch.Tensor) -> PathDecays:
        """Log decays <= 0, padded: nodes [R, W, H], history [R, h, H] with 0 where there is no token."""
        width, length = self.width, history.shape[1]
        by_head = nodes.transpose(1, 2).clamp(min=MIN_LOG_DECAY)  # [R, H, W]
        sums, never = self._path_sums()
        # Of the nodes on the path after j, for every j of the tree, and then of all of them: [R, H, W, W + 1].
        along = (by_head @ sums).add_(never).view(*by_head.shape[:2], width, width + 1)
        if length == 0:
            along = along.exp_()
            return PathDecays(along[..., :0], along[..., width], along[..., :width])
        after = history.transpose(1, 2).clamp(min=MIN_LOG_DECAY) @ suffix_matrix(length, nodes.device)  # [R, H, h + 1]
        before = along[..., width:] + after[..., None, :]  # the state first, then the history
        found = torch.cat((before, along[..., :width]), dim=-1).exp_()
        return PathDecays(found[..., 1 : length + 1], found[..., 0], found[..., length + 1 :])

    def _path_sums(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix [R, W (m), W (i) (W + 1) (j)] of ones where node m lies on the path to i but not on that to j, and
        for the last j where it lies on the path to i; and -inf [R, 1, W (W + 1)] where j is not on the path at all."""
        width = self.width

        def sums() -> torch.Tensor:
            on_path = self.ancestors.transpose(1, 2)[..., None]  # [R, m, i, 1]
            strangers = 1.0 - self.ancestors.transpose(1, 2)[:, :, None, :]  # [R, m, 1, j]
            return torch.cat((on_path * strangers, on_path), dim=-1).flatten(2)

        def never() -> torch.Tensor:
            found = torch.zeros(self.num_trees, width, width + 1)
            found[..., :width].masked_fill_(self.ancestors == 0, -torch.inf)
            return found.view(self.num_trees, 1, -1)

        return self.remembered("path sums", sums), self.remembered("never", never)

    def inputs_at(self, tail: int) -> torch.Tensor:
        """Where the last tail + 1 inputs of each node's path lie, newest first: [tail + 1, N] int64.

        In R requests' inputs, each its window of `tail` inputs, oldest first, with its W padded nodes behind.
        """

        def make() -> torch.Tensor:
            paths: list[list[int]] = []
            for tree, (start, count) in enumerate(zip(self.starts, self.num_nodes, strict=True)):
                first = tree * (tail + self.width)
                before = list(range(first + tail - 1, first - 1, -1))
                for node in range(start, start + count):
                    parent = self.parents[node]
                    rest = before if parent < 0 else paths[start + parent][:tail]
                    paths.append([first + tail + node - start, *rest])
            return torch.tensor(paths, dtype=torch.int64).view(-1, tail + 1).T.contiguous()

        return self.remembered(("inputs", tail), make)

    def remembered(self, key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What depends on the trees alone is made once, not once a layer."""
        found = self._remembered.get(key)
        if found is None:
            found = self._remembered[key] = make()
        return found

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._padding is None:
            counts = np.array(self.num_nodes)[:, None]
            nodes = np.arange(self.width)[None, :]
            padded = np.array(self.starts)[:, None] + np.minimum(nodes, counts - 1)
            self._padding = (
                torch.from_numpy(padded.ravel()),
                torch.from_numpy(np.flatnonzero((nodes < counts).ravel())),
            )
        return self._padding


@cache
def suffix_matrix(length: int, device: torch.device) -> torch.Tensor:
    """[T, T + 1] of zeros and ones: log decays [.., T] times it are the sums over the tokens from t on, at T zero."""
    return torch.ones(length, length + 1, device=device).tril_()
