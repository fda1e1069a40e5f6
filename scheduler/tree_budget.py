"""How many draft nodes a step verifies, and whose: the ones that make the whole batch faster, best first.

A node is right with the calibrated probability of its path, never more than its parent's: the n largest of all
requests' nodes together are trees, and the best ones (they give the sum of their probabilities). n is the number with
most tokens per second, (R + sum of the n largest) / T(n), T from the cost model; n = 0 is plain decoding. All n are
looked at: T has steps, at which a rule that stops at the first drop would stay. What may be drafted for the next step
is chosen in the same way (draft_outlook.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turnkeep.scheduler.acceptance import AcceptanceStatistics
from turnkeep.scheduler.cost_model import DraftLoad, StepCost, StepCostFile, StepLoad
from turnkeep.scheduler.draft_outlook import DraftOutlook, Outlook
from turnkeep.scheduler.draft_probes import DraftProbes
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.proposed_nodes import Flags, Float64Array, ProposedNodes
from turnkeep.scheduler.speculation_config import SpeculationConfig
from turnkeep.scheduler.step_plan import StepOutput, StepPlan

log = logging.getLogger(__name__)

CHECK_EVERY, FIRST_CHECK_EVERY = 128, 16  # steps with drafts after which some have none: their price stays known
CHECK_STEPS = 2  # the first brings rows up to their sequences, which plain decoding need not
FRESH = 3.0  # measured plain steps with as many requests, up to which checks come as often as the first
KNOWN = 12.0  # from so many on not all of them are measured
MAX_FIRST, LEAST_KNOWN = 4, 1.5  # plain steps before the first drafts of so many requests, and measured ones that do
LEAST_MEASURED = 64  # steps that are worth keeping for the next engine
GROWTH = 1.5  # of the nodes that paid lately, proposed for the next step
LEARN_EVERY, LEARN_STEPS = 8, 2  # verified drafts, or steps with some
LOOK_EVERY = 16  # plain steps in a row
OUTLOOK_STEPS = 4  # for which what may be proposed stays as it is


@dataclass(slots=True)
class BudgetCounts:
    """Since the engine started."""

    num_proposed: int = 0
    num_granted: int = 0
    num_plain_steps: int = 0
    num_draft_steps: int = 0
    expected_tokens: float = 0.0  # of granted nodes
    predicted_s: float = 0.0  # of the measured steps
    measured_s: float = 0.0
    drafting_s: float = 0.0


@dataclass(slots=True)
class Choice:
    """One step's choice, in numbers."""

    num_decodes: int = 0
    num_proposed: int = 0
    num_granted: int = 0
    expected_tokens: float = 0.0
    plain_s: float = 0.0
    step_s: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        if not self.num_proposed:
            return f"{self.num_decodes} decodes, no drafts"
        with_drafts = (self.num_decodes + self.expected_tokens) / max(self.step_s, 1e-9)
        return (
            f"{self.num_decodes} decodes, {self.num_granted} of {self.num_proposed} nodes{self.reason}: "
            f"{self.expected_tokens:.2f} more tokens expected, {self.step_s * 1e3:.2f} ms instead of "
            f"{self.plain_s * 1e3:.2f}, {with_drafts:.0f} tokens/s instead of "
            f"{self.num_decodes / max(self.plain_s, 1e-9):.0f}"
        )


