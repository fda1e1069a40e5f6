"""The chunked scan against the recurrence token by token and against the quadratic form, both in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.ssd_scan import ssd_scan, ssd_update

REGIMES = ("mild", "strong", "zero", "mixed")
TOLERANCE = 1e-6  # of max |x - ref| / max(1, max |ref|); math: 4.9e-7 in the worst regime


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None

    def part(self, start: int, end: int) -> Inputs:
        cut = slice(start, end)
        return replace(self, x=self.x[cut], dt=self.dt[cut], B=self.B[cut], C=self.C[cut])


def make_inputs(
    num_tokens: int, heads: int = 4, head_dim: int = 8, state_dim: int = 16, groups: int = 2, regime: str = "mild"
) -> Inputs:
    A = -torch.rand(heads) - 0.5
    draws = torch.rand(num_tokens, heads)
    decay = {
        "mild": draws * 0.2,
        "strong": draws * 20,
        "zero": draws * 1e-7,
        "mixed": torch.where(torch.rand(num_tokens, heads) < 0.5, torch.tensor(20.0), draws * 1e-3),
    }[regime]
    return Inputs(
        x=torch.randn(num_tokens, heads, head_dim),
        dt=decay / -A,
        A=A,
        B=torch.randn(num_tokens, groups, state_dim),
        C=torch.randn(num_tokens, groups, state_dim),
        D=torch.randn(heads),
    )


def make_states(inputs: Inputs, num_rows: int = 24) -> torch.Tensor:
    return torch.full((num_rows, *inputs.x.shape[1:], inputs.B.shape[2]), torch.nan)


def random_state(inputs: Inputs) -> torch.Tensor:
    return torch.randn(*inputs.x.shape[1:], inputs.B.shape[2])


def scan(
    inputs: Inputs,
    states: torch.Tensor,
    rows: list[int],
    seq_lens: list[int],
    context_lens: list[int],
    chunk_size: int = 64,
    exports: tuple[StateExport, ...] = (),
) -> torch.Tensor:
    i = inputs
    return ssd_scan(
        i.x, i.dt, i.A, i.B, i.C, i.D, states, torch.tensor(rows), seq_lens, context_lens, chunk_size, exports
    )


def recurrence(inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs, and the state after every token."""
    x, dt, A = inputs.x.double(), inputs.dt.double(), inputs.A.double()
    per_group = x.shape[1] // inputs.B.shape[1]
    B, C = (t.double().repeat_interleave(per_group, dim=1) for t in (inputs.B, inputs.C))
    state, outputs, states = state.double(), [], []
    for t in range(x.shape[0]):
        added = torch.einsum("h,hp,hn->hpn", dt[t], x[t], B[t])
        state = state * torch.exp(dt[t] * A)[:, None, None] + added
        y = torch.einsum("hpn,hn->hp", state, C[t])
        outputs.append(y if inputs.D is None else y + inputs.D.double()[:, None] * x[t])
        states.append(state)
    return torch.stack(outputs), states


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    gap = (actual.double() - expected).abs().max()
    return float(gap / expected.abs().max().clamp(min=1.0))  # NaN when anything read poison


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("chunk_size", [16, 50, 256])
def test_packed_sequences_of_odd_lengths_match_the_recurrence(regime: str, chunk_size: int) -> None:
    seq_lens, context_lens, rows = [37, 300, 1, 64, 129, 17], [0, 5, 7, 0, 9, 0], [3, 1, 7, 2, 5, 4]
    inputs = make_inputs(sum(seq_lens), regime=regime)
    states = make_states(inputs)
    initial = {row: random_state(inputs) for row, context in zip(rows, context_lens, strict=True) if context}
    for row, state in initial.items():
        states[row] = state
    positions = {0: (1, 36, 37), 1: (63, 64, 65, 299, 300), 2: (1,), 4: (16, 128, 129)}
    exports = [(sequence, length) for sequence, lengths in positions.items() for length in lengths]
    with_rows = tuple(StateExport(s, length, 8 + n) for n, (s, length) in enumerate(exports))
    y = scan(inputs, states, rows, seq_lens, context_lens, chunk_size, with_rows)

    start = 0
    for sequence, (length, row) in enumerate(zip(seq_lens, rows, strict=True)):
        own = inputs.part(start, start + length)
        expected, after = recurrence(own, initial.get(row, torch.zeros_like(random_state(own))))
        assert error(y[start : start + length], expected) < TOLERANCE
        assert error(states[row], after[-1]) < TOLERANCE
        for export in with_rows:
            if export.sequence == sequence:
                assert error(states[export.row], after[export.length - 1]) < TOLERANCE
        start += length
    untouched = set(range(24)) - set(rows) - {export.row for export in with_rows}
    assert all(states[row].isnan().all() for row in untouched)


