"""Attention over pages against a plain loop over queries and heads in float64; slots nobody wrote hold NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import turnkeep.kernels.paged_attention.reference as reference
from turnkeep.kernels.paged_attention import paged_attention, write_kv

HEAD_DIM = 16
SCALE = HEAD_DIM**-0.5


@dataclass
class Requests:
    """Requests with random keys and values in a pool; everything else in the pool is NaN, except page 0."""

    seq_lens: list[int]
    context_lens: list[int]
    num_kv_heads: int = 2
    group: int = 3
    page_size: int = 4
    dtype: torch.dtype = torch.float32
    shuffled: bool = True
    window: int | None = None
    first: int = 0

    def __post_init__(self) -> None:
        kv_lens = [s + c for s, c in zip(self.seq_lens, self.context_lens, strict=True)]
        counts = [-(-length // self.page_size) for length in kv_lens]
        num_pages = sum(counts) + 3
        self.kv = torch.full((2, num_pages, self.page_size, self.num_kv_heads, HEAD_DIM), torch.nan, dtype=self.dtype)
        self.kv[:, 0] = 7.0
        free = (torch.randperm(num_pages - 1) + 1 if self.shuffled else torch.arange(1, num_pages)).tolist()
        self.page_table = torch.zeros(len(kv_lens), max(counts) + 2, dtype=torch.int64)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        for r, (length, count) in enumerate(zip(kv_lens, counts, strict=True)):
            pages = [free.pop(0) for _ in range(count)]
            self.page_table[r, :count] = torch.tensor(pages)
            keys, values = torch.randn(2, length, self.num_kv_heads, HEAD_DIM).to(self.dtype)
            slots = torch.tensor(
                [pages[i // self.page_size] * self.page_size + i % self.page_size for i in range(length)]
            )
            write_kv(self.kv, keys, values, slots)
            self.kv.flatten(1, 2)[:, slots[: self.first]] = torch.nan
            self.keys.append(keys)
            self.values.append(values)
        self.q = torch.randn(sum(self.seq_lens), self.num_kv_heads * self.group, HEAD_DIM).to(self.dtype)

    def attend(self, num_decodes: int) -> torch.Tensor:
        lengths = (self.seq_lens, self.context_lens, num_decodes)
        return paged_attention(self.q, self.kv, self.page_table, *lengths, SCALE, self.window, self.first)

    def expected(self) -> torch.Tensor:
        outputs = []
        t = 0
        for r, (seq_len, context_len) in enumerate(zip(self.seq_lens, self.context_lens, strict=True)):
            for i in range(seq_len):
                visible = context_len + i + 1
                first = max(visible - (self.window or visible), self.first)
                for h in range(self.q.shape[1]):
                    keys = self.keys[r][first:visible, h // self.group].double()
                    values = self.values[r][first:visible, h // self.group].double()
                    weights = (keys @ self.q[t, h].double() * SCALE).softmax(0)
                    outputs.append(weights @ values)
                t += 1
        return torch.stack(outputs).view(self.q.shape)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("shuffled", [True, False])
def test_mixed_step_matches_the_plain_loop(group: int, num_kv_heads: int, shuffled: bool) -> None:
    requests = Requests([1, 1, 1, 1, 7, 13, 1, 5], [1, 30, 2, 9, 0, 6, 0, 19], num_kv_heads, group, shuffled=shuffled)
    assert_close(requests.attend(num_decodes=4), requests.expected())


@pytest.mark.parametrize("window", [None, 3, 8])
@pytest.mark.parametrize("first", [1, 4, 5])
@pytest.mark.parametrize("max_mask", [1 << 21, 100])
def test_positions_before_the_first_are_never_seen(
    first: int, window: int | None, max_mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "MAX_MASK_ELEMENTS", max_mask)
    requests = Requests([1, 1, 1, 1, 37, 13, 1], [5, 30, 600, 9, 5, 6, 5], window=window, first=first)
    assert_close(requests.attend(num_decodes=4), requests.expected())
    alone = Requests([1], [first], window=window, first=first)
    assert_close(alone.attend(num_decodes=1), alone.expected())


def test_a_query_before_the_first_position_is_refused() -> None:
    requests = Requests([3, 4], [2, 0], first=1)
    with pytest.raises(ValueError, match="keys from 1 on"):
        requests.attend(num_decodes=0)


@pytest.mark.parametrize("context_len", [1, 2, 3, 4, 7, 8, 31])
@pytest.mark.parametrize("shuffled", [True, False])
def test_single_decode_matches_the_plain_loop(context_len: int, shuffled: bool) -> None:
    requests = Requests([1], [context_len], shuffled=shuffled)
    assert_close(requests.attend(num_decodes=1), requests.expected())


def test_decodes_of_very_different_lengths_match_the_plain_loop() -> None:
    requests = Requests([1] * 11, [1, 500, 2, 3, 700, 60, 499, 64, 511, 8, 512])
    assert_close(requests.attend(num_decodes=11), requests.expected())


def test_decode_and_prefill_paths_agree() -> None:
    requests = Requests([1] * 5, [1, 50, 7, 18, 33])
    assert_close(requests.attend(num_decodes=5), requests.attend(num_decodes=0).double())


def test_a_request_gives_the_same_alone_and_in_a_batch() -> None:
    requests = Requests([1, 1, 6, 9], [17, 200, 0, 21])
    together = requests.attend(num_decodes=2)
    starts = [0, 1, 2, 8]
    for r, start in enumerate(starts):
        end = start + requests.seq_lens[r]
        alone = paged_attention(
            requests.q[start:end],
            requests.kv,
            requests.page_table[r : r + 1],
            requests.seq_lens[r : r + 1],
            requests.context_lens[r : r + 1],
            1 if r < 2 else 0,
            SCALE,
        )
        assert_close(alone, together[start:end].double())


def test_a_chunk_resumed_at_every_position_matches_the_whole() -> None:
    whole = Requests([29], [0])
    expected = whole.attend(num_decodes=0)
    for cut in range(1, 29):
        for start, end in ((0, cut), (cut, 29)):
            part = paged_attention(whole.q[start:end], whole.kv, whole.page_table, [end - start], [start], 0, SCALE)
            assert_close(part, expected[start:end].double())


def test_long_contexts_are_cut_into_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_MASK_ELEMENTS", 17 * 130)
    requests = Requests([70], [60])
    assert_close(requests.attend(num_decodes=0), requests.expected())


@pytest.mark.parametrize("num_decodes", [0, 2])
def test_bfloat16_pools_match_to_their_precision(num_decodes: int) -> None:
    requests = Requests([1, 1, 11, 6], [40, 9, 0, 15], dtype=torch.bfloat16)
    out = requests.attend(num_decodes)
    assert out.dtype == torch.bfloat16
    assert_close(out, requests.expected(), tolerance=2**-6)


def test_float32_queries_read_a_bfloat16_pool() -> None:
    requests = Requests([1, 1, 6], [40, 9, 15], dtype=torch.bfloat16)
    requests.q = requests.q.float()
    out = requests.attend(num_decodes=2)
    assert out.dtype == torch.float32
    assert_close(out, requests.expected())


def test_pool_is_only_read() -> None:
    requests = Requests([1, 5], [9, 3])
    before = requests.kv.clone()
    requests.attend(num_decodes=1)
    assert torch.equal(before.nan_to_num(1e9), requests.kv.nan_to_num(1e9))


def test_write_kv_writes_its_slots_and_no_others() -> None:
    kv = torch.full((2, 5, 4, 2, HEAD_DIM), torch.nan, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 3, 2, HEAD_DIM)
    write_kv(kv, keys, values, torch.tensor([6, 19, 4]))
    slots = kv.flatten(1, 2)
    for n, slot in enumerate([6, 19, 4]):
        assert torch.equal(slots[0, slot], keys[n].bfloat16())
        assert torch.equal(slots[1, slot], values[n].bfloat16())
    rest = [slot for slot in range(20) if slot not in (6, 19, 4)]
    assert slots[:, rest].isnan().all()


@pytest.mark.parametrize(
    ("keys", "slots"), [((3, 2, HEAD_DIM + 1), 3), ((3, 1, HEAD_DIM), 3), ((3, 2, HEAD_DIM), 2), ((4, 2, HEAD_DIM), 3)]
)
def test_write_kv_refuses_shapes_that_do_not_fit(keys: tuple[int, ...], slots: int) -> None:
    kv = torch.zeros(2, 5, 4, 2, HEAD_DIM)
    with pytest.raises(ValueError, match="write_kv"):
        write_kv(kv, torch.zeros(keys), torch.zeros(3, *keys[1:]), torch.arange(slots))


@pytest.mark.parametrize(
    ("heads", "head_dim", "seq_lens", "context_lens", "num_decodes"),
    [
        (5, HEAD_DIM, [1, 3], [4, 0], 1),
        (4, HEAD_DIM + 2, [1, 3], [4, 0], 1),
        (4, HEAD_DIM, [1, 2], [4, 0], 1),
        (4, HEAD_DIM, [1, 3, 0], [4, 0, 0], 1),
        (4, HEAD_DIM, [1, 3], [4], 1),
        (4, HEAD_DIM, [1, 3], [4, 0], 2),
        (4, HEAD_DIM, [1, 3], [4, 0], 3),
    ],
)
def test_shapes_and_lengths_that_do_not_fit_are_refused(
    heads: int, head_dim: int, seq_lens: list[int], context_lens: list[int], num_decodes: int
) -> None:
    kv = torch.zeros(2, 5, 4, 2, HEAD_DIM)
    with pytest.raises(ValueError, match="paged_attention"):
        paged_attention(
            torch.zeros(4, heads, head_dim),
            kv,
            torch.zeros(2, 2, dtype=torch.int64),
            seq_lens,
            context_lens,
            num_decodes,
            1.0,
        )


@pytest.mark.parametrize(("seq_lens", "num_decodes"), [([1, 1], 2), ([1], 1), ([2], 0)])
def test_a_page_table_that_is_too_short_is_refused(seq_lens: list[int], num_decodes: int) -> None:
    kv = torch.zeros(2, 5, 4, 2, HEAD_DIM)
    table = torch.ones(len(seq_lens), 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="pages"):
        paged_attention(
            torch.zeros(sum(seq_lens), 4, HEAD_DIM), kv, table, seq_lens, [8] * len(seq_lens), num_decodes, 1.0
        )


@pytest.mark.parametrize("window", [1, 4, 7, 30, 100])
def test_a_window_shows_the_last_tokens_only(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MAX_MASK_ELEMENTS", 400)  # several blocks in the longer chunks
    torch.manual_seed(window)
    decodes = Requests([1, 1, 1], [2, 11, 40], window=window)
    assert_close(decodes.attend(3), decodes.expected())
    alone = Requests([1], [23], window=window)
    assert_close(alone.attend(1), alone.expected())
    mixed = Requests([1, 1, 37, 9, 40], [5, 29, 0, 3, 26], window=window)
    assert_close(mixed.attend(2), mixed.expected())


def test_a_window_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="a window of 0 tokens"):
        Requests([1], [3], window=0).attend(1)
