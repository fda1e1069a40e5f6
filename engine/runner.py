"""Carries out a step: the copies, one packed forward pass, one sampled token for every item that wants one.

Needs the plan and the pools, nothing else; knows no request beyond its items.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from turnkeep.cache.storage import CacheStorage
from turnkeep.engine.batch_builder import BatchBuilder
from turnkeep.engine.grammar import GrammarMatchers
from turnkeep.engine.token_choice import TokenChoice
from turnkeep.kernels.forward_batch import CacheTensors, ForwardBatch
from turnkeep.scheduler.step_plan import StepOutput, StepPlan


class Model(Protocol):
    """What the runner needs of a model."""

    def __call__(self, batch: ForwardBatch, cache: CacheTensors) -> torch.Tensor:
        """Logits [K, V] float32 of the rows in batch.logit_indices; pages and state rows are updated in place."""


class ModelRunner:
    """One model with the pools it reads and writes."""

    def __init__(
        self,
        model: Model,
        storage: CacheStorage,
        page_size: int,
        matchers: GrammarMatchers | None = None,
        decode_threads: int | None = None,
    ) -> None:
        """matchers: what is needed to follow grammars; without them a request that has one ends with an error.

        decode_threads: compute threads of steps that only decode; None: as many as torch has now, as all others.
        """
        self._model = model
        self._num_threads = torch.get_num_threads()
        self._decode_threads = decode_threads
        self._choice = TokenChoice(matchers)
        self._storage = storage
        tensors = storage.tensors
        self._builder = BatchBuilder(page_size, has_state=bool(tensors.states), has_pages=bool(tensors.kv))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Raises whatever the model raises; the step has failed then, and no item has been computed."""
        started_s = time.perf_counter()
        self._storage.apply_copies(plan.page_copies, plan.row_copies)
        batch = self._builder.build(plan.items)
        self._choose_threads(is_decode=batch.num_decodes == len(batch.seq_lens))
        logits = self._model(batch, self._storage.tensors)
        wanted = [item for item in plan.items if item.sampling is not None]
        chosen = self._choice.choose(wanted, logits)
        return StepOutput(
            tokens=chosen.tokens,
            duration_s=time.perf_counter() - started_s,
            errors=chosen.errors,
            accepted=chosen.accepted,
        )

    def _choose_threads(self, *, is_decode: bool) -> None:
        if self._decode_threads is None:
            return
        wanted = self._decode_threads if is_decode else self._num_threads
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
