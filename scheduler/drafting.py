"""Drafts of the running requests from step to step: what is verified of each, and what may be proposed next."""

from __future__ import annotations

from collections.abc import Sequence

from turnkeep.scheduler.drafts import TreeGrant
from turnkeep.scheduler.request import Request
from turnkeep.scheduler.step_plan import StepOutput, StepPlan
from turnkeep.scheduler.tree_budget import TreeBudget


class Drafting:
    """With a budget, which decides step by step; without one every draft within the fixed grant is verified."""

    def __init__(self, budget: TreeBudget | None, fixed_grant: TreeGrant | None) -> None:
        self._budget = budget
        self._fixed_grant = fixed_grant
        self._num_tokens = 0  # of all that run, when their drafts were chosen
        self._has_new = False  # some of them is still in its prompt

    def choose(self, running: Sequence[Request]) -> None:
        """Keep of each draft what the coming step verifies; what lies behind the last token wanted is of no use."""
        drafting: list[Request] = []
        num_decodes = num_tokens = num_others = 0
        for request in running:
            draft = request.draft
            if draft is not None:
                max_depth = request.num_useful_nodes
                if not 0 < draft.depth <= max_depth:
                    request.draft = draft = draft.within_depth(max_depth)
            if draft is not None:
                drafting.append(request)
            elif not request.is_decoding:
                num_others += len(request.token_ids)
                continue
            assert request.cache is not None
            num_decodes += 1
            num_tokens += request.cache.num_computed_tokens + 1
        self._num_tokens, self._has_new = num_tokens + num_others, num_others > 0
        if self._budget is not None:
            request_ids = [request.request_id for request in drafting]
            drafts = [request.draft for request in drafting if request.draft is not None]
            chosen = self._budget.select(request_ids, drafts, num_decodes, num_tokens)
            for request, part in zip(drafting, chosen, strict=True):
                request.draft = part

    def grant(self, running: Sequence[Request]) -> TreeGrant | None:
        """For all that run: a prompt that ends with this step may be drafted for, too."""
        if self._budget is None:
            return self._fixed_grant
        return self._budget.grant(len(running), self._num_tokens, has_new=self._has_new)

    def measured(self, plan: StepPlan, output: StepOutput) -> None:
        """A step was carried out."""
        if self._budget is not None:
            self._budget.measured(plan, output)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self._budget is not None:
            self._budget.forget(request_id)

    def leave(self) -> None:
        """The engine ends."""
        if self._budget is not None:
            self._budget.leave()

    def counter_values(self) -> dict[str, float]:
        """By name; empty without a budget."""
        return self._budget.counter_values() if self._budget is not None else {}
