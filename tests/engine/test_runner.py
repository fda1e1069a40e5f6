"""A plan becomes one packed batch, and its logits one token for each item that wants one."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from turnkeep.cache.spec import CacheSpec, KVSpec, StatePart, StateSpec
from turnkeep.cache.storage import CacheStorage
from turnkeep.engine.batch_builder import BatchBuilder
from turnkeep.engine.factory import CACHED_MODEL_BYTES, decode_threads
from turnkeep.engine.runner import ModelRunner
from turnkeep.kernels.forward_batch import CacheTensors, ForwardBatch, StateExport
from turnkeep.kernels.replay_history import HistoryFolds
from turnkeep.scheduler.drafts import DraftTree
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import Replay, SamplingHistory, StepItem, StepPlan

PAGE_SIZE = 4


def item(
    request_id: str,
    start: int,
    token_ids: list[int],
    pages: list[int],
    *,
    row: int | None = None,
    exports: tuple[tuple[int, int], ...] = (),
    sampling: SamplingParams | None = None,
    num_output_tokens: int = 0,
    history: SamplingHistory | None = None,
) -> StepItem:
    return StepItem(
        request_id=request_id,
        token_ids=token_ids,
        start=start,
        page_ids=np.array(pages, dtype=np.int32),
        state_row=row,
        exports=exports,
        sampling=sampling,
        num_output_tokens=num_output_tokens,
        history=history,
    )


GREEDY = SamplingParams(max_new_tokens=5)


def test_a_mixed_step_is_packed_in_order() -> None:
    builder = BatchBuilder(PAGE_SIZE, has_state=True, has_pages=True)
    batch = builder.build(
        [
            item("decode", 5, [50], [3, 7], row=2, sampling=GREEDY),
            item("whole", 0, [10, 11, 12], [5], row=4, exports=((2, 9),), sampling=GREEDY),
            item("part", 3, [20, 21], [8, 1], row=6, exports=((5, 11),)),
        ]
    )
    assert batch.token_ids.tolist() == [50, 10, 11, 12, 20, 21]
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4]
    assert batch.seq_lens == (1, 3, 2)
    assert batch.context_lens == (5, 0, 3)
    assert batch.num_decodes == 1
    assert batch.cu_seqlens.tolist() == [0, 1, 4, 6]
    assert batch.kv_lens.tolist() == [6, 3, 5]
    assert batch.page_table.tolist() == [[3, 7], [5, 0], [8, 1]]
    assert batch.slot_mapping.tolist() == [7 * 4 + 1, 20, 21, 22, 8 * 4 + 3, 1 * 4 + 0]
    assert batch.state_rows is not None
    assert batch.state_rows.tolist() == [2, 4, 6]
    assert batch.exports == (StateExport(1, 2, 9), StateExport(2, 2, 11))
    assert batch.logit_indices.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("last", "num_decodes"),
    [
        (item("b", 4, [1], [1, 2], row=3), 2),
        (item("b", 0, [1], [1], row=3), 1),  # no context: the state starts at zero
        (item("b", 4, [1], [1, 2], row=3, exports=((5, 9),)), 1),
        (item("b", 4, [1, 2], [1, 2], row=3), 1),
    ],
)
def test_only_single_tokens_with_context_and_without_exports_are_decodes(last: StepItem, num_decodes: int) -> None:
    first = item("a", 7, [9], [4, 5], row=1, sampling=GREEDY)
    assert BatchBuilder(PAGE_SIZE, has_state=True, has_pages=True).build([first, last]).num_decodes == num_decodes


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("has_pages", [True, False])
def test_the_short_way_of_a_single_decode_gives_the_same_batch(has_state: bool, has_pages: bool) -> None:
    builder = BatchBuilder(PAGE_SIZE, has_state=has_state, has_pages=has_pages)
    one = item("a", 9, [42], [6, 3, 8] if has_pages else [], row=5 if has_state else None, sampling=GREEDY)
    short, long = builder.build([one]), builder._packed([one])
    for field in fields(ForwardBatch):
        left, right = getattr(short, field.name), getattr(long, field.name)
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype == torch.int64, field.name
            assert left.tolist() == right.tolist(), field.name
        else:
            assert left == right, field.name


class FixedLogits:
    """A model that gives the same logits whatever it is asked."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.fixed = logits

    def hidden(self, batch: ForwardBatch, cache: CacheTensors) -> torch.Tensor:
        return torch.zeros(len(batch.token_ids), 1)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        return self.fixed[: len(normed)]

    def fold(self, folds: HistoryFolds, cache: CacheTensors) -> None:
        raise AssertionError("nothing is to be folded")


