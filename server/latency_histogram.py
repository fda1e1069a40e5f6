"""A histogram for what happens with every token: counted in a list, and only made into samples when it is read.

The client library's own takes a lock and walks its buckets for each value. Belongs to one thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LatencyHistogram(Collector):
    """`bounds` are the buckets' upper ends in seconds, ascending; one without end is added."""

    def __init__(self, name: str, meaning: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value, in seconds."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(ends, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._meaning, buckets=buckets, sum_value=self._sum)

    def describe(self) -> Iterable[Metric]:
        return ()  # the name is ours alone
