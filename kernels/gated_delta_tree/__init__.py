"""The gated delta rule over draft trees, and the folding of accepted tokens into stored states.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

import torch

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.gated_delta_tree.reference import gated_delta_fold_reference, gated_delta_tree_reference
from turnkeep.kernels.gated_delta_tree.terms import DeltaTerms

__all__ = ["DeltaTerms", "gated_delta_fold", "gated_delta_tree"]


def gated_delta_tree(
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
    """Outputs and deltas of every node, as if its path were the only one: (o [N, Hv, V], u [N, Hv, V] float32).

    q, k, v, g, beta as in `gated_delta_scan`, for the N nodes of R trees packed one after another. A root follows the
    tokens in `history` ([R, h, ...]; u and g are 0 behind the end of a shorter one), and those follow states[rows[r]]
    [Hv, K, V]. Nothing is written: the accepted nodes' (k, u, g) are the history of the next step. u of a node
    depends on its ancestors alone, bit for bit. o is in the dtype of v. Raises ValueError for shapes that do not fit.
    """
    name = "gated_delta_tree"
    if q.shape != k.shape or k.shape[0] != v.shape[0] or v.shape[1] % k.shape[1]:
        raise ValueError(f"{name}: q {tuple(q.shape)}, k {tuple(k.shape)} do not fit v {tuple(v.shape)}")
    if g.shape != v.shape[:2] or beta.shape != v.shape[:2]:
        raise ValueError(f"{name}: g {tuple(g.shape)}, beta {tuple(beta.shape)} do not fit v {tuple(v.shape)}")
    if k.shape[1:] != history.k.shape[2:] or v.shape[1:] != history.u.shape[2:]:
        raise ValueError(f"{name}: history of k {tuple(history.k.shape)}, u {tuple(history.u.shape)}")
    if rows.shape != (trees.num_trees,) or history.k.shape[0] != trees.num_trees or v.shape[0] != len(trees.parents):
        raise ValueError(
            f"{name}: {rows.shape[0]} rows, history {tuple(history.k.shape)} and {v.shape[0]} nodes for "
            f"{trees.num_trees} trees of {len(trees.parents)} nodes"
        )
    _check_terms(name, history, states)
    return gated_delta_tree_reference(q, k, v, g, beta, states, rows, history, trees)


def gated_delta_fold(terms: DeltaTerms, states: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """states[targets[r]] = states[sources[r]] moved on by the tokens of run r: a history, an accepted path, or the
    first tokens of either, in order.

    terms [R, T, ...] (u and g are 0 where a run has no token); sources, targets [R] int64, targets differ; all
    sources are read before a target is written. Folding a run at once or in parts gives the same but for rounding.
    Raises ValueError for shapes that do not fit.
    """
    name = "gated_delta_fold"
    _check_terms(name, terms, states)
    if sources.shape != terms.k.shape[:1] or targets.shape != sources.shape:
        raise ValueError(f"{name}: rows {tuple(sources.shape)} to {tuple(targets.shape)}, k {tuple(terms.k.shape)}")
    gated_delta_fold_reference(terms, states, sources, targets)


def _check_terms(name: str, terms: DeltaTerms, states: torch.Tensor) -> None:
    k, u, g = terms
    if k.dim() != 4 or k.shape[:2] != u.shape[:2] or g.shape != u.shape[:3] or u.shape[2] % k.shape[2]:
        raise ValueError(f"{name}: terms of k {tuple(k.shape)}, u {tuple(u.shape)}, g {tuple(g.shape)} do not fit")
    if states.shape[1:] != (u.shape[2], k.shape[3], u.shape[3]):
        raise ValueError(f"{name}: states {tuple(states.shape)} do not fit k {tuple(k.shape)}, u {tuple(u.shape)}")
