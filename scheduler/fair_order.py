"""Fair shares between tenants: who waits behind whom, by the tokens each has asked for (start-time fair queueing).

A request starts, by its tag, where its tenant's earlier requests end, on a clock that advances with what is admitted.
Alone, a tenant is served in order of arrival; beside others, a burst of one does not push the others back.
"""

from __future__ import annotations

LIKELY_OUTPUT_TOKENS = 256  # what an answer is counted as; how long it will be nobody knows
MAX_TENANTS = 4096


class FairOrder:
    """Tags are in tokens. Tenants that have fallen behind the clock are forgotten: they have nothing to pay."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def start(self, tenant: str, num_prompt_tokens: int, max_new_tokens: int) -> float:
        """The tag of a tenant's next request."""
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = start + num_prompt_tokens + min(max_new_tokens, LIKELY_OUTPUT_TOKENS)
        if len(self._ends) > MAX_TENANTS:
            self._forget()
        return start

    def _forget(self) -> None:
        """Forget those who have nothing to pay, and the half that has least to pay if that is still everybody."""
        for now in (self._now, sorted(self._ends.values())[len(self._ends) // 2]):
            if len(self._ends) > MAX_TENANTS:
                self._ends = {name: end for name, end in self._ends.items() if end > now}

    def admitted(self, start: float) -> None:
        """A request with this tag runs now."""
        self._now = max(self._now, start)
