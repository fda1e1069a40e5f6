"""What may be configured about the cache, and which of it makes sense for a model: plain values and their rules.

The names of the snapshot policy and of the reuse policies are those of TensorRT-LLM, so that its settings carry over.
"""

from __future__ import annotations

from math import inf
from typing import Literal, get_args

import msgspec

from turnkeep.cache.policies import EVICTION_POLICIES, EvictionPolicyName
from turnkeep.cache.tiers.config import TierConfig

ReusePolicy = Literal["per_conversation", "per_request", "all_reusable"]
REUSE_POLICIES: tuple[ReusePolicy, ...] = get_args(ReusePolicy)


def _check_whole(name: str, value: object, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _check_number(name: str, value: object, *, most: float) -> None:
    if not isinstance(value, float | int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a number from 0 to {most:g}, not {value!r}")


def _check_one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


class SnapshotPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the state of a prompt is kept, so that later prompts can go on from there.

    periodic_snapshot_interval: every so many tokens of the prompt; 0: not. additional_snapshot_offsets_from_start:
    positions, counted from the start; ..._from_end: tokens before the end of the prompt, 0 is its end. Raises
    ValueError for anything but whole numbers in range.
    """

    template_boundaries: bool = True  # where the chat template repeats itself: trunk, turn_start, turn_end
    branch_snapshots: bool = True  # where prompts were seen to part
    declared_boundaries: bool = True  # where clients say so
    periodic_snapshot_interval: int = 0
    additional_snapshot_offsets_from_start: tuple[int, ...] = ()
    additional_snapshot_offsets_from_end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_whole("periodic_snapshot_interval", self.periodic_snapshot_interval, least=0)
        for offset in self.additional_snapshot_offsets_from_start:
            _check_whole("additional_snapshot_offsets_from_start", offset, least=1)
        for offset in self.additional_snapshot_offsets_from_end:
            _check_whole("additional_snapshot_offsets_from_end", offset, least=0)

    @property
    def is_empty(self) -> bool:
        """No rule would ever make a snapshot."""
        return not (
            self.template_boundaries
            or self.branch_snapshots
            or self.declared_boundaries
            or self.periodic_snapshot_interval
            or self.additional_snapshot_offsets_from_start
            or self.additional_snapshot_offsets_from_end
        )


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every field has a working default. Raises ValueError for values out of range.

    prefix_caching False: nothing is matched or kept. reuse_policy: per_conversation lets go of a conversation's older
    turns when newer ones take their place, per_request leaves all of them to eviction, all_reusable is per_request for
    models whose every token can be resumed from. max_num_turns: of one line of a conversation that are kept side by
    side. max_branches: lines of one conversation that are kept side by side. max_conversation_share, max_tenant_share:
    of the state rows; who has more gives first (1: no limit). idle_ttl_s: a conversation unused for so long is let go
    of (0: never). max_retention_s, max_held_share: bounds in time and in rows of what clients ask to be kept.
    """

    prefix_caching: bool = True
    reuse_policy: ReusePolicy = "per_conversation"
    max_num_turns: int = 1
    max_branches: int = 4
    max_conversation_share: float = 0.5
    max_tenant_share: float = 1.0
    idle_ttl_s: float = 0.0
    max_retention_s: float = 3600.0
    max_held_share: float = 0.25
    eviction_policy: EvictionPolicyName = "density"
    snapshots: SnapshotPolicy = SnapshotPolicy()
    tiers: TierConfig = TierConfig()

    def __post_init__(self) -> None:
        _check_one_of("reuse_policy", self.reuse_policy, REUSE_POLICIES)
        _check_one_of("eviction_policy", self.eviction_policy, EVICTION_POLICIES)
        _check_whole("max_num_turns", self.max_num_turns, least=1)
        _check_whole("max_branches", self.max_branches, least=1)
        for name in ("max_conversation_share", "max_tenant_share", "max_held_share"):
            _check_number(name, getattr(self, name), most=1.0)
        for name in ("idle_ttl_s", "max_retention_s"):
            _check_number(name, getattr(self, name), most=inf)


def resolve_cache_config(config: CacheConfig, *, has_state: bool) -> tuple[CacheConfig, tuple[str, ...]]:
    """What of `config` holds for a model with (without) recurrent layers, and a notice for everything that changed."""
    notices: list[str] = []
    snapshots = config.snapshots
    if config.reuse_policy == "per_conversation" and snapshots.periodic_snapshot_interval:
        snapshots = msgspec.structs.replace(snapshots, periodic_snapshot_interval=0)
        notices.append("periodic_snapshot_interval is 0 with the reuse policy per_conversation, whose turns have ends")
    config = msgspec.structs.replace(config, snapshots=snapshots)
    if not has_state:
        return config, tuple(notices)
    if config.reuse_policy == "all_reusable":
        config = msgspec.structs.replace(config, reuse_policy="per_request")
        notices.append("all_reusable is per_request here: this model can be resumed only where its state was kept")
    if config.prefix_caching and snapshots.is_empty:
        config = msgspec.structs.replace(config, prefix_caching=False)
        notices.append("prefix caching is disabled: no rule of the snapshot policy ever keeps this model's state")
    return config, tuple(notices)


def snapshot_interval(interval: int | None, mamba_state_cache_interval: int | None) -> tuple[int, tuple[str, ...]]:
    """The interval in tokens out of a setting (None: not given) and its deprecated alias, and notices.

    Raises ValueError when both are given.
    """
    if mamba_state_cache_interval is None:
        return interval or 0, ()
    if interval is not None:
        raise ValueError(
            "mamba_state_cache_interval is the old name of periodic_snapshot_interval: only one of them may be given"
        )
    return mamba_state_cache_interval, ("mamba_state_cache_interval is deprecated: use periodic_snapshot_interval",)
