"""Packed draft trees with the history before them, padded to one size, and the decays along their paths.

A tree has its nodes in an order in which parents come first; -1 is the parent of a root, whose path goes on into the
history: accepted tokens, oldest first, that the stored state does not contain yet. Decays are sums of non-positive
terms only: neither a difference of running sums, nor an exponential that is masked afterwards, is ever formed.

Letters: R requests, W nodes of the largest tree, h tokens of the longest history, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from turnkeep.kernels.decay import MIN_LOG_DECAY


class PathDecays(NamedTuple):
    """Factors in [0, 1], float32. A node sees the history through to_node x history."""

    tree: torch.Tensor  # over (j, i] for the nodes j on the path to i, i itself with 1, others 0: [R, H, W (i), W (j)]
    to_node: torch.Tensor  # over the path from the root up to and with i: [R, H, W]
    history: torch.Tensor  # over the history tokens after j: [R, H, h]
    whole_history: torch.Tensor  # over all history tokens: [R, H]


@dataclass(slots=True, frozen=True)
class DraftTrees:
    """The trees of one step. Padding nodes come last, are roots of their own and hold zeros."""

    num_nodes: tuple[int, ...]
    history_lens: tuple[int, ...]
    ancestors: torch.Tensor  # [R, W, W] float32: 1 where node j lies on the path to node i, i itself counted

    @classmethod
    def of(cls, num_nodes: Sequence[int], parents: torch.Tensor, history_lens: Sequence[int]) -> DraftTrees:
        """parents [N] int64, packed, each counted within its own tree."""
        padded = pad_sequence(list(torch.split(parents, list(num_nodes))), batch_first=True, padding_value=-1)  # [R, W]
        width = padded.shape[1]
        nodes = torch.arange(width, device=parents.device)
        reached = ((padded[..., None] == nodes) | (nodes[:, None] == nodes)).to(torch.float32)
        hops = 1
        while hops < width:  # twice as far with every product; only zero or not zero counts
            reached = (reached @ reached).clamp_(max=1.0)
            hops *= 2
        return cls(tuple(num_nodes), tuple(history_lens), reached)

    def nodes(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed [N, ...] -> [R, W, ...] float32 with zeros as padding."""
        return padded_tokens(packed, self.num_nodes)

    def history(self, packed: torch.Tensor) -> torch.Tensor:
        """Packed [sum of history_lens, ...] -> [R, h, ...] float32 with zeros after the last token."""
        return padded_tokens(packed, self.history_lens)

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """[R, W, ...] -> packed [N, ...]."""
        return torch.cat([own[:count] for own, count in zip(padded, self.num_nodes, strict=True)])

    def decays(self, nodes: torch.Tensor, history: torch.Tensor) -> PathDecays:
        """Log decays <= 0, padded: nodes [R, W, H], history [R, h, H]."""
        by_head = nodes.clamp(min=MIN_LOG_DECAY).transpose(1, 2)  # [R, H, W]
        is_ancestor = self.ancestors[:, None]  # [R, 1, W, W]
        # Nodes on the path to i but not on the path to j: for an ancestor j those between, and never a positive sum.
        sums = (is_ancestor * by_head[..., None, :]) @ (1.0 - is_ancestor).transpose(-1, -2)
        tree = sums.masked_fill_(is_ancestor == 0, -torch.inf).exp_()
        to_node = (is_ancestor @ by_head[..., None]).squeeze(-1).exp_()
        from_token = suffix_sums(history).transpose(1, 2)  # [R, H, h + 1]
        return PathDecays(tree, to_node, from_token[..., 1:].exp(), from_token[..., 0].exp())


def padded_tokens(packed: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    """Packed [sum of lens, ...] -> [len(lens), longest, ...] float32, zeros at the end."""
    if not any(lens):
        return packed.new_zeros((len(lens), 0, *packed.shape[1:]), dtype=torch.float32)
    return pad_sequence(list(torch.split(packed.to(torch.float32), list(lens))), batch_first=True)


def suffix_sums(log_decay: torch.Tensor) -> torch.Tensor:
    """Log decays [R, T, H] -> [R, T + 1, H]: at t the sum over the tokens from t on, at T zero."""
    bounded = log_decay.clamp(min=MIN_LOG_DECAY)
    sums = bounded.flip(1).cumsum(1).flip(1)
    return torch.cat((sums, sums.new_zeros(sums.shape[0], 1, sums.shape[2])), dim=1)


def check_trees(
    name: str, tokens: int, num_nodes: Sequence[int], parents: torch.Tensor, history_lens: Sequence[int], history: int
) -> None:
    """Raises ValueError unless the lengths add up and every parent is an earlier node of its tree, or -1."""
    if min(num_nodes, default=1) < 1 or sum(num_nodes) != tokens or parents.shape != (tokens,):
        raise ValueError(f"{name}: trees of {list(num_nodes)} nodes, {tuple(parents.shape)} parents, {tokens} tokens")
    if len(history_lens) != len(num_nodes) or min(history_lens, default=0) < 0 or sum(history_lens) != history:
        raise ValueError(
            f"{name}: histories of {list(history_lens)} tokens for {len(num_nodes)} trees, {history} given"
        )
    starts = torch.tensor([0, *accumulate(num_nodes)][:-1], dtype=torch.int64, device=parents.device)
    places = torch.arange(tokens, device=parents.device)
    own = places - starts.repeat_interleave(torch.tensor(list(num_nodes), dtype=torch.int64, device=parents.device))
    if bool(((parents < -1) | (parents >= own)).any()):
        raise ValueError(f"{name}: a parent must be an earlier node of its tree, or -1: {parents.tolist()}")
