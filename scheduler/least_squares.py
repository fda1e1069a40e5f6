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
TYPICAL_ERROR = 0.25  # before anything was measured


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

    def predict(self, features: Sequence[float]) -> float:
        return float(self.costs @ np.asarray(features, dtype=np.float64))

    def measured(self, features: Sequence[float], seconds: float) -> None:
        """One measurement; ignored unless it took time. O(n^2), and O(n^3) every few times."""
        if not seconds > 0:
            return
        row = np.asarray(features, dtype=np.float64) * (self._prior / seconds)  # in priors: all of one size
        error = abs(float(row @ self._believed) - 1.0)
        limit = OUTLIER * self._typical_error
        # Until a first fit, errors say how wrong the prior is and not which measurement is odd.
        weight = limit / error if error > limit and self.num_measured >= NUM_FIRST else 1.0
        self._typical_error += 0.05 * (min(error, limit) - self._typical_error)
        self._products = MEMORY * self._products + weight * np.outer(row, row)
        self._targets = MEMORY * self._targets + weight * row
        self.num_measured += 1
        if self.num_measured <= NUM_FIRST or self.num_measured % REFIT_EVERY == 0:
            self._fit()

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
