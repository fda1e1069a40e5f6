"""What a step costs in seconds, learnt from the steps that were measured: its prefill, its decodes, its draft nodes.

Two fits, one of computing a step and one of drafting after it, so that the price of one more node is known apart from
everything that happens in the same step. A factor a regime (how many requests decode, with drafts or without) takes up
what is not linear: tiles, other code paths, caches. Kept in a file, so that an engine starts with what it knew.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turnkeep.cache.prefill_cost import num_pairs
from turnkeep.scheduler.least_squares import Float64Array, OnlineLeastSquares
from turnkeep.scheduler.step_plan import StepPlan

log = logging.getLogger(__name__)

FILE_VERSION = 1
REGIME_MEMORY = 0.95
REGIME_TRUST = 2.0  # measurements after which a regime's own factor counts as much as none
MAX_REGIME_FACTOR = 4.0

# Seconds: a step, a prefill token, a (query, key) pair of prefill, a decode, a draft node, that there are any, a
# (query, key) pair of decodes. Believed until measured; a little too good for drafts, so that they are tried.
COMPUTE_PRIOR = (2e-3, 2e-4, 1e-9, 3e-4, 1e-4, 2e-4, 1e-8)
# Seconds: that there is any drafting, a level, a request, a node, a prefill token that the draft head takes over.
DRAFT_PRIOR = (1e-4, 2e-4, 5e-6, 5e-6, 1e-5)


@dataclass(slots=True, frozen=True)
class StepLoad:
    """The work of one step as the cost model sees it; a root is a decode, the nodes below it are its draft."""

    num_prefill_tokens: int = 0
    num_prefill_pairs: float = 0.0
    num_decodes: int = 0
    num_nodes: int = 0
    num_decode_pairs: float = 0.0  # of decodes and nodes with the tokens before them

    @classmethod
    def of(cls, plan: StepPlan) -> StepLoad:
        prefill_tokens = num_decodes = num_nodes = 0
        prefill_pairs = decode_pairs = 0.0
        for item in plan.items:
            num_tokens, start = len(item.token_ids), item.start
            if num_tokens == 1 and start > 0:
                draft = item.draft
                nodes = 0 if draft is None else draft.num_nodes
                num_decodes += 1
                num_nodes += nodes
                decode_pairs += (1 + nodes) * (start + 1)
            else:
                prefill_tokens += num_tokens
                prefill_pairs += num_pairs(start, start + num_tokens)
        return cls(prefill_tokens, prefill_pairs, num_decodes, num_nodes, decode_pairs)

    def features(self) -> tuple[float, ...]:
        return (
            1.0,
            self.num_prefill_tokens,
            self.num_prefill_pairs,
            self.num_decodes,
            self.num_nodes,
            1.0 if self.num_nodes else 0.0,
            self.num_decode_pairs,
        )


@dataclass(slots=True, frozen=True)
class DraftLoad:
    """The drafting after one step."""

    num_levels: int
    num_requests: int
    num_nodes: int
    num_prefill_tokens: int = 0  # of the step's prompts, which a draft head takes over

    def features(self) -> tuple[float, ...]:
        any_drafting = 1.0 if self.num_levels or self.num_prefill_tokens else 0.0
        return (any_drafting, self.num_levels, self.num_requests, self.num_nodes, self.num_prefill_tokens)


LEAST_STEP_S = 1e-6  # no step is free, whatever a fit on a busy machine makes of it


@dataclass(slots=True)
class _Regime:
    """Steps with about so many requests, with drafts or without: how many, and the sum of their features, each in
    parts of the time it took, so that a step which something interrupted says little. Older ones count less."""

    weight: float
    features: Float64Array

    def add(self, features: Sequence[float], seconds: float) -> None:
        self.weight = REGIME_MEMORY * self.weight + 1.0
        self.features = REGIME_MEMORY * self.features + np.asarray(features) / seconds


class StepCost:
    """Predicts and learns. Seconds are wall-clock seconds of this engine."""

    def __init__(self) -> None:
        self._compute = OnlineLeastSquares(COMPUTE_PRIOR)
        self._draft = OnlineLeastSquares(DRAFT_PRIOR)
        self._regimes: dict[tuple[int, bool], _Regime] = {}

    @property
    def num_measured(self) -> int:
        return self._compute.num_measured

    def measured(self, load: StepLoad, seconds: float) -> None:
        """A step, without its drafting, took so long."""
        if not seconds > 0:
            return
        features = load.features()
        if load.num_decodes and not load.num_prefill_tokens:
            key = _regime(load.num_decodes, load.num_nodes > 0)
            if key not in self._regimes:
                self._regimes[key] = _Regime(0.0, np.zeros(len(features)))
            self._regimes[key].add(features, seconds)
        self._compute.measured(features, seconds)

    def measured_draft(self, load: DraftLoad, seconds: float) -> None:
        """The drafting after a step took so long."""
        if load.num_levels or load.num_prefill_tokens:
            self._draft.measured(load.features(), seconds)

    def step_s(self, load: StepLoad) -> float:
        """Seconds of a step without its drafting."""
        return self._compute.predict(load.features()) * self._factor(load.num_decodes, load.num_nodes > 0)

    def decode_s(self, num_decodes: int, num_decode_pairs: float, num_nodes: Float64Array) -> Float64Array:
        """Seconds of a step of decodes with so many draft nodes, any shape; between none and one they are in between.

        A node costs what it costs at the mean length of the requests.
        """
        once, per_decode, per_node, any_nodes, per_pair = self._compute.costs[[0, 3, 4, 5, 6]].tolist()
        plain = once + per_decode * num_decodes + per_pair * num_decode_pairs
        node = per_node + per_pair * num_decode_pairs / max(num_decodes, 1)
        factor = self._factor(num_decodes, has_nodes=True)
        plain_s = max(plain * self._factor(num_decodes, has_nodes=False), LEAST_STEP_S)
        one_s = max((plain + any_nodes + node) * factor, plain_s)
        seconds: Float64Array = one_s + (num_nodes - 1.0) * (node * factor)
        return np.where(num_nodes < 1.0, plain_s + num_nodes * (one_s - plain_s), seconds)

    def draft_s(self, load: DraftLoad) -> float:
        """Seconds of drafting after a step."""
        return self._draft.predict(load.features())

    def num_measured_alike(self, num_decodes: int, *, has_nodes: bool) -> float:
        """Measurements of such steps, older ones counting less: never much more than 20."""
        regime = self._regimes.get(_regime(num_decodes, has_nodes))
        return 0.0 if regime is None else regime.weight

    def _factor(self, num_decodes: int, has_nodes: bool) -> float:
        """Of what the fit says now about the steps that were measured there."""
        regime = self._regimes.get(_regime(num_decodes, has_nodes))
        if regime is None:
            return 1.0
        predicted = self._compute.predict(regime.features)  # of steps of a second each
        factor = regime.weight / max(predicted, regime.weight / MAX_REGIME_FACTOR)
        return float(max(factor, 1.0 / MAX_REGIME_FACTOR) ** (regime.weight / (regime.weight + REGIME_TRUST)))

    def values(self) -> dict[str, list[float]]:
        """What is known, for a file."""
        return {"compute": self._compute.costs.tolist(), "draft": self._draft.costs.tolist()}

    @classmethod
    def of_values(cls, found: object) -> StepCost:
        """From `values`; of what is not usable nothing is taken."""
        cost = cls()
        if isinstance(found, dict):
            cost._compute = _started(found.get("compute"), COMPUTE_PRIOR)
            cost._draft = _started(found.get("draft"), DRAFT_PRIOR)
        return cost


@dataclass(slots=True, frozen=True)
class StepCostFile:
    """Costs on disk, under a key that names model, type and threads; several engines may share a file."""

    path: Path
    key: str

    def load(self) -> StepCost:
        """What an earlier engine knew; a file that cannot be used is as good as none."""
        return StepCost.of_values(_read(self.path).get(self.key))

    def save(self, cost: StepCost) -> None:
        """Replaces the file as a whole. One that cannot be written is a warning."""
        known = _read(self.path) | {self.key: cost.values()}
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"version": FILE_VERSION, "costs": known}))
            temporary.replace(self.path)
        except OSError as error:
            log.warning("what steps cost is not kept for the next engine: %s", error)


def _started(found: object, prior: Sequence[float]) -> OnlineLeastSquares:
    values = _costs(found, len(prior))
    if values is None:
        return OnlineLeastSquares(prior)
    # A cost that was found to be nothing is believed to be little, so that it can be found again.
    return OnlineLeastSquares([max(value, 0.01 * own) for value, own in zip(values, prior, strict=True)])


def _regime(num_decodes: int, has_nodes: bool) -> tuple[int, bool]:
    return num_decodes.bit_length(), has_nodes


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("what steps cost is learnt anew: %s cannot be read (%s)", path, error)
        return {}
    if not isinstance(content, dict) or content.get("version") != FILE_VERSION:
        return {}
    costs = content.get("costs")
    return costs if isinstance(costs, dict) else {}


def _costs(values: object, size: int) -> list[float] | None:
    if not isinstance(values, list) or len(values) != size:
        return None
    if not all(isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in values):
        return None
    return [float(value) for value in values]
