"""What the model tests share: a driver that builds packed steps by hand, and reference models with equal weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from model_families import reference_model

from turnkeep.kernels.forward_batch import CacheTensors, ForwardBatch, StateExport
from turnkeep.models.config import ModelConfig
from turnkeep.models.decoder import Decoder
from turnkeep.models.tiny import tiny_config
from turnkeep.models.weights import random_model, random_tensors

PAGE_SIZE = 8
NUM_SPARE_ROWS = 80


class StepDriver:
    """Runs packed steps over hand-made pools: sequence i owns state row i + 1 and a run of pages of its own.

    Pools start as NaN outside the reserved row and page, so that reading what nobody wrote shows.
    """

    def __init__(
        self, model: Decoder, *, num_sequences: int = 6, max_tokens: int = 96, state_dtype: str = "float32"
    ) -> None:
        self.model = model
        self.pages_each = -(-max_tokens // PAGE_SIZE)
        self.lengths = [0] * num_sequences
        self.num_sequences = num_sequences
        config = model.config
        num_pages, num_rows = 1 + num_sequences * self.pages_each, 1 + num_sequences + NUM_SPARE_ROWS
        kv_shape = (2, num_pages, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        kv = [torch.full(kv_shape, torch.nan, dtype=model.dtype) for _ in range(config.num_attention_layers)]
        states = {
            part.name: [
                torch.full((num_rows, *part.shape), torch.nan, dtype=getattr(torch, part.dtype))
                for _ in range(part.num_layers)
            ]
            for part in config.state_parts(state_dtype, str(model.dtype).removeprefix("torch."))
        }
        for pool in kv:
            pool[:, 0] = 0
        for pools in states.values():
            for pool in pools:
                pool[0] = 0
        self.cache = CacheTensors(kv, states)

    def first_page(self, sequence: int) -> int:
        return 1 + sequence * self.pages_each

    def batch(self, work: Sequence[tuple[int, Sequence[int]]], exports: Sequence[StateExport]) -> ForwardBatch:
        seq_lens = tuple(len(tokens) for _, tokens in work)
        context_lens = tuple(self.lengths[sequence] for sequence, _ in work)
        is_decode = [length == 1 and context > 0 for length, context in zip(seq_lens, context_lens, strict=True)]
        num_decodes = is_decode.index(False) if False in is_decode else len(is_decode)
        positions, slots = [], []
        for (sequence, tokens), context in zip(work, context_lens, strict=True):
            own = range(context, context + len(tokens))
            positions += own
            slots += [self.first_page(sequence) * PAGE_SIZE + position for position in own]
        tables = [range(self.first_page(sequence), self.first_page(sequence) + self.pages_each) for sequence, _ in work]
        needs_rows = bool(self.cache.states)
        return ForwardBatch(
            token_ids=torch.tensor([token for _, tokens in work for token in tokens]),
            positions=torch.tensor(positions),
            seq_lens=seq_lens,
            context_lens=context_lens,
            num_decodes=num_decodes,
            cu_seqlens=torch.tensor([0, *accumulate(seq_lens)]),
            kv_lens=torch.tensor(seq_lens) + torch.tensor(context_lens),
            page_table=torch.tensor([list(table) for table in tables]),
            slot_mapping=torch.tensor(slots),
            state_rows=torch.tensor([sequence + 1 for sequence, _ in work]) if needs_rows else None,
            exports=tuple(exports),
            logit_indices=torch.arange(sum(seq_lens)),
        )

    def step(
        self, work: Sequence[tuple[int, Sequence[int]]], exports: Sequence[StateExport] = ()
    ) -> list[torch.Tensor]:
        """Run the tokens of each (sequence, tokens); returns the logits [len(tokens), V] of each."""
        logits = self.model(self.batch(work, exports), self.cache)
        for sequence, tokens in work:
            self.lengths[sequence] += len(tokens)
        return list(logits.split([len(tokens) for _, tokens in work]))

    def resume(self, source: int, target: int, length: int, row: int) -> None:
        """Make `target` a sequence of `length` tokens: the pages of `source`, the state in `row`."""
        for pool in self.cache.kv:
            pages = self.first_page(source), self.first_page(target)
            own, other = (pool[:, page : page + self.pages_each].flatten(1, 2) for page in pages)
            other.fill_(torch.nan)
            other[:, :length] = own[:, :length]
        for pools in self.cache.states.values():
            for pool in pools:
                pool[target + 1] = pool[row]
        self.lengths[target] = length


@pytest.fixture
def make_driver() -> Callable[..., StepDriver]:
    """StepDriver(model, num_sequences=..., max_tokens=...)."""
    return StepDriver


@pytest.fixture
def make_pair() -> Callable[..., tuple[Decoder, Any]]:
    """make_pair(kind, seed, **changes): a random model of ours and the transformers model of the same weights."""

    def make(kind: Any, seed: int, **changes: Any) -> tuple[Decoder, Any]:
        values = tiny_config(kind) | changes
        config = ModelConfig.from_dict(values)
        return random_model(config, seed), reference_model(values, random_tensors(config, seed))

    return make


@pytest.fixture
def reference_logits() -> Callable[[Any, Sequence[int]], torch.Tensor]:
    """Logits [T, V] of a transformers model over a whole prompt, without any cache."""

    def run(model: Any, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits

    return run