def run(logits: list[list[float]], *items: StepItem) -> tuple[dict[str, int], dict[str, str]]:
    spec = CacheSpec(PAGE_SIZE, KVSpec(1, 1, 8, "float32"), StateSpec((StatePart("ssm", 1, (2,), "float32"),)))
    storage = CacheStorage(spec, num_pages=9, num_state_rows=9)
    output = ModelRunner(FixedLogits(torch.tensor(logits)), storage, PAGE_SIZE).run(StepPlan((), (), items))
    return {name: token.token_id for name, (token,) in output.tokens.items()}, output.errors


def test_tokens_belong_to_the_items_that_want_one() -> None:
    tokens, errors = run(
        [[0.0, 3.0, 1.0], [5.0, 0.0, 5.0]],
        item("a", 3, [1], [1], row=1, sampling=GREEDY),
        item("no", 0, [1, 2], [2], row=2),
        item("b", 0, [1, 2], [3], row=3, sampling=GREEDY),
    )
    assert tokens == {"a": 1, "b": 0}  # a tie goes to the lowest id
    assert errors == {}


def test_a_request_without_finite_logits_does_not_take_the_others_with_it() -> None:
    tokens, errors = run(
        [[0.0, 3.0, 1.0], [math.nan, 0.0, 0.0], [0.0, 1.0, 2.0]],
        *(item(name, 0, [1], [index + 1], row=index + 1, sampling=GREEDY) for index, name in enumerate("abc")),
    )
    assert tokens == {"a": 1, "c": 2}
    assert list(errors) == ["b"]


def test_stop_tokens_wait_for_min_new_tokens() -> None:
    sampling = SamplingParams(max_new_tokens=9, stop_token_ids=(1,), min_new_tokens=2)
    for num_output_tokens, expected in ((0, 2), (1, 2), (2, 1)):
        one = item("a", 3, [1], [1], row=1, sampling=sampling, num_output_tokens=num_output_tokens)
        assert run([[0.0, 3.0, 1.0]], one)[0] == {"a": expected}


def test_penalties_and_biases_reach_the_sampler() -> None:
    biased = SamplingParams(max_new_tokens=9, logit_bias={0: 100.0})
    assert run([[0.0, 3.0, 1.0]], item("a", 3, [1], [1], row=1, sampling=biased))[0] == {"a": 0}
    penalised = SamplingParams(max_new_tokens=9, presence_penalty=2.5)
    history = SamplingHistory(prompt_ids=[2], output_ids=[1])
    one = item("a", 3, [1], [1], row=1, sampling=penalised, history=history)
    assert run([[0.0, 3.0, 1.0]], one)[0] == {"a": 2}


def test_noise_is_keyed_by_the_position_of_the_sampled_token() -> None:
    """A chunk that ends at a position and a decode step from it draw the same noise."""
    sampling = SamplingParams(max_new_tokens=9, temperature=1.0, seed=4)
    logits = [[0.0] * 50]
    decode = run(logits, item("a", 5, [1], [1, 2], row=1, sampling=sampling))
    chunk = run(logits, item("a", 2, [1, 1, 1, 1], [1, 2], row=1, sampling=sampling))
    later = [run(logits, item("a", 6 + index, [1], [1, 2, 3], row=1, sampling=sampling)) for index in range(5)]
    assert decode == chunk
    assert any(other != decode for other in later)


