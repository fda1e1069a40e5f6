"""The draft trees of one step, padded to one size: who is an ancestor of whom, and the decays along their paths.

A tree has its nodes in an order in which parents come first; -1 is the parent of a root, whose path goes on into the
history: accepted tokens, oldest first, that the stored state does not contain yet. Decays are sums of non-positive
terms only: neither a difference of running sums, nor an exponential that is masked afterwards, is ever formed.

Letters: R requests, N nodes of all trees, W nodes of the largest tree, h tokens of the longest history, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from turnkeep.kernels.decay import MIN_LOG_DECAY


class PathDecays(NamedTuple):
    """Factors in [0, 1], float32. A node sees the history through to_node x history."""

    tree: torch.Tensor  # over (j, i] for the nodes j on the path to i, i itself with 1, others 0: [R, H, W (i), W (j)]
    to_node: torch.Tensor  # over the path from the root up to and with i: [R, H, W]
    history: torch.Tensor  # over the history tokens after j: [R, H, h]
    whole_history: torch.Tensor  # over all history tokens: [R, H]


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
        by_head = nodes.clamp(min=MIN_LOG_DECAY).transpose(1, 2)  # [R, H, W]
        from_token = suffix_sums(history).transpose(1, 2).exp_()  # [R, H, h + 1]
        after, whole = from_token[..., 1:], from_token[..., 0]
        if self.width == 1:
            return PathDecays(torch.ones_like(by_head)[..., None], by_head.exp(), after, whole)
        ancestors = self.ancestors[:, None]  # [R, 1, W, W]
        strangers = self.remembered("strangers", lambda: 1.0 - ancestors.transpose(-1, -2))
        # Nodes on the path to i but not on the path to j: for an ancestor j those between, and never a positive sum.
        sums = (ancestors * by_head[..., None, :]) @ strangers
        tree = sums.masked_fill_(ancestors == 0, -torch.inf).exp_()
        to_node = (ancestors @ by_head[..., None]).squeeze(-1).exp_()
        return PathDecays(tree, to_node, after, whole)

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


def suffix_sums(log_decay: torch.Tensor) -> torch.Tensor:
    """Log decays [R, T, H] -> [R, T + 1, H]: at t the sum over the tokens from t on, at T zero."""
    if log_decay.shape[1] == 0:
        return log_decay.new_zeros(log_decay.shape[0], 1, log_decay.shape[2])
    bounded = log_decay.clamp(min=MIN_LOG_DECAY)
    sums = bounded.flip(1).cumsum(1).flip(1)
    return torch.cat((sums, sums.new_zeros(sums.shape[0], 1, sums.shape[2])), dim=1)
