"""The Mamba-2 recurrence over draft trees, and the folding of accepted tokens into stored states.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

import torch

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.ssd_tree.reference import ssd_fold_reference, ssd_tree_reference
from turnkeep.kernels.ssd_tree.terms import SsdTerms

__all__ = ["SsdTerms", "ssd_fold", "ssd_tree"]


def ssd_tree(
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
    """Outputs of every node, as if its path were the only one: y [N, H, P] in the dtype of x.

    x, dt, A, B, C, D as in `ssd_scan`, for the N nodes of R trees packed one after another. A root follows the tokens
    in `history` ([R, h, ...]; dt is 0 behind the end of a shorter one), and those follow states[rows[r]] [H, P, N].
    Nothing is written: the accepted nodes' (x, dt, B) are the history of the next step. Raises ValueError for shapes
    that do not fit.
    """
    name = "ssd_tree"
    _check_terms(name, SsdTerms(x, dt, B), A, states)
    _check_terms(name, history, A, states)
    if C.shape != B.shape or B.shape[1] != history.B.shape[2] or (D is not None and D.shape != A.shape):
        raise ValueError(f"{name}: C {tuple(C.shape)}, B {tuple(B.shape)}, history of B {tuple(history.B.shape)}, or D")
    if rows.shape != (trees.num_trees,) or history.x.shape[0] != trees.num_trees or x.shape[0] != len(trees.parents):
        raise ValueError(
            f"{name}: {rows.shape[0]} rows, history {tuple(history.x.shape)} and {x.shape[0]} nodes for "
            f"{trees.num_trees} trees of {len(trees.parents)} nodes"
        )
    return ssd_tree_reference(x, dt, A, B, C, D, states, rows, history, trees)


def ssd_fold(
    terms: SsdTerms, A: torch.Tensor, states: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """states[targets[r]] = states[sources[r]] moved on by the tokens of run r: a history, an accepted path, or the
    first tokens of either, in order.

    terms [R, T, ...] (dt is 0 where a run has no token), A [H] < 0; sources, targets [R] int64, targets differ; all
    sources are read before a target is written. Folding a run at once or in parts gives the same but for rounding.
    Raises ValueError for shapes that do not fit.
    """
    name = "ssd_fold"
    _check_terms(name, terms, A, states)
    if sources.shape != terms.x.shape[:1] or targets.shape != sources.shape:
        raise ValueError(f"{name}: rows {tuple(sources.shape)} to {tuple(targets.shape)}, x {tuple(terms.x.shape)}")
    ssd_fold_reference(terms, A, states, sources, targets)


def _check_terms(name: str, terms: SsdTerms, A: torch.Tensor, states: torch.Tensor) -> None:
    x, dt, B = terms
    if (
        dt.shape != x.shape[:-1]
        or B.shape[:-2] != x.shape[:-2]
        or x.shape[-2] % B.shape[-2]
        or A.shape != x.shape[-2:-1]
    ):
        raise ValueError(
            f"{name}: x {tuple(x.shape)}, dt {tuple(dt.shape)}, A {tuple(A.shape)}, B {tuple(B.shape)} do not fit"
        )
    if states.shape[1:] != (*x.shape[-2:], B.shape[-1]):
        raise ValueError(f"{name}: states {tuple(states.shape)} do not fit x {tuple(x.shape)}, B {tuple(B.shape)}")
