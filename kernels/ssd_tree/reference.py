"""Definition of the Mamba-2 recurrence over trees and of the fold, as matrix products with ancestor masks."""

from __future__ import annotations

import torch

from turnkeep.kernels.draft_tree import DraftTrees, suffix_sums
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
    trees: DraftTrees,
) -> torch.Tensor:
    """See `turnkeep.kernels.ssd_tree.ssd_tree`."""
    if not trees.num_trees:
        return torch.empty_like(x)
    per_group = x.shape[1] // B.shape[1]
    steps = trees.padded(dt.float())  # [R, W, H]
    decays = trees.decays(steps * A, history.dt * A)
    wide, own, reads = (trees.padded(t.float()).transpose(1, 2) for t in (x, B, C))  # [R, H or G, W, P or N]
    terms = wide * steps.transpose(1, 2)[..., None]
    # Once a group: [R, H, W, W], and [R, H, W, h] below.
    scores = (reads @ own.transpose(-1, -2)).repeat_interleave(per_group, dim=1)
    # What the state and the history answer to every C, decayed up to the root.
    state = states.index_select(0, rows).float()  # [R, H, P, N]
    y = reads.repeat_interleave(per_group, dim=1) @ state.transpose(-1, -2)  # [R, H, W, P]
    if history.x.shape[1]:
        y.mul_(decays.whole_history[..., None, None])
        old = history.B.float().permute(0, 2, 3, 1)  # [R, G, N, h]
        old_terms = (history.x.float() * history.dt[..., None]).transpose(1, 2)  # [R, H, h, P]
        old_scores = (reads @ old).repeat_interleave(per_group, dim=1)
        y += old_scores.mul_(decays.history[..., None, :]) @ old_terms
    y.mul_(decays.to_node[..., None])
    y += scores.mul_(decays.tree) @ terms
    if D is not None:
        y.addcmul_(wide, D.float()[:, None, None])
    return trees.packed(y.transpose(1, 2)).to(x.dtype)


def ssd_fold_reference(
    terms: SsdTerms, A: torch.Tensor, states: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `turnkeep.kernels.ssd_tree.ssd_fold`."""
    if not len(sources):
        return
    x, dt, B = (term.float() for term in terms)
    after = suffix_sums(dt * A).exp_().transpose(1, 2)  # [R, H, T + 1]
    weighted = x.transpose(1, 2) * (dt.transpose(1, 2) * after[..., 1:])[..., None]  # [R, H, T, P]
    own = B.transpose(1, 2).repeat_interleave(x.shape[2] // B.shape[2], dim=1)  # [R, H, T, N]
    state = states.index_select(0, sources).float() * after[..., :1, None]
    states.index_copy_(0, targets, state.add_(weighted.transpose(-1, -2) @ own).to(states.dtype))
