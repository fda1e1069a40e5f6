"""Command-line options of the cache, and what they mean for the engine. Each is called like the setting it gives."""

from __future__ import annotations

import argparse
import logging

from turnkeep.cache.config import REUSE_POLICIES, CacheConfig, SnapshotPolicy, snapshot_interval
from turnkeep.cache.policies import EVICTION_POLICIES
from turnkeep.cache.tiers.config import TierConfig

log = logging.getLogger(__name__)


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    cache = parser.add_argument_group("cache")
    cache.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute every turn anew without it (for comparison)",
    )
    cache.add_argument(
        "--reuse-policy", choices=REUSE_POLICIES, default="per_conversation", help="let go of a conversation's older "
        "turns (per_conversation), keep all until they are evicted (per_request), or take every token for a place to "
        "go on from (all_reusable, models without recurrent layers)",
    )  # fmt: skip
    cache.add_argument(
        "--max-num-turns", type=_whole, default=1, metavar="N", help="turns of a conversation kept side by side"
    )
    cache.add_argument(
        "--max-conversation-share", type=float, default=0.5, metavar="SHARE", help="of the state rows that a "
        "conversation and its sub-agents may keep before they give first (1: all)",
    )  # fmt: skip
    cache.add_argument(
        "--max-tenant-share",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="the same for all conversations of an API key",
    )
    cache.add_argument(
        "--idle-ttl-s",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="let go of what nobody used for so long (0: never)",
    )
    cache.add_argument(
        "--max-retention-s", type=float, default=3600.0, metavar="SECONDS", help="longest time that clients may ask "
        "what they leave in the cache to stay",
    )  # fmt: skip
    cache.add_argument(
        "--max-held-share", type=float, default=0.25, metavar="SHARE", help="of the state rows that may stay because "
        "clients ask for it",
    )  # fmt: skip
    cache.add_argument(
        "--eviction-policy", choices=EVICTION_POLICIES, default="density", help="what leaves a full cache first: what "
        "saves fewest seconds a byte as learnt so far (density), the least recently used (lru), or Marconi's rule",
    )  # fmt: skip
    _add_snapshot_options(cache)


def _add_snapshot_options(cache: argparse._ArgumentGroup) -> None:
    flag = argparse.BooleanOptionalAction
    cache.add_argument(
        "--template-boundaries", action=flag, default=True, help="keep states where the chat template repeats itself"
    )
    cache.add_argument("--branch-snapshots", action=flag, default=True, help="and where prompts were seen to part")
    cache.add_argument("--declared-boundaries", action=flag, default=True, help="and where clients say so")
    cache.add_argument(
        "--periodic-snapshot-interval", type=_whole, metavar="TOKENS", help="and every so many tokens of a prompt"
    )
    cache.add_argument("--mamba-state-cache-interval", type=_whole, metavar="TOKENS", help="its old name, deprecated")
    cache.add_argument(
        "--additional-snapshot-offsets-from-start", type=_whole, action="append", metavar="N", help="and at this "
        "position of a prompt; may be repeated",
    )  # fmt: skip
    cache.add_argument(
        "--additional-snapshot-offsets-from-end", type=_whole, action="append", metavar="N", help="and so many tokens "
        "before its end, 0 is the end; may be repeated",
    )  # fmt: skip


def cache_config(options: argparse.Namespace, tiers: TierConfig | None = None) -> CacheConfig:
    """Raises ValueError for settings that contradict each other or are out of range."""
    interval, notices = snapshot_interval(options.periodic_snapshot_interval, options.mamba_state_cache_interval)
    for notice in notices:
        log.warning("%s", notice)
    return CacheConfig(
        prefix_caching=options.prefix_caching,
        reuse_policy=options.reuse_policy,
        max_num_turns=options.max_num_turns,
        max_conversation_share=options.max_conversation_share,
        max_tenant_share=options.max_tenant_share,
        idle_ttl_s=options.idle_ttl_s,
        max_retention_s=options.max_retention_s,
        max_held_share=options.max_held_share,
        eviction_policy=options.eviction_policy,
        snapshots=SnapshotPolicy(
            template_boundaries=options.template_boundaries,
            branch_snapshots=options.branch_snapshots,
            declared_boundaries=options.declared_boundaries,
            periodic_snapshot_interval=interval,
            additional_snapshot_offsets_from_start=tuple(options.additional_snapshot_offsets_from_start or ()),
            additional_snapshot_offsets_from_end=tuple(options.additional_snapshot_offsets_from_end or ()),
        ),
        tiers=tiers if tiers is not None else TierConfig(),
    )


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError("a whole number is needed")
    return int(text)
