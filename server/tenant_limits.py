"""What one tenant may ask for: tokens a minute, turns at once, and its part of the queue. Checked before any work.

A tenant is what an API key makes. Tokens are counted as they are computed: what a returning turn reuses costs nothing.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from turnkeep.server import errors
from turnkeep.server.config import ServerConfig

MAX_RETRY_AFTER_S = 3600


def make_limits(config: ServerConfig) -> TenantLimits:
    """The limits that a server's settings ask for."""
    return TenantLimits(
        tokens_per_minute=config.tokens_per_minute,
        max_turns=config.max_turns_per_key,
        num_tenants=max(len(config.api_keys), 1),
    )


@dataclass(slots=True)
class _Bucket:
    level: float  # tokens left; may be below zero, since the length of an answer is known only afterwards
    filled_s: float


class TenantLimits:
    """None: no limit. num_tenants > 1 keeps each of them from filling more than half of the queue."""

    def __init__(
        self,
        *,
        tokens_per_minute: int | None = None,
        max_turns: int | None = None,
        num_tenants: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens_per_minute = tokens_per_minute
        self._max_turns = max_turns
        self._num_tenants = num_tenants
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._open_turns: Counter[str] = Counter()

    def check(self, tenant: str, *, num_waiting: int, max_waiting: int) -> None:
        """Raises ApiError 429. num_waiting: the tenant's own turns that wait for admission."""
        if self._num_tenants > 1 and num_waiting >= max(max_waiting // 2, 1):
            raise errors.overloaded(f"{num_waiting} requests of this key are waiting already.", retry_after_s=5)
        if self._max_turns is not None and self._open_turns[tenant] >= self._max_turns:
            raise errors.overloaded(f"{self._max_turns} requests of this key run already.", retry_after_s=2)
        if self._tokens_per_minute is None:
            return
        bucket = self._bucket(tenant, self._tokens_per_minute)
        if bucket.level <= 0.0:
            wait_s = math.ceil((1.0 - bucket.level) * 60.0 / self._tokens_per_minute)
            raise errors.overloaded(
                f"Rate limit reached: {self._tokens_per_minute} tokens per minute.",
                retry_after_s=min(max(wait_s, 1), MAX_RETRY_AFTER_S),
            )

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens; a negative number gives some back (a prompt that turned out to be cached)."""
        if self._tokens_per_minute is not None:
            bucket = self._bucket(tenant, self._tokens_per_minute)
            bucket.level = min(bucket.level - num_tokens, float(self._tokens_per_minute))

    def turn_opened(self, tenant: str) -> None:
        self._open_turns[tenant] += 1

    def turn_closed(self, tenant: str) -> None:
        self._open_turns[tenant] -= 1

    def _bucket(self, tenant: str, tokens_per_minute: int) -> _Bucket:
        """Filled up to now; it holds one minute's worth at most."""
        now_s = self._clock()
        bucket = self._buckets.setdefault(tenant, _Bucket(float(tokens_per_minute), now_s))
        bucket.level = min(
            bucket.level + (now_s - bucket.filled_s) * tokens_per_minute / 60.0, float(tokens_per_minute)
        )
        bucket.filled_s = now_s
        return bucket