class TreeBudget:
    """`max_nodes`: of one step, whatever pays. For each step: select, then grant, then measured."""

    def __init__(
        self,
        config: SpeculationConfig,
        cost: StepCost,
        acceptance: AcceptanceStatistics,
        max_nodes: int = 4096,
        cost_file: StepCostFile | None = None,
    ) -> None:
        self.config = config
        self.counts = BudgetCounts()
        self.acceptance = acceptance
        self._cost = cost
        self._cost_file = cost_file
        self._max_nodes = max_nodes
        self._choice = Choice()
        self._outlook = DraftOutlook(cost, config.max_draft_len)
        self._judged = Outlook(0, 0.0)
        self._judged_for = 0  # decodes
        self._num_steps = 0  # since then
        self._probes = DraftProbes()
        self._num_drafted = 0  # steps since one had none
        self._num_to_check = 0  # plain steps that are due
        self._is_probe = False  # what was asked for last
        self._regime = 0  # of the last grant
        self._num_first = 0  # plain steps in it to see what they cost
        self._verified: list[tuple[str, DraftTree, Sequence[int]]] = []  # to learn from
        self._num_unlearnt = 0  # steps with them
        self._forgotten: list[str] = []  # requests that have ended since then

    def select(
        self, request_ids: Sequence[str], drafts: Sequence[DraftTree], num_decodes: int, num_tokens: int
    ) -> list[DraftTree | None]:
        """The part of each request's draft that the coming step verifies, None for plain decoding.

        num_decodes: requests that decode, with drafts or without; num_tokens: that they attend to together.
        """
        chosen: list[DraftTree | None] = [None] * len(drafts)
        self._choice = choice = Choice(num_decodes)
        if not drafts:
            self._count(choice)
            return chosen
        awake = [place for place, request_id in enumerate(request_ids) if not self.acceptance.rests(request_id)]
        if awake:
            proposed = [drafts[place] for place in awake]
            nodes = ProposedNodes.of(proposed)
            paths = self.acceptance.path_probabilities(nodes, [request_ids[place] for place in awake])
            order = (-paths).argsort(kind="stable")[: self._max_nodes]
            best = paths[order]
            self._choose_number(choice, num_tokens, best)
            if choice.num_granted == len(nodes):
                for place, draft in zip(awake, proposed, strict=True):
                    chosen[place] = draft
            elif choice.num_granted:
                is_kept = np.zeros(len(paths), dtype=bool)
                is_kept[order[: choice.num_granted]] = True
                for place, part in zip(awake, _parts(proposed, nodes, is_kept), strict=True):
                    chosen[place] = part
            if self._is_probe and self._probes.is_first:
                self._outlook.forget()
            self._outlook.saw(num_decodes, nodes.depths[order], best)
        self._count(choice)
        return chosen

    def _choose_number(self, choice: Choice, num_tokens: int, best: Float64Array) -> None:
        """best: path probabilities of the proposed nodes, largest first."""
        num_decodes = choice.num_decodes
        expected = np.concatenate(([0.0], best.cumsum()))
        seconds = self._cost.decode_s(num_decodes, float(num_tokens), np.arange(len(expected), dtype=np.float64))
        rates = (num_decodes + expected) / seconds
        number = int(rates.argmax())
        if self._is_probe and number == 0:
            number, choice.reason = int(rates[1:].argmax()) + 1, " (to see what they give)"
        elif number and self._is_check_due(num_decodes):
            number, choice.reason = 0, " (to see what a plain step costs)"
        choice.num_proposed, choice.num_granted = len(best), number
        choice.expected_tokens = float(expected[number])
        choice.plain_s, choice.step_s = float(seconds[0]), float(seconds[number])

    def _is_check_due(self, num_decodes: int) -> bool:
        is_known = self._cost.num_measured_alike(num_decodes, has_nodes=False) >= FRESH
        if self._num_drafted >= (CHECK_EVERY if is_known else FIRST_CHECK_EVERY):
            self._num_to_check = CHECK_STEPS
        self._num_to_check -= 1
        return self._num_to_check >= 0

    def _count(self, choice: Choice) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("tree budget: %s", choice)
        counts = self.counts
        counts.num_proposed += choice.num_proposed
        counts.num_granted += choice.num_granted
        counts.expected_tokens += choice.expected_tokens
        if choice.num_granted:
            self._num_drafted += 1
            counts.num_draft_steps += 1
        elif choice.num_decodes:
            self._num_drafted = 0
            counts.num_plain_steps += 1

    def grant(self, num_requests: int, num_tokens: int, *, has_new: bool = False) -> TreeGrant | None:
        """What may be proposed for the step after the coming one, by so many requests that attend to so many tokens
        together; None: drafting would not pay. has_new: some of them has no token of its own yet."""
        if num_requests == 0:
            return None
        if self._is_plain_first(num_requests):
            return None
        depth = self._judge(num_requests, num_tokens).depth
        self._is_probe = depth == 0
        if depth:
            self._probes.reset()
        elif not self._probes.is_due(has_new=has_new):
            return None
        depth = max(depth, 1)  # from what a first level gives the outlook goes on
        config = self.config
        each = math.ceil(GROWTH * self._judged.nodes_per_request) + 1
        each = min(max(each, depth), config.max_total_draft_tokens)
        return TreeGrant(
            num_nodes=min(each * num_requests, self._max_nodes),
            max_nodes_per_request=each,
            max_depth=depth,
            max_children=config.dynamic_tree_max_topk,
        )

    def _is_plain_first(self, num_requests: int) -> bool:
        """A few steps without drafts where none with about so many requests was measured: what drafts cost more than
        those is not known otherwise. No more than a few, as with prompts among them they are never measured."""
        regime = num_requests.bit_length()
        if regime != self._regime:
            self._regime, self._num_first = regime, 0
        if self._num_first >= MAX_FIRST or self._cost.num_measured_alike(num_requests, has_nodes=False) >= LEAST_KNOWN:
            return False
        self._num_first += 1
        return True

    def _judge(self, num_requests: int, num_tokens: int) -> Outlook:
        self._num_steps += 1
        is_due = self._outlook.has_news and self._num_steps >= min(OUTLOOK_STEPS, self._outlook.num_samples)
        if is_due or num_requests != self._judged_for:
            self._judged = self._outlook.best(num_requests, float(num_tokens))
            self._judged_for, self._num_steps = num_requests, 0
        return self._judged

    def measured(self, plan: StepPlan, output: StepOutput) -> None:
        """Learn from a step: what it cost, and which of its drafts were right."""
        if self._is_one_of_many(plan):
            return
        load = StepLoad.of(plan)
        computing_s = output.duration_s - output.draft_s
        self.counts.predicted_s += self._cost.step_s(load)
        self.counts.measured_s += computing_s
        self.counts.drafting_s += output.draft_s
        is_plain = load.num_decodes > 0 and load.num_nodes == load.num_prefill_tokens == 0
        if not (is_plain and plan.folds):  # the price of a change, not of plain steps
            self._cost.measured(load, computing_s)
        if plan.tree_grant is not None or output.drafts:
            self._cost.measured_draft(_draft_load(load, output), output.draft_s)
        tokens, accepted = output.tokens, output.accepted
        self._verified += [
            (item.request_id, item.draft, accepted.get(item.request_id, ()))
            for item in plan.items
            if item.draft is not None and item.request_id in tokens
        ]
        self._num_unlearnt += 1 if load.num_nodes else 0
        if self._is_probe and load.num_nodes:
            self._learn()
            if plan.tree_grant is not None:
                num_accepted = sum([len(path) for path in accepted.values()])
                plain_s = self._choice.plain_s * (1.0 + num_accepted / load.num_decodes)
                self._probes.saw(plain_s / output.duration_s)
        elif self._num_unlearnt >= LEARN_STEPS or len(self._verified) >= LEARN_EVERY:
            self._learn()

    def _is_one_of_many(self, plan: StepPlan) -> bool:
        """Plain steps while drafts rest are all alike: of those whose price is known one of several is looked at."""
        if plan.tree_grant is not None or self._choice.num_granted or self._probes.num_steps % LOOK_EVERY == 0:
            return False
        num_decodes = self._choice.num_decodes
        if len(plan.items) != num_decodes:  # there are prompts
            return False
        return self._cost.num_measured_alike(num_decodes, has_nodes=False) >= KNOWN

    def _learn(self) -> None:
        """From several steps at once where few requests run: it is calls that cost, not nodes."""
        if self._verified:
            self.acceptance.measured(*zip(*self._verified, strict=True))
            self._verified.clear()
        for request_id in self._forgotten:
            self.acceptance.forget(request_id)
        self._forgotten.clear()
        self._num_unlearnt = 0

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._forgotten.append(request_id)
        if len(self._forgotten) >= LEARN_EVERY:
            self._learn()

    def leave(self) -> None:
        """The engine ends: keep what steps cost for the next one."""
        if self._cost_file is not None and self._cost.num_measured >= LEAST_MEASURED:
            self._cost_file.save(self._cost)

    def counter_values(self) -> dict[str, float]:
        """Flat names for the stats message; by depth as name.depth."""
        self._learn()
        counts, accepted = self.counts, self.acceptance.counts
        values: dict[str, float] = {
            "draft_num_proposed_nodes": counts.num_proposed,
            "draft_num_granted_nodes": counts.num_granted,
            "draft_expected_tokens": counts.expected_tokens,
            "draft_num_steps": counts.num_draft_steps,
            "draft_num_plain_steps": counts.num_plain_steps,
            "draft_predicted_step_seconds": counts.predicted_s,
            "draft_measured_step_seconds": counts.measured_s,
            "draft_drafting_seconds": counts.drafting_s,
            "draft_num_resets": accepted.num_resets,
            "draft_num_alarms": accepted.num_alarms,
        }
        for depth, number in accepted.num_nodes.items():
            values[f"draft_num_verified_nodes.{depth}"] = number
            values[f"draft_num_accepted_nodes.{depth}"] = accepted.num_accepted.get(depth, 0)
        return values


def _draft_load(load: StepLoad, output: StepOutput) -> DraftLoad:
    drafts = output.drafts.values()
    return DraftLoad(
        num_levels=max([draft.depth for draft in drafts], default=0),
        num_requests=len(output.tokens),
        num_nodes=sum([draft.num_nodes for draft in drafts]),
        num_prefill_tokens=load.num_prefill_tokens,
    )


def _parts(drafts: Sequence[DraftTree], nodes: ProposedNodes, is_kept: Flags) -> Iterator[DraftTree | None]:
    """Of each draft its kept nodes, among which every one but a child of the root has its parent."""
    for draft, start, count, depth, are_first in zip(drafts, nodes.starts, *nodes.counts(is_kept), strict=False):
        if count == 0:
            yield None
        elif are_first:
            yield draft.first(count, depth)
        else:
            own = is_kept[start : start + draft.num_nodes]
            yield draft.picked(own.nonzero()[0].tolist(), depth)
