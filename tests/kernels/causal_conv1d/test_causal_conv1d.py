"""The packed convolution against torch's own in float64, and bit for bit against itself cut in every way."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch.nn import functional

from turnkeep.kernels.causal_conv1d import causal_conv1d, causal_conv1d_update
from turnkeep.kernels.forward_batch import StateExport

CHANNELS = 45  # no multiple of a vector width: elements fall on all places of a vector


def make_weights(
    width: int, with_bias: bool = True, channels: int = CHANNELS
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.randn(channels, width), torch.randn(channels) if with_bias else None


def make_windows(width: int, num_rows: int = 40, channels: int = CHANNELS) -> torch.Tensor:
    return torch.full((num_rows, channels, width - 1), torch.nan)


def expected_outputs(
    history: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """Outputs of x [T, C] after the raw inputs history [W - 1, C], by torch.conv1d in float64."""
    joined = torch.cat((history, x)).double().T[None]
    y = functional.conv1d(joined, weight.double()[:, None], None if bias is None else bias.double(), groups=x.shape[1])
    return (functional.silu(y) if activation == "silu" else y)[0].T


@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
def test_packed_sequences_match_torch(width: int, with_bias: bool, activation: Literal["silu"] | None) -> None:
    seq_lens, context_lens, rows = [7, 1, 2, 33, 3], [0, 9, 2, 5, 0], [3, 1, 7, 2, 5]
    weight, bias = make_weights(width, with_bias)
    windows = make_windows(width)
    x = torch.randn(sum(seq_lens), CHANNELS)
    histories = [
        torch.randn(width - 1, CHANNELS) if context else torch.zeros(width - 1, CHANNELS) for context in context_lens
    ]
    for row, context, history in zip(rows, context_lens, histories, strict=True):
        if context:
            windows[row] = history.T
    exports = tuple(
        StateExport(sequence, length, 8 + n)
        for n, (sequence, length) in enumerate([(0, 1), (0, 2), (0, 7), (1, 1), (2, 1), (3, 1), (3, 17), (4, 3)])
    )
    y = causal_conv1d(x, weight, bias, windows, torch.tensor(rows), seq_lens, context_lens, activation, exports)

    start = 0
    for sequence, (length, row, history) in enumerate(zip(seq_lens, rows, histories, strict=True)):
        own = x[start : start + length]
        torch.testing.assert_close(
            y[start : start + length].double(),
            expected_outputs(history, own, weight, bias, activation),
            rtol=1e-5,
            atol=1e-5,
        )
        joined = torch.cat((history, own))
        assert torch.equal(windows[row], joined[length : length + width - 1].T)
        for export in exports:
            if export.sequence == sequence:
                assert torch.equal(windows[export.row], joined[export.length : export.length + width - 1].T)
        start += length
    untouched = set(range(40)) - set(rows) - {export.row for export in exports}
    assert all(windows[row].isnan().all() for row in untouched)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("activation", ["silu", None])
def test_whole_chunked_and_token_by_token_give_the_same_bits(
    with_bias: bool, activation: Literal["silu"] | None
) -> None:
    num_tokens = 37
    weight, bias = make_weights(4, with_bias)
    x = torch.randn(num_tokens, CHANNELS)
    row = torch.tensor([1])
    windows = make_windows(4)
    whole = causal_conv1d(x, weight, bias, windows, row, [num_tokens], [0], activation)
    for cut in range(1, num_tokens):
        cut_windows = make_windows(4)
        first = causal_conv1d(x[:cut], weight, bias, cut_windows, row, [cut], [0], activation)
        second = causal_conv1d(x[cut:], weight, bias, cut_windows, row, [num_tokens - cut], [cut], activation)
        assert torch.equal(torch.cat((first, second)), whole)
        assert torch.equal(cut_windows[1], windows[1])
    step_windows = make_windows(4)
    steps = [causal_conv1d(x[:1], weight, bias, step_windows, row, [1], [0], activation)]
    steps += [
        causal_conv1d_update(x[t : t + 1], weight, bias, step_windows, row, activation) for t in range(1, num_tokens)
    ]
    assert torch.equal(torch.cat(steps), whole)
    assert torch.equal(step_windows[1], windows[1])


def test_packing_and_exports_change_no_bit() -> None:
    seq_lens = [5, 20, 1, 9]
    weight, bias = make_weights(4)
    x = torch.randn(sum(seq_lens), CHANNELS)
    windows = make_windows(4)
    packed = causal_conv1d(
        x, weight, bias, windows, torch.tensor([1, 2, 3, 4]), seq_lens, [0] * 4, "silu", (StateExport(1, 11, 6),)
    )
    start = 0
    for row, length in enumerate(seq_lens, 1):
        alone_windows = make_windows(4)
        own = x[start : start + length]
        alone = causal_conv1d(own, weight, bias, alone_windows, torch.tensor([row]), [length], [0], "silu")
        assert torch.equal(packed[start : start + length], alone)
        assert torch.equal(windows[row], alone_windows[row])
        start += length
    stopped = make_windows(4)
    causal_conv1d(x[5:16], weight, bias, stopped, torch.tensor([1]), [11], [0], "silu")
    assert torch.equal(windows[6], stopped[1])


def test_update_of_a_batch_gives_the_bits_of_each_alone() -> None:
    weight, bias = make_weights(4)
    x = torch.randn(5, CHANNELS)
    rows = [7, 2, 9, 4, 1]
    windows = make_windows(4)
    windows[rows] = torch.randn(5, CHANNELS, 3)
    before = windows.clone()
    y = causal_conv1d_update(x, weight, bias, windows, torch.tensor(rows), "silu")
    for n, row in enumerate(rows):
        alone = before.clone()
        own = causal_conv1d_update(x[n : n + 1], weight, bias, alone, torch.tensor([row]), "silu")
        assert torch.equal(own[0], y[n])
        assert torch.equal(alone[row], windows[row])
        assert torch.equal(windows[row], torch.cat((before[row], x[n][:, None]), dim=1)[:, 1:])
    assert all(windows[row].isnan().all() for row in set(range(40)) - set(rows))


@pytest.mark.parametrize("window_dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_inputs_are_summed_in_float32_and_give_bfloat16(window_dtype: torch.dtype) -> None:
    weight, bias = make_weights(4)
    assert bias is not None
    weight, bias = weight.bfloat16(), bias.bfloat16()
    x = torch.randn(20, CHANNELS).bfloat16()
    windows = make_windows(4).to(window_dtype)
    y = causal_conv1d(x, weight, bias, windows, torch.tensor([1]), [20], [0], None)
    expected = expected_outputs(torch.zeros(3, CHANNELS), x, weight, bias, None)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=1e-5)
    step = causal_conv1d_update(x[-1:], weight, bias, windows, torch.tensor([1]), None)
    expected = expected_outputs(x[-3:], x[-1:], weight, bias, None)
    assert step.dtype == torch.bfloat16
    torch.testing.assert_close(step.double(), expected, rtol=2**-8, atol=1e-5)


def test_odd_channel_counts_and_width_one_work() -> None:
    weight, bias = make_weights(1, channels=7)
    windows = make_windows(1, channels=7)
    x = torch.randn(6, 7)
    y = causal_conv1d(x, weight, bias, windows, torch.tensor([1, 2]), [4, 2], [0, 3], "silu")
    torch.testing.assert_close(
        y.double(), expected_outputs(torch.zeros(0, 7), x, weight, bias, "silu"), rtol=1e-5, atol=1e-5
    )


def test_no_sequences_give_no_outputs() -> None:
    weight, bias = make_weights(4)
    windows = make_windows(4)
    y = causal_conv1d(
        torch.zeros(0, CHANNELS), weight, bias, windows, torch.zeros(0, dtype=torch.int64), [], [], "silu"
    )
    assert y.shape == (0, CHANNELS)


@pytest.mark.parametrize(
    ("channels", "window_width", "bias_channels"), [(44, 3, CHANNELS), (CHANNELS, 4, CHANNELS), (CHANNELS, 3, 44)]
)
def test_shapes_that_do_not_fit_are_refused(channels: int, window_width: int, bias_channels: int) -> None:
    weight, bias = torch.randn(CHANNELS, 4), torch.randn(bias_channels)
    x, windows = torch.randn(6, channels), torch.zeros(4, CHANNELS, window_width)
    with pytest.raises(ValueError, match="causal_conv1d"):
        causal_conv1d(x, weight, bias, windows, torch.tensor([1]), [6], [0])
    with pytest.raises(ValueError, match="causal_conv1d_update"):
        causal_conv1d_update(x, weight, bias, windows, torch.arange(6))


@pytest.mark.parametrize(
    ("rows", "seq_lens", "context_lens", "exports"),
    [
        ([1], [5], [0], ()),
        ([1, 2], [6], [0], ()),
        ([1], [6], [0, 1], ()),
        ([1], [6], [0], (StateExport(0, 7, 2),)),
        ([1], [6], [0], (StateExport(0, 0, 2),)),
        ([1], [6], [0], (StateExport(1, 1, 2),)),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    rows: list[int], seq_lens: list[int], context_lens: list[int], exports: tuple[StateExport, ...]
) -> None:
    weight, bias = make_weights(4)
    x = torch.randn(6, CHANNELS)
    with pytest.raises(ValueError, match="causal_conv1d"):
        causal_conv1d(x, weight, bias, make_windows(4), torch.tensor(rows), seq_lens, context_lens, None, exports)
    with pytest.raises(ValueError, match="rows"):
        causal_conv1d_update(x, weight, bias, make_windows(4), torch.tensor([1]))
