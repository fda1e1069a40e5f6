"""The Mamba-2 recurrence over trees against the recurrence token by token along every path, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from draft_trees import SHAPES, make_parents, path
from gated_delta_cases import DECAYS, error, log_decays
from packed_terms import padded_terms

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.ssd_tree import SsdTerms, ssd_fold, ssd_tree

HEADS, HEAD_DIM, STATE_DIM = 4, 8, 14
TOLERANCE = 1e-6


@dataclass
class Request:
    """Tokens of one request: its history, then the nodes of its tree."""

    parents: list[int]
    num_history: int
    x: torch.Tensor
    dt: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    state: torch.Tensor

    def terms(self, tokens: list[int]) -> SsdTerms:
        return SsdTerms(self.x[tokens], self.dt[tokens], self.B[tokens])

    def tokens(self, node: int) -> list[int]:
        return [*range(self.num_history), *(self.num_history + n for n in path(self.parents, node))]


A = -torch.tensor([0.5, 0.8, 1.1, 1.4])
D = torch.tensor([0.3, -0.7, 1.2, 0.1])


def make_request(shape: str, num_nodes: int, num_history: int, decay: str = "mild", groups: int = 2) -> Request:
    total = num_history + num_nodes
    return Request(
        parents=make_parents(shape, num_nodes),
        num_history=num_history,
        x=torch.randn(total, HEADS, HEAD_DIM),
        dt=log_decays(decay, total, HEADS) / A,
        B=torch.randn(total, groups, STATE_DIM),
        C=torch.randn(total, groups, STATE_DIM),
        state=torch.randn(HEADS, HEAD_DIM, STATE_DIM),
    )


def recurrence(request: Request, tokens: list[int], with_skip: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of the last of the tokens, and the state after it."""
    x, dt, B, C = (t[tokens].double() for t in (request.x, request.dt, request.B, request.C))
    per_group = HEADS // B.shape[1]
    state, y = request.state.double(), torch.zeros(HEADS, HEAD_DIM, dtype=torch.float64)
    for t in range(len(tokens)):
        added = torch.einsum("h,hp,hn->hpn", dt[t], x[t], B[t].repeat_interleave(per_group, dim=0))
        state = state * (dt[t] * A.double()).exp()[:, None, None] + added
        y = torch.einsum("hpn,hn->hp", state, C[t].repeat_interleave(per_group, dim=0))
        y = y + D.double()[:, None] * x[t] if with_skip else y
    return y, state


