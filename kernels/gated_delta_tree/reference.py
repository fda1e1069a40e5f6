"""Definition of the gated delta rule over trees and of the fold, as matrix products with ancestor masks."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from turnkeep.kernels.decay import BLOCK, MIN_LOG_DECAY
from turnkeep.kernels.draft_tree import DraftTrees, suffix_matrix
from turnkeep.kernels.gated_delta_scan.unit_length import unit_length
from turnkeep.kernels.gated_delta_tree.terms import DeltaTerms
from turnkeep.kernels.unit_triangular import unit_lower_inverse


def gated_delta_tree_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: torch.Tensor,
    history: DeltaTerms,
    trees: DraftTrees,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `turnkeep.kernels.gated_delta_tree.gated_delta_tree`."""
    if not trees.num_trees:
        return torch.empty_like(v), torch.empty_like(v, dtype=torch.float32)
    width = trees.width
    per_key = v.shape[1] // k.shape[1]
    decays = trees.decays(trees.padded(g.float()), history.g)
    keys, queries = (unit_length(trees.padded(t.float())).transpose(1, 2) for t in (k, q))
    both = torch.cat((keys, queries * k.shape[2] ** -0.5), dim=2)  # [R, Hk, 2 W, K]
    strength = trees.padded(beta.float()).transpose(1, 2)[..., None]  # [R, Hv, W, 1]
    # What the state and the history answer to every key and query.
    read = both.repeat_interleave(per_key, dim=1) @ states.index_select(0, rows).float()  # [R, Hv, 2 W, V]
    read.mul_(torch.cat((decays.state, decays.state), dim=2)[..., None])
    if history.k.shape[1]:
        old_keys = unit_length(history.k.float()).permute(0, 2, 3, 1)  # [R, Hk, K, h]
        old = (both @ old_keys).repeat_interleave(per_key, dim=1)  # [R, Hv, 2 W, h]
        read += old.mul_(torch.cat((decays.history, decays.history), dim=2)) @ history.u.transpose(1, 2)
    wanted = (trees.padded(v.float()).transpose(1, 2) - read[:, :, :width]).mul_(strength)
    own = (both @ keys.transpose(-1, -2)).repeat_interleave(per_key, dim=1)  # [R, Hv, 2 W, W]
    u = wanted
    if width > 1:
        lower = (decays.tree * own[:, :, :width]).mul_(strength).tril_(-1)
        extra = -width % BLOCK
        u = unit_lower_inverse(pad(lower, (0, extra, 0, extra)))[..., :width, :width] @ wanted
    outputs = read[:, :, width:] + (decays.tree * own[:, :, width:]) @ u
    return trees.packed(outputs.transpose(1, 2)).to(v.dtype), trees.packed(u.transpose(1, 2))


def gated_delta_fold_reference(
    terms: DeltaTerms, states: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """See `turnkeep.kernels.gated_delta_tree.gated_delta_fold`."""
    if not len(sources):
        return
    k, u, g = (term.float() for term in terms)
    log_decays = g.clamp(min=MIN_LOG_DECAY).transpose(1, 2)
    after = (log_decays @ suffix_matrix(g.shape[1], g.device)).exp_()  # [R, Hv, T + 1]
    keys = unit_length(k).transpose(1, 2).repeat_interleave(u.shape[2] // k.shape[2], dim=1)  # [R, Hv, T, K]
    written = u.transpose(1, 2) * after[..., 1:, None]
    state = states.index_select(0, sources).float() * after[..., :1, None]
    states.index_copy_(0, targets, state.add_(keys.transpose(-1, -2) @ written).to(states.dtype))