@pytest.mark.parametrize("regime", REGIMES)
def test_one_long_sequence_matches_the_quadratic_form(regime: str) -> None:
    inputs = make_inputs(700, groups=1, regime=regime)
    y = scan(inputs, make_states(inputs), [1], [700], [0])
    log_decay = (inputs.dt.double() * inputs.A.double()).T  # [H, T]
    later = torch.ones(700, 700, dtype=torch.float64).triu(1)  # [j, m]: m > j
    sums = (log_decay[:, None, :] * later).cumsum(-1).transpose(1, 2)  # [H, i, j]
    decay = sums.exp().tril()
    scores = inputs.C[:, 0].double() @ inputs.B[:, 0].double().T
    expected = torch.einsum("hij,jh,jhp->ihp", decay * scores, inputs.dt.double(), inputs.x.double())
    assert inputs.D is not None
    expected += inputs.D.double()[:, None] * inputs.x.double()
    assert error(y, expected) < TOLERANCE


@pytest.mark.parametrize("regime", ["mild", "mixed"])
def test_resuming_at_every_position_matches_the_whole_scan(regime: str) -> None:
    num_tokens = 83
    inputs = make_inputs(num_tokens, regime=regime)
    whole = make_states(inputs)
    y = scan(inputs, whole, [1], [num_tokens], [0], chunk_size=32).double()
    for cut in range(1, num_tokens):
        states = make_states(inputs)
        first = scan(inputs.part(0, cut), states, [2], [cut], [0], chunk_size=32)
        second = scan(inputs.part(cut, num_tokens), states, [2], [num_tokens - cut], [cut], chunk_size=32)
        assert error(torch.cat((first, second)), y) < TOLERANCE
        assert error(states[2], whole[1].double()) < TOLERANCE


@pytest.mark.parametrize("chunk_size", [32, 48, 64])
def test_export_is_bit_for_bit_the_state_of_a_scan_that_stops_there(chunk_size: int) -> None:
    num_tokens = 150
    inputs = make_inputs(num_tokens, regime="mild")
    start = random_state(inputs)
    states = torch.full((num_tokens + 4, *start.shape), torch.nan)
    states[1] = start
    exports = tuple(StateExport(0, length, 3 + length) for length in range(1, num_tokens + 1))
    scan(inputs, states, [1], [num_tokens], [6], chunk_size, exports)
    assert torch.equal(states[3 + num_tokens], states[1])
    for length in range(chunk_size - 15, num_tokens):  # below, the chunk itself would be narrower
        stopped = make_states(inputs)
        stopped[1] = start
        scan(inputs.part(0, length), stopped, [1], [length], [6], chunk_size)
        assert torch.equal(stopped[1], states[3 + length]), length


def test_exports_change_neither_outputs_nor_the_live_row() -> None:
    inputs = make_inputs(100)
    plain, exporting = make_states(inputs), make_states(inputs)
    expected = scan(inputs, plain, [1], [100], [0])
    y = scan(inputs, exporting, [1], [100], [0], exports=(StateExport(0, 64, 2), StateExport(0, 70, 3)))
    assert torch.equal(y, expected)
    assert torch.equal(plain[1], exporting[1])


def test_a_sequence_gives_the_same_alone_and_packed() -> None:
    seq_lens = [5, 70, 33, 48]
    inputs = make_inputs(sum(seq_lens))
    packed = make_states(inputs)
    y = scan(inputs, packed, [1, 2, 3, 4], seq_lens, [0] * 4)
    start = 0
    for row, length in enumerate(seq_lens, 1):
        alone = make_states(inputs)
        own = scan(inputs.part(start, start + length), alone, [row], [length], [0])
        assert error(y[start : start + length], own.double()) < TOLERANCE
        assert error(packed[row], alone[row].double()) < TOLERANCE
        start += length


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("with_skip", [True, False])
def test_groups_and_skip_both_ways(groups: int, with_skip: bool) -> None:
    inputs = make_inputs(90, groups=groups)
    if not with_skip:
        inputs = replace(inputs, D=None)
    states = make_states(inputs)
    start = random_state(inputs)
    states[4] = start
    y = scan(inputs, states, [4], [90], [3], exports=(StateExport(0, 41, 5),))
    expected, after = recurrence(inputs, start)
    assert error(y, expected) < TOLERANCE
    assert error(states[4], after[-1]) < TOLERANCE
    assert error(states[5], after[40]) < TOLERANCE


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("with_skip", [True, False])
def test_update_matches_one_step_of_the_recurrence(groups: int, num_rows: int, with_skip: bool) -> None:
    inputs = make_inputs(num_rows, groups=groups, regime="strong")
    if not with_skip:
        inputs = replace(inputs, D=None)
    states = make_states(inputs)
    rows = [7, 2, 9, 4, 1][:num_rows]
    before = {row: random_state(inputs) for row in rows}
    for row, state in before.items():
        states[row] = state
    i = inputs
    y = ssd_update(i.x, i.dt, i.A, i.B, i.C, i.D, states, torch.tensor(rows))
    for n, row in enumerate(rows):
        expected, after = recurrence(inputs.part(n, n + 1), before[row])
        assert error(y[n : n + 1], expected) < TOLERANCE
        assert error(states[row], after[-1]) < TOLERANCE
    assert all(states[row].isnan().all() for row in set(range(24)) - set(rows))


