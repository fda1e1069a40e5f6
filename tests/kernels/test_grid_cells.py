"""Scans over rows in 16 bits: the same bits however tokens are cut and packed, and rounded where the grid says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.gated_delta_scan import gated_delta_grid_scan, gated_delta_scan
from turnkeep.kernels.grid_cells import GRID, GridStates
from turnkeep.kernels.ssd_scan import ssd_grid_scan, ssd_scan
from turnkeep.kernels.stochastic_round import stochastic_round

LENGTH, NUM_ROWS, LAYER = 3 * GRID + 11, 12, 2
Scan = Callable[..., torch.Tensor]


@dataclass
class Case:
    """One sequence of a recurrence: its inputs by token, the parameters between them, and which ones a tail keeps."""

    inputs: list[torch.Tensor]
    parameters: dict[int, torch.Tensor]  # by their place among the arguments
    tails: tuple[int, ...]  # which inputs
    state_shape: tuple[int, ...]
    grid_scan: Scan
    scan: Scan

    def arguments(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        arguments = list(inputs)
        for place, value in sorted(self.parameters.items()):
            arguments.insert(place, value)
        return arguments

    def rows(self, dtype: torch.dtype) -> GridStates:
        """Rows that hold NaN, so that reading what nobody wrote shows."""
        tails = tuple(
            torch.full((NUM_ROWS, GRID, *self.inputs[i].shape[1:]), torch.nan, dtype=self.inputs[i].dtype)
            for i in self.tails
        )
        return GridStates(torch.full((NUM_ROWS, *self.state_shape), torch.nan, dtype=dtype), tails, LAYER)

    def run(
        self, grid: GridStates, work: list[tuple[int, int, int]], exports: list[StateExport] | None = None
    ) -> list[torch.Tensor]:
        """Outputs of tokens [start, end) in rows: work has (row, start, end)."""
        inputs = [torch.cat([tensor[start:end] for _, start, end in work]) for tensor in self.inputs]
        rows = torch.tensor([row for row, _, _ in work])
        lens, contexts = [end - start for _, start, end in work], [start for _, start, _ in work]
        y = self.grid_scan(*self.arguments(inputs), grid, rows, lens, contexts, exports or [])
        return list(y.split(lens))


def make_case(kind: str, dtype: torch.dtype = torch.float32) -> Case:
    torch.manual_seed(4)
    if kind == "ssd":
        x, dt = torch.randn(LENGTH, 6, 10).to(dtype), torch.rand(LENGTH, 6) * 0.3
        B, C = torch.randn(LENGTH, 2, 14).to(dtype), torch.randn(LENGTH, 2, 14).to(dtype)
        parameters = {2: -torch.rand(6) - 0.1, 5: torch.rand(6)}
        return Case([x, dt, B, C], parameters, (0, 1, 2), (6, 10, 14), ssd_grid_scan, ssd_scan)
    q, k, v = (torch.randn(LENGTH, heads, 12).to(dtype) for heads in (2, 2, 6))
    g, beta = -torch.rand(LENGTH, 6) * 0.2, torch.rand(LENGTH, 6)
    return Case([q, k, v, g, beta], {}, (1, 2, 3, 4), (6, 12, 12), gated_delta_grid_scan, gated_delta_scan)


def same_row(grid: GridStates, first: int, second: int, length: int) -> bool:
    tails = all(torch.equal(tail[first, : length % GRID], tail[second, : length % GRID]) for tail in grid.tails)
    return tails and (length < GRID or torch.equal(grid.states[first], grid.states[second]))


@pytest.fixture(params=["ssd", "delta"])
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "cuts", [[GRID], [1, 7, GRID - 1, GRID + 1, 2 * GRID], [40, 41, 42, 100], list(range(1, LENGTH))], ids=str
)
def test_outputs_and_rows_are_the_same_bits_however_a_sequence_is_cut(
    case: Case, dtype: torch.dtype, cuts: list[int]
) -> None:
    grid = case.rows(dtype)
    (whole,) = case.run(grid, [(1, 0, LENGTH)])
    pieces = [case.run(grid, [(2, start, end)])[0] for start, end in pairwise([0, *cuts, LENGTH])]
    assert torch.equal(torch.cat(pieces), whole)
    assert same_row(grid, 1, 2, LENGTH)


def test_packed_sequences_get_the_bits_that_each_gets_alone(case: Case) -> None:
    grid = case.rows(torch.float16)
    (whole,) = case.run(grid, [(1, 0, LENGTH)])
    parts: dict[int, list[torch.Tensor]] = {2: [], 3: [], 4: []}
    for work in ([(2, 0, 70), (3, 0, 5), (4, 0, 32)], [(4, 32, 33), (3, 5, 6), (2, 70, 71)], [(3, 6, 64), (2, 71, 96)]):
        for (row, _, _), y in zip(work, case.run(grid, work), strict=True):
            parts[row].append(y)
    for row, end in ((2, 96), (3, 64), (4, 33)):
        assert torch.equal(torch.cat(parts[row]), whole[:end])
        case.run(grid, [(5, 0, end)])
        assert same_row(grid, row, 5, end)


@pytest.mark.parametrize("position", [1, 20, GRID - 1, GRID, GRID + 1, 2 * GRID, 2 * GRID + 9, LENGTH])
def test_an_export_is_the_row_of_a_run_that_stops_there_and_is_resumed_to_the_bit(case: Case, position: int) -> None:
    grid = case.rows(torch.float16)
    case.run(grid, [(1, 0, 17)])
    exports = [StateExport(0, position - 17, 3)] if position > 17 else []
    (rest,) = case.run(grid, [(1, 17, LENGTH)], exports)
    case.run(grid, [(2, 0, position)])
    if exports:
        assert same_row(grid, 2, 3, position)
    if position < LENGTH:
        (resumed,) = case.run(grid, [(3 if exports else 2, position, LENGTH)])
        whole = torch.cat((torch.zeros(17, *rest.shape[1:]), rest))
        start = max(position, 17)
        assert torch.equal(resumed[start - position :], whole[start:])


def test_every_cell_is_the_plain_scan_from_the_rounded_state_before_it(case: Case) -> None:
    """The rule, with the operations that are tested apart."""
    dtype = torch.bfloat16
    grid = case.rows(dtype)
    (ours,) = case.run(grid, [(1, 0, LENGTH)])
    states, pieces = torch.zeros(2, *case.state_shape), []
    for start in range(0, LENGTH, GRID):
        inputs = [tensor[start : start + GRID] for tensor in case.inputs]
        length = inputs[0].shape[0]
        rows = torch.tensor([1])
        pieces.append(case.scan(*case.arguments(inputs), states, rows, [length], [start], GRID))
        if length == GRID:
            states[1] = stochastic_round(states[1:], dtype, [start + GRID], LAYER)[0].float()
    torch.testing.assert_close(ours, torch.cat(pieces), atol=2e-5, rtol=0)
    exact = torch.zeros(2, *case.state_shape)
    whole = case.scan(*case.arguments(case.inputs), exact, torch.tensor([1]), [LENGTH], [0], GRID)
    assert (ours - whole)[GRID:].abs().max() > 2e-4  # so rounding elsewhere, or none, would be seen above


def test_tails_keep_inputs_of_16_bits_as_they_are() -> None:
    case = make_case("ssd", torch.bfloat16)
    grid = case.rows(torch.float16)
    (whole,) = case.run(grid, [(1, 0, LENGTH)])
    assert whole.dtype == torch.bfloat16
    pieces = [case.run(grid, [(2, start, end)])[0] for start, end in pairwise([0, 13, 50, 51, LENGTH])]
    assert torch.equal(torch.cat(pieces), whole)


def test_what_does_not_fit_is_refused(case: Case) -> None:
    grid = case.rows(torch.float16)
    with pytest.raises(ValueError, match="lies outside"):
        case.run(grid, [(1, 0, 5)], [StateExport(0, 6, 2)])
    inputs = case.arguments([tensor[:5] for tensor in case.inputs])
    with pytest.raises(ValueError, match="add up"):
        case.grid_scan(*inputs, grid, torch.tensor([1]), [4], [0])
    with pytest.raises(ValueError, match="context lengths"):
        case.grid_scan(*inputs, grid, torch.tensor([1]), [5], [0, 0])
