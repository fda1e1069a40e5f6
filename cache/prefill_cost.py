"""What it costs to compute tokens again, in seconds of this engine; learnt from the steps that it measured.

Seconds of positions [start, end): per_token_s each, and per_pair_s for every (query, key) pair of the attention.
Until enough steps were measured the two keep a ratio that suits models with little attention; only ratios matter to
those who compare densities.
"""

from __future__ import annotations

import numpy as np

MIN_STEPS = 16
REFIT_EVERY = 16
MEMORY = 0.98  # weight of all that was measured before, per step


class PrefillCost:
    """per_token_s and per_pair_s may be given where they are known; measuring replaces them."""

    def __init__(self, per_token_s: float = 1e-4, per_pair_s: float = 4e-10) -> None:
        self.per_token_s = per_token_s
        self.per_pair_s = per_pair_s
        self._num_steps = 0
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)

    def seconds(self, start: int, end: int) -> float:
        """Time to compute positions [start, end)."""
        return self.per_token_s * (end - start) + self.per_pair_s * num_pairs(start, end)

    def measured(self, num_tokens: int, pairs: float, seconds: float) -> None:
        """A step of so many tokens and (query, key) pairs took so long. O(1)."""
        if num_tokens <= 0 or not seconds > 0:
            return
        # Relative errors: a step of one token must not count less than one of thousands.
        row = np.array([1.0, num_tokens, pairs]) / seconds
        self._products = MEMORY * self._products + np.outer(row, row)
        self._targets = MEMORY * self._targets + row
        self._num_steps += 1
        if self._num_steps >= MIN_STEPS and self._num_steps % REFIT_EVERY == 0:
            self._fit()

    def _fit(self) -> None:
        """Least squares of overhead, token and pair times; a part that would be negative is left out."""
        parts = [0, 1, 2]
        while 1 in parts:
            products = self._products[np.ix_(parts, parts)]
            scale = np.sqrt(np.maximum(np.diag(products), 1e-300))
            scaled = products / np.outer(scale, scale) + 1e-9 * np.eye(len(parts))
            found = np.linalg.solve(scaled, self._targets[parts] / scale) / scale
            negative = [part for part, value in zip(parts, found, strict=True) if value < 0]
            if not negative:
                values = dict(zip(parts, found.tolist(), strict=True))
                self.per_token_s, self.per_pair_s = values[1], values.get(2, 0.0)
                return
            parts = [part for part in parts if part not in negative]


def num_pairs(start: int, end: int) -> float:
    """(query, key) pairs of causal attention that positions [start, end) compute."""
    return (end * end - start * start) / 2
