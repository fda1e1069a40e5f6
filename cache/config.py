"""What may be configured about the cache: plain values, the same in the engine's settings and in tests."""

from __future__ import annotations

import msgspec

from turnkeep.cache.policies import EvictionPolicyName
from turnkeep.cache.tiers.config import TierConfig


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every field has a working default.

    prefix_caching False: nothing is matched or kept. max_branches bounds the lines of one conversation that are kept
    side by side.
    """

    prefix_caching: bool = True
    eviction_policy: EvictionPolicyName = "density"
    max_branches: int = 4
    tiers: TierConfig = TierConfig()