def joined(parts: list[SsdTerms]) -> SsdTerms:
    return SsdTerms(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def make_states(requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    states = torch.full((12, HEADS, HEAD_DIM, STATE_DIM), torch.nan)
    rows = torch.tensor([5, 2, 9, 1, 7][: len(requests)], dtype=torch.int64)
    for row, request in zip(rows.tolist(), requests, strict=True):
        states[row] = request.state
    return states, rows


def run(
    requests: list[Request], states: torch.Tensor, rows: torch.Tensor, with_skip: bool = True, folded: int = 0
) -> list[torch.Tensor]:
    """Outputs by request; the first `folded` tokens of every history are in the states already."""
    nodes = [list(range(r.num_history, len(r.x))) for r in requests]
    own = joined([r.terms(n) for r, n in zip(requests, nodes, strict=True)])
    lens = [len(r.parents) for r in requests]
    y = ssd_tree(
        own.x,
        own.dt,
        A,
        own.B,
        torch.cat([r.C[n] for r, n in zip(requests, nodes, strict=True)]),
        D if with_skip else None,
        states,
        rows,
        padded_terms(
            joined([r.terms(list(range(folded, r.num_history))) for r in requests]),
            [r.num_history - folded for r in requests],
        ),
        DraftTrees(lens, [parent for r in requests for parent in r.parents]),
    )
    return list(y.split(lens))


def check(requests: list[Request], outputs: list[torch.Tensor], with_skip: bool = True) -> None:
    for request, own in zip(requests, outputs, strict=True):
        expected = [recurrence(request, request.tokens(n), with_skip)[0] for n in range(len(request.parents))]
        assert error(own, torch.stack(expected)) < TOLERANCE


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("with_skip", [True, False])
def test_packed_trees_match_the_recurrence_along_every_path(decay: str, groups: int, with_skip: bool) -> None:
    sizes = zip(SHAPES, (7, 19, 1, 33, 12), (3, 0, 9, 17, 1), strict=True)
    requests = [make_request(shape, nodes, history, decay, groups) for shape, nodes, history in sizes]
    states, rows = make_states(requests)
    before = states.clone()
    check(requests, run(requests, states, rows, with_skip), with_skip)
    assert torch.equal(states.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("shape", ["star", "bushy"])
def test_strong_decays_off_the_path_match_where_masking_after_exp_does_not(shape: str) -> None:
    request = make_request(shape, 40, 5, "strong")
    request.dt.mul_(10)
    states, rows = make_states([request])
    check([request], run([request], states, rows))
    # Sums along each node's path, subtracted, exponentiated and then masked: what the operation must not do.
    decay = request.dt[5:, 0] * A[0]
    paths = [path(request.parents, node) for node in range(40)]
    sums = torch.stack([decay[nodes].sum() for nodes in paths])
    is_ancestor = torch.tensor([[float(other in nodes) for other in range(40)] for nodes in paths])
    assert ((sums[:, None] - sums).exp() * is_ancestor).isnan().any()


def test_long_chains_match_where_differences_of_running_sums_do_not() -> None:
    request = make_request("chain", 256, 0, "mixed")
    states, rows = make_states([request])
    (y,) = run([request], states, rows)
    for node in (0, 100, 254, 255):
        assert error(y[node], recurrence(request, request.tokens(node))[0]) < TOLERANCE
    sums = (request.dt * A).cumsum(0)
    exact = (request.dt.double() * A.double()).flip(0).cumsum(0).flip(0)[1:].exp()
    assert error((sums[255] - sums[:-1]).exp(), exact) > 10 * TOLERANCE


def test_padding_and_other_trees_leave_no_trace() -> None:
    requests = [make_request("random", 9, 4), make_request("star", 30, 11)]
    states, rows = make_states(requests)
    together = run(requests, states, rows)
    alone = run(requests[:1], states, rows[:1])
    assert error(together[0], alone[0]) < TOLERANCE


def test_folding_history_and_path_matches_the_recurrence() -> None:
    requests = [make_request("random", 21, 6, "mixed"), make_request("deep", 13, 0, "mixed")]
    states, rows = make_states(requests)
    before = states.clone()
    tokens = [requests[0].tokens(20), requests[1].tokens(12)]
    terms = joined([request.terms(own) for request, own in zip(requests, tokens, strict=True)])
    padded = padded_terms(terms, [len(own) for own in tokens])
    ssd_fold(padded, A, states, rows, torch.tensor([3, int(rows[1])]))
    assert error(states[3], recurrence(requests[0], tokens[0])[1]) < TOLERANCE
    assert error(states[rows[1]], recurrence(requests[1], tokens[1])[1]) < TOLERANCE
    assert torch.equal(states[rows[0]], before[rows[0]])


@pytest.mark.parametrize("decay", ["mild", "strong"])
@pytest.mark.parametrize("folded", [0, 4, 7])
def test_a_part_of_the_history_may_be_folded_first(decay: str, folded: int) -> None:
    requests = [make_request("random", 11, 9, decay), make_request("bushy", 18, 7, decay)]
    states, rows = make_states(requests)
    whole = states.clone()
    first = joined([request.terms(list(range(folded))) for request in requests])
    ssd_fold(padded_terms(first, [folded] * 2), A, states, rows, rows)
    check(requests, run(requests, states, rows, folded=folded))
    lens = [request.num_history for request in requests]
    rest = joined([request.terms(list(range(folded, request.num_history))) for request in requests])
    ssd_fold(padded_terms(rest, [length - folded for length in lens]), A, states, rows, rows)
    everything = joined([r.terms(list(range(r.num_history))) for r in requests])
    ssd_fold(padded_terms(everything, lens), A, whole, rows, rows)
    assert error(states[rows], whole[rows]) < TOLERANCE


def test_bfloat16_inputs_give_bfloat16_outputs() -> None:
    request = make_request("random", 14, 3)
    request.x, request.B, request.C = request.x.bfloat16(), request.B.bfloat16(), request.C.bfloat16()
    states, rows = make_states([request])
    (y,) = run([request], states, rows)
    expected = torch.stack([recurrence(request, request.tokens(node))[0] for node in range(14)])
    assert y.dtype == torch.bfloat16
    assert error(y, expected) < 2**-8


def test_no_trees_give_nothing() -> None:
    states, rows = make_states([])
    none = SsdTerms(torch.ones(0, HEADS, HEAD_DIM), torch.ones(0, HEADS), torch.ones(0, 2, STATE_DIM))
    y = ssd_tree(*none[:2], A, none.B, none.B, None, states, rows, padded_terms(none, []), DraftTrees([], []))
    assert y.shape == (0, HEADS, HEAD_DIM)
    ssd_fold(padded_terms(none, []), A, states, rows, rows)
    assert states.isnan().all()


@pytest.mark.parametrize(
    ("num_nodes", "num_histories", "num_rows"), [([3], 1, 2), ([3], 2, 1), ([2], 1, 1), ([1, 2], 2, 1)]
)
def test_trees_that_do_not_fit_are_refused(num_nodes: list[int], num_histories: int, num_rows: int) -> None:
    request = make_request("chain", 3, 4)
    states, _ = make_states([])
    own = request.terms([4, 5, 6])
    history = padded_terms(request.terms([0, 1, 2, 3][: 2 * num_histories]), [2] * num_histories)
    trees = DraftTrees(num_nodes, [-1] * sum(num_nodes))
    with pytest.raises(ValueError, match="ssd_tree"):
        ssd_tree(*own[:2], A, own.B, own.B, D, states, torch.arange(num_rows), history, trees)


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 1), (2, 1), (1, 2)])
def test_folds_that_do_not_fit_are_refused(num_sources: int, num_targets: int) -> None:
    terms = padded_terms(make_request("chain", 3, 0).terms([0, 1, 2]), [1, 2])
    with pytest.raises(ValueError, match="ssd_fold"):
        ssd_fold(terms, A, make_states([])[0], torch.arange(num_sources), torch.arange(num_targets))
