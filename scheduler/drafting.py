"""Drafts of the running requests from step to step: what is verified of each, and what may be proposed next."""

from __future__ import annotations

from collections.abc import Sequence

from turnkeep.scheduler.drafts import TreeGrant
from turnkeep.scheduler.request import Request
from turnkeep.scheduler.step_plan import StepOutput, StepPlan
from turnkeep.scheduler.tree_budget import DecodingRequest, TreeBudget


class Drafting:
    """With a budget, which decides step by step; without one every draft within the fixed grant is verified."""

    def __init__(self, budget: TreeBudget | None, fixed_grant: TreeGrant | None) -> None:
        self._budget = budget
        self._fixed_grant = fixed_grant

    def choose(self, running: Sequence[Request]) -> None:
        """Keep of each draft what the coming step verifies; what lies behind the last token wanted is of no use."""
        decoding: list[Request] = []
        to_verify: list[DecodingRequest] = []
        for request in running:
            draft = request.draft
            if draft is not None:
                request.draft = draft = draft.within_depth(request.num_useful_nodes)
            if draft is not None or request.is_decoding:
                decoding.append(request)
                to_verify.append(DecodingRequest(request.request_id, len(request.token_ids), draft))
        if self._budget is not None:
            for request, chosen in zip(decoding, self._budget.select(to_verify), strict=True):
                request.draft = chosen

    def grant(self, running: Sequence[Request]) -> TreeGrant | None:
        """For all that run: a prompt that ends with this step may be drafted for, too."""
        if self._budget is None:
            return self._fixed_grant
        return self._budget.grant(len(running), sum(len(request.token_ids) for request in running))

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
