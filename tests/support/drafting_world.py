"""A world in which drafts are right with known probabilities and steps take known times, for planning alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from turnkeep.cache.copies import HistoryFold
from turnkeep.scheduler.drafts import DraftTree, TreeGrant
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import SampledToken, StepItem, StepOutput, StepPlan
from turnkeep.scheduler.tree_budget import TreeBudget

SAMPLING = SamplingParams(max_new_tokens=1 << 30)


@dataclass
class Drafted:
    """A draft and what is really right of it: at every node (and the root) one child at most."""

    draft: DraftTree
    right: tuple[int, ...]


def grow(rng: random.Random, grant: TreeGrant, skill: float, stated_power: float) -> Drafted:
    """A tree grown best first; the first child of a node is right with `skill`, later ones with shares of the rest.

    The drafter states its true probabilities to the power of `stated_power`.
    """
    ids: list[int] = []
    parents: list[int] = []
    true: list[float] = []
    depths: list[int] = []
    open_nodes: list[tuple[float, int, int]] = []  # (path probability, parent, depth)

    def expand(parent: int, probability: float, depth: int) -> None:
        share = min(max(skill + rng.uniform(-0.2, 0.2), 0.02), 0.97)
        rest = 1.0
        for _ in range(grant.max_children):
            open_nodes.append((probability * rest * share, parent, depth))
            rest *= 1.0 - share

    expand(-1, 1.0, 1)
    while open_nodes and len(ids) < grant.max_nodes_per_request:
        open_nodes.sort()
        probability, parent, depth = open_nodes.pop()
        ids.append(rng.randrange(1000))
        parents.append(parent)
        true.append(probability)
        depths.append(depth)
        if depth < grant.max_depth:
            expand(len(ids) - 1, probability, depth + 1)
    right, at, mass = [], -1, 1.0
    while True:
        draw, found = rng.random() * mass, None
        for node, parent in enumerate(parents):
            if parent == at:
                draw -= true[node]
                if draw < 0:
                    found = node
                    break
        if found is None:
            break
        right.append(found)
        at, mass = found, true[found]
    stated = tuple(probability**stated_power for probability in true)
    return Drafted(DraftTree(tuple(ids), tuple(parents), stated), tuple(right))


@dataclass
class World:
    """Requests that never end. `step_s` gives a step's seconds from (requests, nodes), without drafting; fold_s: more
    of a step without nodes after one with some, in which rows are brought up to their sequences."""

    budget: TreeBudget
    num_requests: int
    step_s: Callable[[int, int], float]
    draft_level_s: float = 0.0
    fold_s: float = 0.0
    skills: tuple[float, ...] = (0.7,)
    stated_power: float = 1.0
    noise: float = 0.05
    seed: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_nodes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.drafted: dict[str, Drafted] = {}

    def step(self) -> None:
        names = [f"r{number}" for number in range(self.num_requests)]
        drafted = {name: self.drafted[name].draft for name in names if name in self.drafted}
        parts = self.budget.select(list(drafted), list(drafted.values()), self.num_requests, 500 * self.num_requests)
        kept = dict(zip(drafted, parts, strict=True))
        chosen = [kept.get(name) for name in names]
        grant = self.budget.grant(self.num_requests, 500 * self.num_requests)
        items, accepted = [], {}
        for name, draft in zip(names, chosen, strict=True):
            items.append(StepItem(name, [1], 499, np.zeros(1, np.int32), 1, (), SAMPLING, draft=draft))
            if draft is not None:
                accepted[name] = self._accepted(self.drafted[name], draft)
        num_nodes = sum(draft.num_nodes for draft in chosen if draft is not None)
        self.drafted = {}
        if grant is not None:
            for number, name in enumerate(names):
                skill = self.skills[number % len(self.skills)]
                self.drafted[name] = grow(self.rng, grant, skill, self.stated_power)
        draft_s = self.draft_level_s * grant.max_depth if grant is not None else 0.0
        folds = () if num_nodes or not (self.num_nodes and self.num_nodes[-1]) else (HistoryFold(0, 1, 1, 1),)
        step_s = self.step_s(self.num_requests, num_nodes) + self.fold_s * len(folds)
        drafts = {name: drafted.draft for name, drafted in self.drafted.items()}
        tokens = {name: (SampledToken(1),) * (1 + len(accepted.get(name, ()))) for name in names}
        measured_s = (step_s + draft_s) * self.rng.lognormvariate(0, self.noise)
        output = StepOutput(tokens, measured_s, {}, accepted, drafts, draft_s * measured_s / (step_s + draft_s))
        self.budget.measured(StepPlan((), (), tuple(items), folds, grant), output)
        self.num_tokens += sum(map(len, tokens.values()))
        self.seconds += step_s + draft_s
        self.num_nodes.append(num_nodes)

    @staticmethod
    def _accepted(drafted: Drafted, verified: DraftTree) -> tuple[int, ...]:
        """Places in the part that is verified of the nodes that are right."""
        accepted, at = [], -1
        for node in drafted.right:
            token = drafted.draft.token_ids[node]
            for place, (token_id, parent) in enumerate(zip(verified.token_ids, verified.parents, strict=True)):
                if parent == at and token_id == token:
                    accepted.append(place)
                    at = place
                    break
            else:
                break
        return tuple(accepted)

    def run(self, num_steps: int) -> float:
        """Tokens per second of these steps."""
        tokens, seconds = self.num_tokens, self.seconds
        for _ in range(num_steps):
            self.step()
        return (self.num_tokens - tokens) / (self.seconds - seconds)