def test_updates_token_by_token_match_the_scan() -> None:
    inputs = make_inputs(60)
    states = make_states(inputs)
    y = scan(inputs, states, [1], [60], [0]).double()
    states[2] = 0.0
    steps = []
    for t in range(60):
        i = inputs.part(t, t + 1)
        steps.append(ssd_update(i.x, i.dt, i.A, i.B, i.C, i.D, states, torch.tensor([2])))
    assert error(torch.cat(steps), y) < TOLERANCE
    assert error(states[2], states[1].double()) < TOLERANCE


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_inputs_accumulate_in_float32_and_give_bfloat16(pool_dtype: torch.dtype) -> None:
    inputs = make_inputs(140)
    narrow = replace(inputs, x=inputs.x.bfloat16(), B=inputs.B.bfloat16(), C=inputs.C.bfloat16())
    states = make_states(inputs).to(pool_dtype)
    y = scan(narrow, states, [1], [140], [0], exports=(StateExport(0, 77, 2),))
    expected, after = recurrence(narrow, torch.zeros_like(random_state(inputs)))
    assert y.dtype == torch.bfloat16
    assert error(y, expected) < 2**-8
    tolerance = TOLERANCE if pool_dtype == torch.float32 else 2**-8
    assert error(states[1], after[-1]) < tolerance
    assert error(states[2], after[76]) < tolerance
    i = narrow.part(0, 1)
    step = ssd_update(i.x, i.dt, i.A, i.B, i.C, i.D, states, torch.tensor([1]))
    expected, after = recurrence(i, after[-1])
    assert step.dtype == torch.bfloat16
    assert error(step, expected) < 2**-6
    assert error(states[1], after[-1]) < max(tolerance, 2**-7 if pool_dtype == torch.bfloat16 else 0)


def test_infinite_decay_forgets_without_nan() -> None:
    inputs = make_inputs(40)
    inputs = replace(inputs, A=torch.full((4,), -4.0))
    inputs.dt[20] = 3e38  # dt * A overflows to -inf
    inputs.x[20] = 0.0
    y = scan(inputs, make_states(inputs), [1], [40], [0])
    fresh = scan(inputs.part(21, 40), make_states(inputs), [1], [19], [0])
    assert error(y[21:], fresh.double()) < TOLERANCE


def test_no_sequences_give_no_outputs() -> None:
    inputs = make_inputs(0)
    states = make_states(inputs)
    assert scan(inputs, states, [], [], []).shape == (0, 4, 8)
    assert states.isnan().all()


@pytest.mark.parametrize(
    "change",
    [
        {"dt": torch.ones(9, 4)},
        {"A": -torch.ones(3)},
        {"D": torch.ones(5)},
        {"B": torch.ones(10, 3, 16)},
        {"B": torch.ones(10, 2, 12)},
        {"C": torch.ones(10, 1, 16)},
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, torch.Tensor]) -> None:
    inputs = make_inputs(10)
    states = make_states(inputs)
    broken = replace(inputs, **change)
    with pytest.raises(ValueError, match="ssd_scan"):
        scan(broken, states, [1], [10], [0])
    i = broken
    with pytest.raises(ValueError, match="ssd_update"):
        ssd_update(i.x, i.dt, i.A, i.B, i.C, i.D, states, torch.arange(10))


@pytest.mark.parametrize(
    ("rows", "seq_lens", "context_lens", "chunk_size", "exports"),
    [
        ([1], [9], [0], 64, ()),
        ([1, 2], [10], [0], 64, ()),
        ([1, 2], [10, 0], [0, 0], 64, ()),
        ([1], [10], [0, 0], 64, ()),
        ([1], [10], [0], 0, ()),
        ([1], [10], [0], 64, (StateExport(0, 11, 2),)),
        ([1], [10], [0], 64, (StateExport(0, 0, 2),)),
        ([1], [10], [0], 64, (StateExport(1, 1, 2),)),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    rows: list[int],
    seq_lens: list[int],
    context_lens: list[int],
    chunk_size: int,
    exports: tuple[StateExport, ...],
) -> None:
    inputs = make_inputs(10)
    with pytest.raises(ValueError, match="ssd_scan"):
        scan(inputs, make_states(inputs), rows, seq_lens, context_lens, chunk_size, exports)


def test_update_refuses_another_number_of_rows() -> None:
    i = make_inputs(2)
    with pytest.raises(ValueError, match="rows"):
        ssd_update(i.x, i.dt, i.A, i.B, i.C, i.D, make_states(i), torch.tensor([1]))