class ThreadCounter(FixedLogits):
    """A model that notes how many threads it was given."""

    def __init__(self) -> None:
        super().__init__(torch.zeros(9, 3))
        self.seen: list[int] = []

    def hidden(self, batch: ForwardBatch, cache: CacheTensors) -> torch.Tensor:
        self.seen.append(torch.get_num_threads())
        return super().hidden(batch, cache)


def test_steps_that_only_decode_take_threads_of_their_own() -> None:
    spec = CacheSpec(PAGE_SIZE, KVSpec(1, 1, 8, "float32"), None)
    storage = CacheStorage(spec, num_pages=9, num_state_rows=0)
    decode = item("decode", 5, [1], [1, 2], sampling=GREEDY)
    prefill = item("prefill", 0, [1, 2], [3], sampling=GREEDY)
    before = torch.get_num_threads()
    model = ThreadCounter()
    try:
        torch.set_num_threads(3)
        runner = ModelRunner(model, storage, PAGE_SIZE, decode_threads=1)
        for items in ((prefill,), (decode,), (decode, prefill), (decode,)):
            runner.run(StepPlan((), (), items))
    finally:
        torch.set_num_threads(before)
    assert model.seen == [3, 1, 3, 1]


def test_only_models_in_the_caches_decode_with_one_thread() -> None:
    small = torch.nn.Linear(8, 8)
    large = torch.nn.Linear(4096, CACHED_MODEL_BYTES // (4 * 4096))
    assert decode_threads(small, None) == 1
    assert decode_threads(large, None) is None
    assert decode_threads(small, 2) is None, "a number was asked for"


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("draft", [None, DraftTree((7, 8, 9), (-1, -1, 0), (0.5, 0.4, 0.3))], ids=["root", "tree"])
def test_the_short_way_of_a_single_tree_gives_the_same_batch(has_state: bool, draft: DraftTree | None) -> None:
    builder = BatchBuilder(PAGE_SIZE, has_state=has_state, has_pages=True, history_capacity=8)
    one = replace(
        item("a", 9, [42], [6, 3, 8], row=5 if has_state else None, sampling=GREEDY), replay=Replay(2, 3), draft=draft
    )
    short, long = builder.build([one]), builder._packed([one])
    for field in fields(ForwardBatch):
        left, right = getattr(short, field.name), getattr(long, field.name)
        if isinstance(left, torch.Tensor):
            assert left.tolist() == right.tolist(), field.name
        elif field.name != "trees":
            assert left == right, field.name
    assert short.trees is not None
    assert long.trees is not None
    assert short.trees.trees.parents == long.trees.trees.parents == ((-1,) if draft is None else (-1, 0, 0, 1))
    assert (short.trees.history is None) == (not has_state)


def test_trees_lie_between_decodes_and_chunks_at_the_positions_of_their_depths() -> None:
    builder = BatchBuilder(PAGE_SIZE, has_state=True, has_pages=True, history_capacity=8)
    draft = DraftTree((7, 8, 9), (-1, -1, 0), (0.5, 0.4, 0.3))
    batch = builder.build(
        [
            item("decode", 5, [50], [3, 7], row=2, sampling=GREEDY),
            replace(item("tree", 9, [42], [6, 3, 8], row=5, sampling=GREEDY), replay=Replay(2, 3), draft=draft),
            item("chunk", 0, [10, 11, 12], [5], row=4, sampling=GREEDY),
        ]
    )
    assert (batch.num_decodes, batch.num_trees, batch.num_tree_nodes) == (1, 1, 4)
    assert batch.token_ids.tolist() == [50, 42, 7, 8, 9, 10, 11, 12]
    assert batch.positions.tolist() == [5, 9, 10, 10, 11, 0, 1, 2]
    assert batch.seq_lens == (1, 4, 3)
    assert batch.logit_indices.tolist() == [0, 1, 2, 3, 4, 7]
    assert batch.trees is not None
    assert batch.trees.history is not None
    assert (batch.trees.history.slots, batch.trees.history.lens) == ((2,), (3,))
