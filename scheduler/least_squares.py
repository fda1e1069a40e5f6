"""Least squares over a stream of measurements, for costs: never negative, robust to outliers, forgetful.

Minimises the relative error, since a step of one token must not count less than one of thousands. Where the stream
does not tell two costs apart, or no longer tells one, they stay at what was believed last (a weak ridge).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

MEMORY = 0.995  # weight of all that was measured before, per measurement
REFIT_EVERY = 8
NUM_FIRST = 16  # measurements with a fit after each
PRIOR_WEIGHT = 1e-4  # in measurements: it decides only what they leave open
OUTLIER = 3.0  # errors beyond so many typical ones count less (Huber)
TYPICAL_ERROR, LEAST_ERROR = 0.25, 0.02  # before anything was measured; and however alike all is


class OnlineLeastSquares:
    """costs [n] >= 0 such that features @ costs is close to the measured seconds. `prior` [n] > 0."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = np.asarray(prior, dtype=np.float64)
        self.costs: Float64Array = self._prior.copy()
        self._believed = np.ones(len(prior))  # the costs, in priors
        self._products = np.zeros((len(prior), len(prior)))
        self._targets = np.zeros(len(prior))
        self._typical_error = TYPICAL_ERROR
        self.num_measured = 0
        self._waiting: list[tuple[Sequence[float], float]] = []

    def predict(self, features: Sequence[float] | Float64Array) -> float:
        return float(self.costs.dot(features))

    def measured(self, features: Sequence[float], seconds: float) -> None:
        """One measurement; ignored unless it took time. Taken in, in O(n^3), every few times."""
        if not seconds > 0:
            return
        self.num_measured += 1
        self._waiting.append((features, seconds))
        if self.num_measured <= NUM_FIRST or len(self._waiting) >= REFIT_EVERY:
            self._take_in()
            self._fit()

    def _take_in(self) -> None:
        features = np.array([row for row, _ in self._waiting], dtype=np.float64)
        seconds = np.array([own for _, own in self._waiting])
        rows = features * (self._prior / seconds[:, None])  # in priors: all of one size
        errors = np.abs(rows @ self._believed - 1.0)
        limit = OUTLIER * max(self._typical_error, LEAST_ERROR)
        weights = MEMORY ** np.arange(len(rows) - 1, -1, -1.0)
        if self.num_measured > NUM_FIRST:  # before, errors say how wrong the prior is and not which measurement is odd
            weights *= limit / np.maximum(errors, limit)
        weighted = rows * weights[:, None]
        forgotten = MEMORY ** len(rows)
        self._products = forgotten * self._products + weighted.T @ rows
        self._targets = forgotten * self._targets + weighted.sum(0)
        typical = float(np.minimum(errors, limit).mean())
        self._typical_error += (1.0 - 0.95 ** len(rows)) * (typical - self._typical_error)
        self._waiting.clear()

    def _fit(self) -> None:
        """Parts that would be negative are left out, the most negative first."""
        size = len(self._prior)
        parts = list(range(size))
        while parts:
            products = self._products[np.ix_(parts, parts)] + PRIOR_WEIGHT * np.eye(len(parts))
            found = np.linalg.solve(products, self._targets[parts] + PRIOR_WEIGHT * self._believed[parts])
            lowest = int(found.argmin())
            if found[lowest] >= 0:
                self._believed = np.zeros(size)
                self._believed[parts] = found
                self.costs = self._believed * self._prior
                return
            del parts[lowest]
