"""Definition of the gated delta rule over trees and of the fold, as matrix products with ancestor masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from turnkeep.kernels.decay import BLOCK
from turnkeep.kernels.draft_tree import DraftTrees, padded_tokens, suffix_sums
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
    history_lens: Sequence[int],
    num_nodes: Sequence[int],
    parents: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `turnkeep.kernels.gated_delta_tree.gated_delta_tree`."""
    if not num_nodes:
        return torch.empty_like(v), torch.empty_like(v, dtype=torch.float32)
    trees = DraftTrees.of(num_nodes, parents, history_lens)
    width = trees.ancestors.shape[1]
    per_key = v.shape[1] // k.shape[1]
    decays = trees.decays(trees.nodes(g), trees.history(history.g))
    keys, queries, old_keys = (
        unit_length(t).transpose(1, 2) for t in (trees.nodes(k), trees.nodes(q), trees.history(history.k))
    )
    both = torch.cat((keys, queries * k.shape[2] ** -0.5), dim=2)  # [R, Hk, 2 W, K]
    strength = trees.nodes(beta).transpose(1, 2)[..., None]  # [R, Hv, W, 1]
    # Per key head: against the history's keys [R, Hv, 2 W, h], against the tree's own [R, Hv, 2 W, W].
    old = (both @ old_keys.transpose(-1, -2)).repeat_interleave(per_key, dim=1)
    own = (both @ keys.transpose(-1, -2)).repeat_interleave(per_key, dim=1)
    # What the state and the history answer to every key and query, decayed up to the root.
    read = both.repeat_interleave(per_key, dim=1) @ states.index_select(0, rows).to(torch.float32)
    read.mul_(decays.whole_history[..., None, None])
    read += (old * decays.history[..., None, :]) @ trees.history(history.u).transpose(1, 2)
    read.mul_(torch.cat((decays.to_node, decays.to_node), dim=2)[..., None])
    lower = (decays.tree * own[:, :, :width]).mul_(strength).tril_(-1)
    wanted = (trees.nodes(v).transpose(1, 2) - read[:, :, :width]).mul_(strength)
    extra = -width % BLOCK
    inverse = unit_lower_inverse(pad(lower, (0, extra, 0, extra)))[..., :width, :width]
    u = inverse @ wanted
    outputs = read[:, :, width:] + (decays.tree * own[:, :, width:]) @ u
    return trees.packed(outputs.transpose(1, 2)).to(v.dtype), trees.packed(u.transpose(1, 2))


def gated_delta_fold_reference(
    terms: DeltaTerms, states: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, seq_lens: Sequence[int]
) -> None:
    """See `turnkeep.kernels.gated_delta_tree.gated_delta_fold`."""
    if not seq_lens:
        return
    k, u, g = (padded_tokens(tensor, seq_lens) for tensor in terms)
    after = suffix_sums(g).exp_().transpose(1, 2)  # [R, Hv, T + 1]
    keys = unit_length(k).transpose(1, 2).repeat_interleave(u.shape[2] // k.shape[2], dim=1)  # [R, Hv, T, K]
    written = u.transpose(1, 2) * after[..., 1:, None]
    state = states.index_select(0, sources).to(torch.float32) * after[..., :1, None]
    states.index_copy_(0, targets, state.add_(keys.transpose(-1, -2) @ written).to(states.dtype))
