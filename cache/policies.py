"""The eviction policies by name, for the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from turnkeep.cache.density_policy import DensityPolicy
from turnkeep.cache.eviction import EvictionPolicy, LRUPolicy
from turnkeep.cache.flop_per_byte import FlopPerBytePolicy
from turnkeep.cache.prefill_cost import PrefillCost
from turnkeep.cache.spec import CacheSpec

EvictionPolicyName = Literal["density", "lru", "flop_per_byte"]
EVICTION_POLICIES: tuple[EvictionPolicyName, ...] = get_args(EvictionPolicyName)


def make_policy(
    name: EvictionPolicyName, spec: CacheSpec, clock: Callable[[], float], cost: PrefillCost
) -> EvictionPolicy:
    """`cost` is the one that the scheduler goes on measuring."""
    if name == "density":
        return DensityPolicy(spec, clock, cost)
    if name == "flop_per_byte":
        return FlopPerBytePolicy(spec, clock, cost)
    return LRUPolicy()
