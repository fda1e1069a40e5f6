"""The gated delta rule over trees against the rule token by token along every path, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draft_trees import SHAPES, make_parents, path
from gated_delta_cases import DECAYS, KEYS, DeltaInputs, error, make_inputs, recurrence
from packed_terms import padded_terms

from turnkeep.kernels.draft_tree import DraftTrees
from turnkeep.kernels.gated_delta_tree import DeltaTerms, gated_delta_fold, gated_delta_tree

TOLERANCE = 2e-6


class Case:
    """Trees behind histories behind stored states. Tokens of a request: its history, then its nodes."""

    def __init__(self, trees: list[list[int]], history_lens: list[int], **options: object) -> None:
        self.trees, self.history_lens = trees, history_lens
        self.num_nodes = [len(parents) for parents in trees]
        self.requests = [
            make_inputs(history + nodes, **options)  # type: ignore[arg-type]
            for history, nodes in zip(history_lens, self.num_nodes, strict=True)
        ]
        self.rows = [5, 2, 9, 1, 7][: len(trees)]
        self.states = self.requests[0].poisoned_states(12)
        for row in self.rows:
            self.states[row] = self.requests[0].random_state()

    def along(self, request: int, node: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output and u of a node, and the state after it, by the recurrence along its path."""
        history = self.history_lens[request]
        tokens = [*range(history), *(history + n for n in path(self.trees[request], node))]
        outputs, written, states = recurrence(self.requests[request].picked(tokens), self.states[self.rows[request]])
        return outputs[-1], written[-1], states[-1]

    def history(self, lens: list[int] | None = None, skips: list[int] | None = None) -> DeltaTerms:
        """Terms of tokens [skip, skip + length) of every request's history, by the recurrence."""
        lens, skips = lens or self.history_lens, skips or [0] * len(self.trees)
        parts = []
        for inputs, row, length, skip in zip(self.requests, self.rows, lens, skips, strict=True):
            own = inputs.part(0, skip + length)
            u = recurrence(own, self.states[row])[1].float() if skip + length else own.v
            parts.append((own.k[skip:], u[skip:], own.g[skip:]))
        return DeltaTerms(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def nodes(self) -> DeltaInputs:
        parts = [inputs.part(h, h + n).tensors() for inputs, h, n in self.counted()]
        return DeltaInputs(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def counted(self) -> list[tuple[DeltaInputs, int, int]]:
        return list(zip(self.requests, self.history_lens, self.num_nodes, strict=True))

    def run(
        self, states: torch.Tensor | None = None, history: DeltaTerms | None = None, lens: list[int] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs, u = gated_delta_tree(
            *self.nodes().tensors(),
            self.states if states is None else states,
            torch.tensor(self.rows),
            padded_terms(history or self.history(), self.history_lens if lens is None else lens),
            DraftTrees(self.num_nodes, [parent for parents in self.trees for parent in parents]),
        )
        return list(outputs.split(self.num_nodes)), list(u.split(self.num_nodes))

    def check(self, outputs: list[torch.Tensor], u: list[torch.Tensor]) -> None:
        for request, count in enumerate(self.num_nodes):
            expected = [self.along(request, node) for node in range(count)]
            assert error(outputs[request], torch.stack([o for o, _, _ in expected])) < TOLERANCE
            assert error(u[request], torch.stack([written for _, written, _ in expected])) < TOLERANCE


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("max_beta", [1.0, 2.0])
def test_packed_trees_match_the_recurrence_along_every_path(decay: str, keys: str, max_beta: float) -> None:
    trees = [make_parents(shape, count) for shape, count in zip(SHAPES, (7, 19, 1, 33, 12), strict=True)]
    case = Case(trees, [3, 0, 9, 17, 1], decay=decay, keys=keys, max_beta=max_beta)
    before = case.states.clone()
    case.check(*case.run())
    assert torch.equal(case.states.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("shape", ["star", "bushy"])
def test_strong_decays_off_the_path_match_where_masking_after_exp_does_not(shape: str) -> None:
    case = Case([make_parents(shape, 40)], [5], decay="strong")
    case.requests[0].g.mul_(10)
    case.check(*case.run())
    # Sums along each node's path, subtracted, exponentiated and then masked: what the operation must not do.
    g = case.nodes().g[:, 0]
    paths = [path(case.trees[0], node) for node in range(40)]
    sums = torch.stack([g[nodes].sum() for nodes in paths])
    is_ancestor = torch.tensor([[float(other in nodes) for other in range(40)] for nodes in paths])
    assert ((sums[:, None] - sums).exp() * is_ancestor).isnan().any()
    factored = sums.exp()[:, None] * (-sums).exp()
    assert not (factored * is_ancestor).isfinite().all()


def test_long_chains_match_where_differences_of_running_sums_do_not() -> None:
    case = Case([make_parents("chain", 256)], [0], decay="mixed")
    outputs, u = case.run()
    for node in (0, 100, 254, 255):
        expected, written, _ = case.along(0, node)
        assert error(outputs[0][node], expected) < TOLERANCE
        assert error(u[0][node], written) < TOLERANCE
    g = case.nodes().g
    sums = g.cumsum(0)
    exact = g.double().flip(0).cumsum(0).flip(0)[1:].exp()
    assert error((sums[255] - sums[:-1]).exp(), exact) > 10 * TOLERANCE


def test_repeated_keys_of_full_strength_match_where_a_doubling_inverse_gives_noise() -> None:
    case = Case([make_parents("chain", 64)], [0], decay="zero", keys="close")
    case.requests[0].beta.fill_(1.0)
    case.check(*case.run())
    keys = torch.nn.functional.normalize(case.nodes().k[:, 0], dim=-1)
    system = (keys @ keys.T).tril(-1)
    doubled, power = torch.eye(64) - system, system @ system
    for _ in range(5):
        doubled, power = doubled @ (torch.eye(64) + power), power @ power
    assert not error(doubled, torch.linalg.inv(torch.eye(64, dtype=torch.float64) + system.double())) < 1.0


def test_nodes_off_the_path_leave_no_trace_in_a_nodes_delta() -> None:
    case = Case([make_parents("random", 30)], [4])
    kept = path(case.trees[0], 29)
    expected = case.run()[1][0][kept]
    others = [4 + node for node in range(30) if node not in kept]
    for tensor in case.requests[0].tensors():
        tensor[others] = tensor[others] * 7 - 3 if tensor is not case.requests[0].g else -0.5
    assert torch.equal(case.run()[1][0][kept], expected)


@pytest.mark.parametrize("key_heads", [1, 4])
def test_key_heads_are_shared_by_blocks_of_value_heads(key_heads: int) -> None:
    case = Case([make_parents("deep", 9), make_parents("star", 4)], [2, 0], key_heads=key_heads, key_dim=7)
    case.check(*case.run())


def test_folding_history_and_path_matches_the_recurrence() -> None:
    case = Case([make_parents("random", 21), make_parents("deep", 13)], [6, 0], decay="mixed")
    history, (_, u) = case.history(), case.run()
    accepted = [path(case.trees[0], 20), path(case.trees[1], 12)]
    runs = []
    for request, (inputs, skip, _) in enumerate(case.counted()):
        tokens = [skip + node for node in accepted[request]]
        own_history = [t[: case.history_lens[0]] if request == 0 else t[case.history_lens[0] :] for t in history]
        own = (inputs.k[tokens], u[request][accepted[request]], inputs.g[tokens])
        runs.append([torch.cat(pair) for pair in zip(own_history, own, strict=True)])
    terms = DeltaTerms(*(torch.cat(tensors) for tensors in zip(*runs, strict=True)))
    lens = [len(run[0]) for run in runs]
    before = case.states.clone()
    gated_delta_fold(padded_terms(terms, lens), case.states, torch.tensor(case.rows), torch.tensor([3, case.rows[1]]))
    after = case.states.clone()
    case.states = before
    assert error(after[3], case.along(0, 20)[2]) < TOLERANCE
    assert error(after[case.rows[1]], case.along(1, 12)[2]) < TOLERANCE
    assert torch.equal(after[case.rows[0]], before[case.rows[0]])


@pytest.mark.parametrize("folded", [[0, 3], [5, 0], [4, 7], [9, 7]])
def test_a_part_of_the_history_may_be_folded_first(folded: list[int]) -> None:
    case = Case([make_parents("random", 11), make_parents("bushy", 18)], [9, 7], decay="strong", keys="same")
    states = case.states.clone()
    rows = torch.tensor(case.rows)
    gated_delta_fold(padded_terms(case.history(folded), folded), states, rows, rows)
    rest = [length - count for length, count in zip(case.history_lens, folded, strict=True)]
    remaining = case.history(rest, folded)
    case.check(*case.run(states, remaining, rest))
    gated_delta_fold(padded_terms(remaining, rest), states, rows, rows)
    whole = case.states.clone()
    gated_delta_fold(padded_terms(case.history(), case.history_lens), whole, rows, rows)
    assert all(error(states[row], whole[row]) < TOLERANCE for row in case.rows)


def test_bfloat16_inputs_give_bfloat16_outputs_and_float32_deltas() -> None:
    case = Case([make_parents("random", 14)], [3])
    case.requests = [replace(i, q=i.q.bfloat16(), k=i.k.bfloat16(), v=i.v.bfloat16()) for i in case.requests]
    outputs, u = case.run()
    assert outputs[0].dtype == torch.bfloat16
    assert u[0].dtype == torch.float32
    expected = [case.along(0, node) for node in range(14)]
    assert error(outputs[0], torch.stack([o for o, _, _ in expected])) < 2**-8
    assert error(u[0], torch.stack([written for _, written, _ in expected])) < TOLERANCE


def test_no_trees_give_nothing() -> None:
    inputs = make_inputs(0)
    none = DeltaTerms(inputs.k, inputs.v, inputs.g)
    rows, states = torch.tensor([], dtype=torch.int64), inputs.poisoned_states()
    outputs, u = gated_delta_tree(*inputs.tensors(), states, rows, padded_terms(none, []), DraftTrees([], []))
    assert outputs.shape == u.shape == (0, 4, 10)
    gated_delta_fold(padded_terms(none, []), states, rows, rows)
    assert states.isnan().all()


@pytest.mark.parametrize(
    ("num_nodes", "num_histories", "num_rows"), [([3], 1, 2), ([3], 2, 1), ([2], 1, 1), ([1, 2], 2, 1)]
)
def test_trees_that_do_not_fit_are_refused(num_nodes: list[int], num_histories: int, num_rows: int) -> None:
    inputs, before = make_inputs(3), make_inputs(2 * num_histories)
    history = padded_terms(DeltaTerms(before.k, before.v, before.g), [2] * num_histories)
    trees = DraftTrees(num_nodes, [-1] * sum(num_nodes))
    with pytest.raises(ValueError, match="gated_delta_tree"):
        gated_delta_tree(*inputs.tensors(), inputs.poisoned_states(), torch.arange(num_rows), history, trees)


@pytest.mark.parametrize(("num_sources", "num_targets"), [(1, 1), (2, 1), (1, 2)])
def test_folds_that_do_not_fit_are_refused(num_sources: int, num_targets: int) -> None:
    inputs = make_inputs(3)
    terms = padded_terms(DeltaTerms(inputs.k, inputs.v, inputs.g), [1, 2])
    with pytest.raises(ValueError, match="gated_delta_fold"):
        gated_delta_fold(terms, inputs.poisoned_states(), torch.arange(num_sources), torch.arange(num_targets))
