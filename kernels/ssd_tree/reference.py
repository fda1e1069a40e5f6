"""Definition of the Mamba-2 recurrence over trees and of the fold, as matrix products with ancestor masks."""

from __future__ import annotations

import torch

from turnkeep.kernels.decay import MIN_LOG_DECAY
from turnkeep.kernels.draft_tree import DraftTrees, suffix_matrix
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
    (_, heads, head_dim), num_groups = x.shape, B.shape[1]
    lead = (trees.num_trees, num_groups, heads // num_groups)  # a head is one of its group's
    width = trees.width
    steps = trees.padded(dt.float())  # [R, W, H]
    decays = trees.decays(steps * A, history.dt * A)
    wide = trees.padded(x.float())  # [R, W, H, P]
    own, reads = (trees.padded(t.float()).transpose(1, 2) for t in (B, C))  # [R, G, W, N]
    # Products of B and C are taken once a group; their decays differ by head: [R, G, ., W, W].
    weights = (reads @ own.transpose(-1, -2)).unsqueeze(2) * decays.tree.view(*lead, width, width)
    y = weights.flatten(1, 2) @ (wide * steps[..., None]).transpose(1, 2)  # [R, H, W, P]
    length = history.x.shape[1]
    if length:
        old = history.B.float().permute(0, 2, 3, 1)  # [R, G, N, h]
        weights = (reads @ old).unsqueeze(2) * decays.history.reshape(*lead, width, length)
        y += weights.flatten(1, 2) @ (history.x.float() * history.dt[..., None]).transpose(1, 2)
    state = states.index_select(0, rows).float().view(trees.num_trees, num_groups, -1, B.shape[2])
    answers = (reads @ state.transpose(-1, -2)).view(trees.num_trees, num_groups, width, -1, head_dim).transpose(2, 3)
    y.view(*lead, width, head_dim).addcmul_(answers, decays.state.reshape(*lead, width, 1))
    if D is not None:
        y.addcmul_(wide.transpose(1, 2), D.float()[:, None, None])
    return trees.packed(y.transpose(1, 2)).to(x.dtype)


def ssd_fold_reference(
    terms: SsdTerms, A: torch.Tensor, states: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `turnkeep.kernels.ssd_tree.ssd_fold`."""
    if not len(sources):
        return
    x, dt, B = (term.float() for term in terms)
    log_decays = (dt * A).clamp_(min=MIN_LOG_DECAY).transpose(1, 2)
    after = (log_decays @ suffix_matrix(x.shape[1], x.device)).exp_()  # [R, H, T + 1]
    weighted = x.transpose(1, 2) * (dt.transpose(1, 2) * after[..., 1:])[..., None]  # [R, H, T, P]
    own = B.transpose(1, 2).repeat_interleave(x.shape[2] // B.shape[2], dim=1)  # [R, H, T, N]
    state = states.index_select(0, sources).float() * after[..., :1, None]
    states.index_copy_(0, targets, state.add_(weighted.transpose(-1, -2) @ own).to(states.dtype))
