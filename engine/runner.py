"""Carries out a step: the copies, one packed forward pass, one sampled token for every item that wants one.

Needs the plan and the pools, nothing else; knows no request beyond its items.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from turnkeep.cache.storage import CacheStorage
from turnkeep.engine.batch_builder import BatchBuilder
from turnkeep.engine.grammar import GrammarError, GrammarMatchers
from turnkeep.kernels.forward_batch import CacheTensors, ForwardBatch
from turnkeep.kernels.sampling import GREEDY, InvalidLogitsError, SamplingBatch, SamplingRow, sample, top_logprobs
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import SampledToken, StepItem, StepOutput, StepPlan


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
        self._matchers = matchers
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
        errors: dict[str, str] = {}
        tokens = self._sample(wanted, logits, errors) if wanted else {}
        single: dict[str, tuple[SampledToken, ...]] = {request_id: (token,) for request_id, token in tokens.items()}
        return StepOutput(tokens=single, duration_s=time.perf_counter() - started_s, errors=errors)

    def _choose_threads(self, *, is_decode: bool) -> None:
        if self._decode_threads is None:
            return
        wanted = self._decode_threads if is_decode else self._num_threads
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)

    def _sample(
        self, items: Sequence[StepItem], logits: torch.Tensor, errors: dict[str, str]
    ) -> dict[str, SampledToken]:
        rows: list[SamplingRow] = []
        invalid: dict[int, str] = {}
        for index, item in enumerate(items):
            try:
                rows.append(_sampling_row(item, self._allowed_bits(item)))
            except GrammarError as error:
                invalid[index] = str(error)
        if invalid:
            return self._sample_others(items, logits, invalid, errors)
        try:
            token_ids = sample(logits, SamplingBatch(rows))
        except InvalidLogitsError as error:
            reason = "the model gave no finite logits for this request"
            return self._sample_others(items, logits, dict.fromkeys(error.rows, reason), errors)
        chosen: list[int] = token_ids.tolist()
        tokens = {item.request_id: SampledToken(token) for item, token in zip(items, chosen, strict=True)}
        for index, item in enumerate(items):
            assert item.sampling is not None
            if item.sampling.num_logprobs is not None:
                tokens[item.request_id] = _with_logprobs(logits, index, chosen[index], item.sampling.num_logprobs)
        return tokens

    def _sample_others(
        self, items: Sequence[StepItem], logits: torch.Tensor, invalid: dict[int, str], errors: dict[str, str]
    ) -> dict[str, SampledToken]:
        """A request for which no token can be chosen must not take the rest of the batch with it."""
        for row, reason in invalid.items():
            errors[items[row].request_id] = reason
        valid = [index for index in range(len(items)) if index not in invalid]
        if not valid:
            return {}
        return self._sample([items[index] for index in valid], logits[valid], errors)

    def _allowed_bits(self, item: StepItem) -> bytes | None:
        """Raises GrammarError."""
        sampling, history = item.sampling, item.history
        if sampling is None or sampling.grammar is None:
            return None
        if self._matchers is None or history is None:
            raise GrammarError("this engine cannot follow grammars")
        return self._matchers.allowed_bits(
            item.request_id, sampling.grammar, history.output_ids, sampling.stop_token_ids
        )


def _sampling_row(item: StepItem, allowed_bits: bytes | None) -> SamplingRow:
    sampling = item.sampling
    assert sampling is not None
    forbidden = _forbidden_ids(sampling, item.num_output_tokens)
    if sampling.temperature == 0.0 and item.history is None and not sampling.logit_bias and not forbidden:
        return GREEDY
    history = item.history
    return SamplingRow(
        position=item.start + len(item.token_ids),
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        forbidden_ids=forbidden,
        prompt_ids=history.prompt_ids if history is not None else (),
        output_ids=history.output_ids if history is not None else (),
        allowed_bits=allowed_bits,
    )


def _forbidden_ids(sampling: SamplingParams, num_output_tokens: int) -> tuple[int, ...]:
    """Stop tokens may not come before min_new_tokens tokens were generated."""
    if num_output_tokens < sampling.min_new_tokens and not sampling.ignore_eos:
        return sampling.stop_token_ids
    return ()


def _with_logprobs(logits: torch.Tensor, row: int, token_id: int, num_logprobs: int) -> SampledToken:
    chosen, ids, values = top_logprobs(logits[row : row + 1], torch.tensor([token_id]), num_logprobs)
    return SampledToken(
        token_id=token_id,
        logprob=float(chosen[0]),
        top_logprobs=tuple(zip(ids[0].tolist(), values[0].tolist(), strict=True)),
    )
