"""The Mamba-2 recurrence over draft trees, and the folding of accepted tokens into stored states.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnkeep.kernels.draft_tree import check_trees
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
    history_lens: Sequence[int],
    num_nodes: Sequence[int],
    parents: torch.Tensor,
) -> torch.Tensor:
    """Outputs of every node, as if its path were the only one: y [N, H, P] in the dtype of x.

    x, dt, A, B, C, D as in `ssd_scan`, for the N nodes of R trees packed one after another; num_nodes [R]; parents [N]
    int64, each an earlier node of the same tree, or -1 for a root. A root follows the tokens in `history` (packed,
    history_lens [R]), and those follow states[rows[r]] [H, P, N]. Nothing is written: the accepted nodes' (x, dt, B)
    are the history of the next step. Raises ValueError for shapes, lengths or parents that do not fit.
    """
    name = "ssd_tree"
    _check_terms(name, SsdTerms(x, dt, B), A, states)
    _check_terms(name, history, A, states)
    if C.shape != B.shape or B.shape[1] != history.B.shape[1] or (D is not None and D.shape != A.shape):
        raise ValueError(f"{name}: C {tuple(C.shape)}, B {tuple(B.shape)}, history of B {tuple(history.B.shape)}, or D")
    if rows.shape[0] != len(num_nodes):
        raise ValueError(f"{name}: {rows.shape[0]} rows for {len(num_nodes)} trees")
    check_trees(name, x.shape[0], num_nodes, parents, history_lens, history.x.shape[0])
    return ssd_tree_reference(x, dt, A, B, C, D, states, rows, history, history_lens, num_nodes, parents)


def ssd_fold(
    terms: SsdTerms,
    A: torch.Tensor,
    states: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    seq_lens: Sequence[int],
) -> None:
    """states[targets[r]] = states[sources[r]] moved on by the tokens of run r: a history, an accepted path, or the
    first tokens of either, in order.

    terms are packed, seq_lens [R] (0 copies the row); A [H] < 0; sources, targets [R] int64, targets differ. Folding
    a run at once or in parts gives the same but for rounding. Raises ValueError for shapes or lengths that do not fit.
    """
    name = "ssd_fold"
    _check_terms(name, terms, A, states)
    if sources.shape != (len(seq_lens),) or targets.shape != sources.shape:
        raise ValueError(f"{name}: rows {tuple(sources.shape)} to {tuple(targets.shape)} for {len(seq_lens)} runs")
    if min(seq_lens, default=0) < 0 or sum(seq_lens) != terms.x.shape[0]:
        raise ValueError(f"{name}: lengths {list(seq_lens)} do not add up to {terms.x.shape[0]} tokens")
    ssd_fold_reference(terms, A, states, sources, targets, seq_lens)


def _check_terms(name: str, terms: SsdTerms, A: torch.Tensor, states: torch.Tensor) -> None:
    x, dt, B = terms
    if dt.shape != x.shape[:2] or B.shape[0] != x.shape[0] or x.shape[1] % B.shape[1] or A.shape != x.shape[1:2]:
        raise ValueError(
            f"{name}: x {tuple(x.shape)}, dt {tuple(dt.shape)}, A {tuple(A.shape)}, B {tuple(B.shape)} do not fit"
        )
    if states.shape[1:] != (*x.shape[1:], B.shape[2]):
        raise ValueError(f"{name}: states {tuple(states.shape)} do not fit x {tuple(x.shape)}, B {tuple(B.shape)}")
