"""Requests that wait for admission: by priority, suspended ones before new ones, then by fair share and arrival.

A waiting request is found and removed in O(log n) comparisons.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from turnkeep.scheduler.request import Request


def _service_order(request: Request) -> tuple[int, bool, float, int]:
    return (request.priority, request.status != "suspended", request.fair_start, request.arrival_number)


class WaitingQueue:
    """Sorted by service order. A request's status must not change while it is in here."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_service_order)

    def remove(self, request: Request) -> None:
        """Raises KeyError when the request does not wait."""
        index = bisect_left(self._requests, _service_order(request), key=_service_order)
        if index == len(self._requests) or self._requests[index] is not request:
            raise KeyError(request.request_id)
        del self._requests[index]

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
