"""The chunked gated delta scan against the rule token by token in float64, and against the reference library's."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from gated_delta_cases import DECAYS, KEYS, DeltaInputs, error, make_inputs, recurrence

from turnkeep.kernels.forward_batch import StateExport
from turnkeep.kernels.gated_delta_scan import gated_delta_scan, gated_delta_update

TOLERANCE = 2e-6  # math: 1.7e-6 in the worst regime


def scan(
    inputs: DeltaInputs,
    states: torch.Tensor,
    rows: list[int],
    seq_lens: list[int],
    context_lens: list[int],
    chunk_size: int = 64,
    exports: tuple[StateExport, ...] = (),
) -> torch.Tensor:
    return gated_delta_scan(*inputs.tensors(), states, torch.tensor(rows), seq_lens, context_lens, chunk_size, exports)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("max_beta", [1.0, 2.0])
@pytest.mark.parametrize("chunk_size", [20, 256])
def test_packed_sequences_of_odd_lengths_match_the_recurrence(
    decay: str, keys: str, max_beta: float, chunk_size: int
) -> None:
    seq_lens, context_lens, rows = [37, 211, 1, 64, 129, 17], [0, 5, 7, 0, 9, 0], [3, 1, 7, 2, 5, 4]
    inputs = make_inputs(sum(seq_lens), decay=decay, keys=keys, max_beta=max_beta)
    states = inputs.poisoned_states()
    zero = torch.zeros_like(inputs.random_state())
    initial = {row: inputs.random_state() for row, context in zip(rows, context_lens, strict=True) if context}
    for row, state in initial.items():
        states[row] = state
    positions = {0: (1, 36, 37), 1: (63, 64, 65, 210, 211), 2: (1,), 4: (16, 128, 129)}
    exports = [(sequence, length) for sequence, lengths in positions.items() for length in lengths]
    with_rows = tuple(StateExport(s, length, 8 + n) for n, (s, length) in enumerate(exports))
    outputs = scan(inputs, states, rows, seq_lens, context_lens, chunk_size, with_rows)

    start = 0
    for sequence, (length, row) in enumerate(zip(seq_lens, rows, strict=True)):
        expected, _, after = recurrence(inputs.part(start, start + length), initial.get(row, zero))
        assert error(outputs[start : start + length], expected) < TOLERANCE
        assert error(states[row], after[-1]) < TOLERANCE
        for export in with_rows:
            if export.sequence == sequence:
                assert error(states[export.row], after[export.length - 1]) < TOLERANCE
        start += length
    untouched = set(range(24)) - set(rows) - {export.row for export in with_rows}
    assert all(states[row].isnan().all() for row in untouched)


def test_repeated_keys_of_full_strength_match_where_a_doubling_inverse_gives_noise() -> None:
    inputs = make_inputs(64, decay="zero", keys="close")
    inputs = replace(inputs, beta=torch.ones_like(inputs.beta))
    expected, _, after = recurrence(inputs, torch.zeros_like(inputs.random_state()))
    states = inputs.poisoned_states()
    assert error(scan(inputs, states, [1], [64], [0]), expected) < TOLERANCE
    assert error(states[1], after[-1]) < TOLERANCE
    # The same system by powers of its strictly lower part: what the scan must not do.
    keys = torch.nn.functional.normalize(inputs.k[:, 0], dim=-1)
    system = (keys @ keys.T).tril(-1)
    doubled, power = torch.eye(64) - system, system @ system
    for _ in range(5):
        doubled, power = doubled @ (torch.eye(64) + power), power @ power
    exact = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + system.double())
    assert not error(doubled, exact) < 1.0


def test_long_decays_match_where_differences_of_running_sums_do_not() -> None:
    inputs = make_inputs(256, decay="mixed")
    expected, _, after = recurrence(inputs, torch.zeros_like(inputs.random_state()))
    states = inputs.poisoned_states()
    assert error(scan(inputs, states, [1], [256], [0], chunk_size=256), expected) < TOLERANCE
    assert error(states[1], after[-1]) < TOLERANCE
    sums = inputs.g.cumsum(0)
    differences = (sums[255] - sums).exp().double()
    exact = inputs.g.double().flip(0).cumsum(0).flip(0).sub(inputs.g.double()).exp()
    assert error(differences, exact) > 10 * TOLERANCE


@pytest.mark.parametrize("decay", ["mild", "mixed"])
def test_resuming_at_every_position_matches_the_whole_scan(decay: str) -> None:
    num_tokens = 83
    inputs = make_inputs(num_tokens, decay=decay)
    whole = inputs.poisoned_states()
    outputs = scan(inputs, whole, [1], [num_tokens], [0], chunk_size=32)
    for cut in range(1, num_tokens):
        states = inputs.poisoned_states()
        first = scan(inputs.part(0, cut), states, [2], [cut], [0], chunk_size=32)
        second = scan(inputs.part(cut, num_tokens), states, [2], [num_tokens - cut], [cut], chunk_size=32)
        assert error(torch.cat((first, second)), outputs) < TOLERANCE
        assert error(states[2], whole[1]) < TOLERANCE


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("decay", ["mild", "mixed"])
def test_export_is_bit_for_bit_the_state_of_a_scan_that_stops_there(chunk_size: int, decay: str) -> None:
    num_tokens = 150
    inputs = make_inputs(num_tokens, decay=decay)
    start = inputs.random_state()
    states = inputs.poisoned_states(num_tokens + 4)
    states[1] = start
    exports = tuple(StateExport(0, length, 3 + length) for length in range(1, num_tokens + 1))
    scan(inputs, states, [1], [num_tokens], [6], chunk_size, exports)
    assert torch.equal(states[3 + num_tokens], states[1])
    for length in range(chunk_size - 15, num_tokens):  # below, the chunk itself would be narrower
        stopped = inputs.poisoned_states()
        stopped[1] = start
        scan(inputs.part(0, length), stopped, [1], [length], [6], chunk_size)
        assert torch.equal(stopped[1], states[3 + length]), length


def test_exports_change_neither_outputs_nor_the_live_row() -> None:
    inputs = make_inputs(100)
    plain, exporting = inputs.poisoned_states(), inputs.poisoned_states()
    expected = scan(inputs, plain, [1], [100], [0])
    outputs = scan(inputs, exporting, [1], [100], [0], exports=(StateExport(0, 64, 2), StateExport(0, 70, 3)))
    assert torch.equal(outputs, expected)
    assert torch.equal(plain[1], exporting[1])


def test_a_sequence_gives_the_same_alone_and_packed() -> None:
    seq_lens = [5, 70, 33, 48]
    inputs = make_inputs(sum(seq_lens))
    packed = inputs.poisoned_states()
    outputs = scan(inputs, packed, [1, 2, 3, 4], seq_lens, [0] * 4)
    start = 0
    for row, length in enumerate(seq_lens, 1):
        alone = inputs.poisoned_states()
        own = scan(inputs.part(start, start + length), alone, [row], [length], [0])
        assert error(outputs[start : start + length], own) < TOLERANCE
        assert error(packed[row], alone[row]) < TOLERANCE
        start += length


@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("has_context", [True, False])
def test_key_heads_are_shared_by_blocks_of_value_heads(key_heads: int, has_context: bool) -> None:
    inputs = make_inputs(90, key_heads=key_heads, value_heads=6, key_dim=7, value_dim=13)
    states = inputs.poisoned_states()
    start = inputs.random_state()
    states[4] = start if has_context else torch.nan
    outputs = scan(inputs, states, [4], [90], [3 if has_context else 0], exports=(StateExport(0, 41, 5),))
    expected, _, after = recurrence(inputs, start if has_context else torch.zeros_like(start))
    assert error(outputs, expected) < TOLERANCE
    assert error(states[4], after[-1]) < TOLERANCE
    assert error(states[5], after[40]) < TOLERANCE


@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("decay", ["strong", "zero"])
def test_update_matches_one_step_of_the_recurrence(key_heads: int, num_rows: int, decay: str) -> None:
    inputs = make_inputs(num_rows, key_heads=key_heads, decay=decay, max_beta=2.0)
    states = inputs.poisoned_states()
    rows = [7, 2, 9, 4, 1][:num_rows]
    before = {row: inputs.random_state() for row in rows}
    for row, state in before.items():
        states[row] = state
    outputs = gated_delta_update(*inputs.tensors(), states, torch.tensor(rows))
    for n, row in enumerate(rows):
        expected, _, after = recurrence(inputs.part(n, n + 1), before[row])
        assert error(outputs[n : n + 1], expected) < TOLERANCE
        assert error(states[row], after[-1]) < TOLERANCE
    assert all(states[row].isnan().all() for row in set(range(24)) - set(rows))


def test_updates_token_by_token_match_the_scan() -> None:
    inputs = make_inputs(60, keys="close")
    states = inputs.poisoned_states()
    outputs = scan(inputs, states, [1], [60], [0])
    states[2] = 0.0
    steps = [gated_delta_update(*inputs.part(t, t + 1).tensors(), states, torch.tensor([2])) for t in range(60)]
    assert error(torch.cat(steps), outputs) < TOLERANCE
    assert error(states[2], states[1]) < TOLERANCE


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_inputs_accumulate_in_float32_and_give_bfloat16(pool_dtype: torch.dtype) -> None:
    inputs = make_inputs(140)
    narrow = replace(inputs, q=inputs.q.bfloat16(), k=inputs.k.bfloat16(), v=inputs.v.bfloat16())
    states = inputs.poisoned_states().to(pool_dtype)
    outputs = scan(narrow, states, [1], [140], [0], exports=(StateExport(0, 77, 2),))
    expected, _, after = recurrence(narrow, torch.zeros_like(inputs.random_state()))
    assert outputs.dtype == torch.bfloat16
    assert error(outputs, expected) < 2**-8
    tolerance = TOLERANCE if pool_dtype == torch.float32 else 2**-8
    assert error(states[1], after[-1]) < tolerance
    assert error(states[2], after[76]) < tolerance
    before = states[1].clone()
    step = gated_delta_update(*narrow.part(0, 1).tensors(), states, torch.tensor([1]))
    expected, _, after = recurrence(narrow.part(0, 1), before)
    assert step.dtype == torch.bfloat16
    assert error(step, expected) < 2**-8
    assert error(states[1], after[-1]) < tolerance


def test_infinite_decay_forgets_without_nan() -> None:
    inputs = make_inputs(40)
    inputs.g[20] = -torch.inf
    inputs.beta[20] = 0.0
    outputs = scan(inputs, inputs.poisoned_states(), [1], [40], [0])
    fresh = scan(inputs.part(21, 40), inputs.poisoned_states(), [1], [19], [0])
    assert error(outputs[21:], fresh) < TOLERANCE


def test_keys_of_zero_write_nothing() -> None:
    inputs = make_inputs(30)
    inputs.k[:] = 0.0
    states = inputs.poisoned_states()
    assert not scan(inputs, states, [1], [30], [0]).any()
    assert not states[1].any()


def test_no_sequences_give_no_outputs() -> None:
    inputs = make_inputs(0)
    states = inputs.poisoned_states()
    assert scan(inputs, states, [], [], []).shape == (0, 4, 10)
    assert states.isnan().all()


@pytest.mark.parametrize("key_heads", [2, 4])
def test_outputs_and_states_equal_the_reference_library(key_heads: int) -> None:
    with warnings.catch_warnings():
        # Imports of the reference library warn about optional packages.
        warnings.simplefilter("ignore")
        from transformers.models.qwen3_next import modeling_qwen3_next as library

        inputs = make_inputs(77, key_heads=key_heads)
        start = inputs.random_state()
        q, k, v, g, beta = (tensor[None] for tensor in inputs.tensors())
        options = {"g": g, "beta": beta, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        for rule in (library.torch_chunk_gated_delta_rule, library.torch_recurrent_gated_delta_rule):
            expected, final = rule(q, k, v, initial_state=start[None].clone(), **options)
            states = inputs.poisoned_states()
            states[1] = start
            assert error(scan(inputs, states, [1], [77], [4]), expected[0]) < TOLERANCE
            assert error(states[1], final[0]) < TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.ones(10, 1, 12)},
        {"k": torch.ones(10, 3, 12), "q": torch.ones(10, 3, 12)},
        {"k": torch.ones(10, 2, 9), "q": torch.ones(10, 2, 9)},
        {"v": torch.ones(9, 4, 10)},
        {"v": torch.ones(10, 4, 11)},
        {"g": torch.ones(10, 2)},
        {"beta": torch.ones(9, 4)},
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, torch.Tensor]) -> None:
    inputs = make_inputs(10)
    states = inputs.poisoned_states()
    broken = replace(inputs, **change)
    with pytest.raises(ValueError, match="gated_delta_scan"):
        scan(broken, states, [1], [10], [0])
    with pytest.raises(ValueError, match="gated_delta_update"):
        gated_delta_update(*broken.tensors(), states, torch.arange(10))


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
    with pytest.raises(ValueError, match="gated_delta_scan"):
        scan(inputs, inputs.poisoned_states(), rows, seq_lens, context_lens, chunk_size, exports)


def test_update_refuses_another_number_of_rows() -> None:
    inputs = make_inputs(2)
    with pytest.raises(ValueError, match="rows"):
        gated_delta_update(*inputs.tensors(), inputs.poisoned_states(), torch.tensor([1]))
