"""Carries out a step: folds and copies, one packed forward pass, the tokens of every item that wants some, and what is
proposed to follow them.

Needs the plan and the pools, nothing else; knows no request beyond its items.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from turnkeep.cache.copies import HistoryFold
from turnkeep.cache.storage import CacheStorage
from turnkeep.engine.batch_builder import BatchBuilder
from turnkeep.engine.grammar import GrammarMatchers
from turnkeep.engine.speculation.drafter import Drafter, DraftRequest
from turnkeep.engine.speculation.hidden_states import HiddenStates
from turnkeep.engine.speculation.replay import Replay
from turnkeep.engine.token_choice import ChosenTokens, TokenChoice, is_over
from turnkeep.kernels.forward_batch import CacheTensors, ForwardBatch
from turnkeep.kernels.replay_history import HistoryFolds
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.step_plan import StepItem, StepOutput, StepPlan

NOTHING_TO_DRAFT = TreeGrant(num_nodes=0, max_nodes_per_request=0, max_depth=0, max_children=0)


class Model(Protocol):
    """What the runner needs of a model."""

    def hidden(self, batch: ForwardBatch, cache: CacheTensors) -> torch.Tensor:
        """The last hidden state [T, hidden_size] of all tokens; pages and state rows are updated in place, but for
        trees, which leave their terms in the batch."""

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the output head reads of hidden states [K, hidden_size]."""

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [K, V] float32."""

    def fold(self, folds: HistoryFolds, cache: CacheTensors) -> None:
        """Move state rows on by accepted tokens, in every layer."""


class ModelRunner:
    """One model with the pools it reads and writes."""

    def __init__(
        self,
        model: Model,
        storage: CacheStorage,
        page_size: int,
        matchers: GrammarMatchers | None = None,
        decode_threads: int | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """matchers: what is needed to follow grammars; without them a request that has one ends with an error.

        decode_threads: compute threads of steps that only decode; None: as many as torch has now, as all others.
        """
        self._model = model
        self._num_threads = torch.get_num_threads()
        self._decode_threads = decode_threads
        self._choice = TokenChoice(matchers)
        self._storage = storage
        self._drafter = drafter
        tensors = storage.tensors
        self._hidden_states = HiddenStates(tensors) if drafter is not None and drafter.needs_hidden else None
        capacity = storage.history_capacity
        self._replay = Replay(model, tensors, page_size, capacity)
        self._builder = BatchBuilder(
            page_size, has_state=bool(tensors.states), has_pages=bool(tensors.kv), history_capacity=capacity
        )

    @torch.inference_mode()
    def settle(self, folds: Sequence[HistoryFold]) -> None:
        """Outside of a step, before pages or rows are read or written: everything that was put off."""
        self._settle_drafts(None)
        self._replay.fold(folds)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Raises whatever the model raises; the step has failed then, and no item has been computed."""
        started_s = time.perf_counter()
        items = plan.items
        if plan.page_copies or plan.row_copies:
            self._settle_drafts(None)
        self._settle_drafts(items)
        self._replay.fold(plan.folds)
        self._storage.apply_copies(plan.page_copies, plan.row_copies)
        self._replay.begin(items)
        batch = self._builder.build(items)
        self._choose_threads(is_decode=batch.num_decodes + batch.num_trees == len(batch.seq_lens))
        hidden = self._model.hidden(batch, self._storage.tensors)
        normed = None
        if self._hidden_states is None:
            wanted = self._model.normed(hidden.index_select(0, batch.logit_indices))
        else:
            normed = self._model.normed(hidden)
            wanted = normed.index_select(0, batch.logit_indices)
        logits = self._model.logits(wanted)
        chosen = self._choice.choose([item for item in items if item.sampling is not None], logits)
        accepted = {request_id: chosen.accepted.get(request_id, ()) for request_id in chosen.tokens}
        verified_s = time.perf_counter()
        drafts = {}
        if self._drafter is None:
            self._replay.accept(items, batch, accepted)
        else:
            drafts = self._draft(plan, batch, normed, chosen, accepted)
        ended_s = time.perf_counter()
        return StepOutput(
            tokens=chosen.tokens,
            duration_s=ended_s - started_s,
            errors=chosen.errors,
            accepted=chosen.accepted,
            drafts=drafts,
            draft_s=ended_s - verified_s if self._drafter is not None else 0.0,
        )

    def _draft(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        normed: torch.Tensor | None,
        chosen: ChosenTokens,
        accepted: dict[str, tuple[int, ...]],
    ) -> dict[str, DraftTree]:
        """Write what was accepted, tell the drafter what was computed, and take its proposals."""
        assert self._drafter is not None
        items, states = plan.items, self._hidden_states
        asked: Sequence[StepItem] = items
        of_step: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        if states is not None and normed is not None:
            if plan.tree_grant is None and not chosen.errors:
                num_single = batch.num_decodes + (batch.num_trees if batch.num_tree_nodes == batch.num_trees else 0)
                if num_single and self._drafter.put_off(items[:num_single], normed[:num_single]):
                    asked = items[num_single:]
            if asked:
                pairs = zip(states.of_items(asked, batch, normed, accepted), states.previous(asked), strict=True)
                of_step = dict(zip((item.request_id for item in asked), pairs, strict=True))
            states.store(items, batch, normed)
        self._replay.accept(items, batch, accepted)
        if not asked:
            return {}
        requests = [
            _draft_request(item, chosen, accepted, *of_step.get(item.request_id, (None, None)))
            for item in asked
            if item.request_id not in chosen.errors
        ]
        trees = self._drafter.propose(requests, plan.tree_grant or NOTHING_TO_DRAFT)
        return {
            request.request_id: tree
            for request, tree in zip(requests, trees, strict=True)
            if tree is not None and tree.num_nodes
        }

    def _settle_drafts(self, going_on: Sequence[StepItem] | None) -> None:
        if self._drafter is not None and not self._drafter.settle(going_on) and self._hidden_states is not None:
            self._hidden_states.settle()

    def _choose_threads(self, *, is_decode: bool) -> None:
        if self._decode_threads is None:
            return
        wanted = self._decode_threads if is_decode else self._num_threads
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)


def _draft_request(
    item: StepItem,
    chosen: ChosenTokens,
    accepted: dict[str, tuple[int, ...]],
    hidden: torch.Tensor | None,
    previous: torch.Tensor | None,
) -> DraftRequest:
    token_ids: Sequence[int] = item.token_ids
    if item.draft is not None:
        draft = item.draft
        token_ids = [*token_ids, *(draft.token_ids[node] for node in accepted.get(item.request_id, ()))]
    next_token = None
    tokens = chosen.tokens.get(item.request_id)
    if tokens and item.sampling is not None:
        last = tokens[-1].token_id
        if not is_over(item.sampling, last, item.num_output_tokens + len(tokens)):
            next_token = last
    return DraftRequest(
        request_id=item.request_id,
        token_ids=token_ids,
        start=item.start,
        next_token=next_token,
        hidden=hidden,
        previous_hidden=previous,
        page_ids=item.page_ids,
        sampling=item.sampling,
        context_ids=item.context_ids,
    )
