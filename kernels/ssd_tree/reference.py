"""Definition of the Mamba-2 recurrence over trees and of the fold, as matrix products with ancestor masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.draft_tree import DraftTrees, padded_tokens, suffix_sums
from turnkeep.kernels.ssd_tree.terms import SsdTerms


def ssd_tree_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    states: torch.Tensor,
    rows: torch.Tensor,
    history: SsdTerms,
    history_lens: Sequence[int],
    num_nodes: Sequence[int],
    parents: torch.Tensor,
) -> torch.Tensor:
    """See `turnkeep.kernels.ssd_tree.ssd_tree`."""
    if not num_nodes:
        return torch.empty_like(x)
    trees = DraftTrees.of(num_nodes, parents, history_lens)
    per_group = x.shape[1] // B.shape[1]
    steps, old_steps = trees.nodes(dt), trees.history(history.dt)
    decays = trees.decays(steps * A, old_steps * A)
    wide = trees.nodes(x).transpose(1, 2)  # [R, H, W, P]
    terms = wide * steps.transpose(1, 2)[..., None]
    old_terms = (trees.history(history.x) * old_steps[..., None]).transpose(1, 2)  # [R, H, h, P]
    own, old, reads = (t.transpose(1, 2) for t in (trees.nodes(B), trees.history(history.B), trees.nodes(C)))
    # Once a group: [R, H, W, h] and [R, H, W, W].
    old_scores = (reads @ old.transpose(-1, -2)).repeat_interleave(per_group, dim=1)
    scores = (reads @ own.transpose(-1, -2)).repeat_interleave(per_group, dim=1)
    # What the state and the history answer to every C, decayed up to the root.
    state = states.index_select(0, rows).to(torch.float32)  # [R, H, P, N]
    y = reads.repeat_interleave(per_group, dim=1) @ state.transpose(-1, -2)  # [R, H, W, P]
    y.mul_(decays.whole_history[..., None, None])
    y += (old_scores * decays.history[..., None, :]) @ old_terms
    y.mul_(decays.to_node[..., None])
    y += (scores * decays.tree) @ terms
    if D is not None:
        y.addcmul_(wide, D.to(torch.float32)[:, None, None])
    return trees.packed(y.transpose(1, 2)).to(x.dtype)


def ssd_fold_reference(
    terms: SsdTerms,
    A: torch.Tensor,
    states: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    seq_lens: Sequence[int],
) -> None:
    """See `turnkeep.kernels.ssd_tree.ssd_fold`."""
    if not seq_lens:
        return
    x, dt, B = (padded_tokens(tensor, seq_lens) for tensor in terms)
    after = suffix_sums(dt * A).exp_().transpose(1, 2)  # [R, H, T + 1]
    weighted = x.transpose(1, 2) * (dt.transpose(1, 2) * after[..., 1:])[..., None]  # [R, H, T, P]
    own = B.transpose(1, 2).repeat_interleave(x.shape[2] // B.shape[2], dim=1)  # [R, H, T, N]
    state = states.index_select(0, sources).to(torch.float32) * after[..., :1, None]
    states.index_copy_(0, targets, state.add_(weighted.transpose(-1, -2) @ own).to(states.dtype))
