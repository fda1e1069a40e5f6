"""Makes the colder tiers of an engine from its settings: how large each is, where the disk tier lies, what it is of.

Defaults. Host memory: on an accelerator half of what is free, at most what the device's pools hold, so that a waiting
conversation leaves the device without loss. On a CPU the pools are host memory themselves, and more of it is better
given to them; a small tier remains as room for what is read ahead of a prompt. Disk: a tenth of what is free there, at
most 4 GiB, because what survives a restart is worth little space and no full disk.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import turnkeep
from turnkeep.cache.config import CacheConfig
from turnkeep.cache.spec import CacheSpec
from turnkeep.cache.tiers.background import BackgroundThread
from turnkeep.cache.tiers.cold_tiers import NO_BUDGET, ColdTiers
from turnkeep.cache.tiers.config import TierConfig
from turnkeep.cache.tiers.disk_tier import DiskTier
from turnkeep.cache.tiers.pool_content import PoolContent
from turnkeep.cache.tiers.record import TierBudget
from turnkeep.cache.tiers.record_files import FORMAT_VERSION
from turnkeep.cache.tiers.row_codec import RowCodec
from turnkeep.cache.tiers.shared_folder import DiskTierError, FolderShare, held_bytes, layout_folder, lock_folder
from turnkeep.cache.tiers.tier_counters import TierCounters
from turnkeep.engine.environment import available_memory_bytes
from turnkeep.engine.sizing import MIB, SNAPSHOTS_PER_CONVERSATION, TYPICAL_TOKENS

MAX_DEFAULT_DISK_BYTES = 4096 * MIB
DEFAULT_DISK_SHARE = 0.1
MAX_CPU_HOST_BYTES = 256 * MIB
CPU_HOST_SHARE = 0.125


@dataclass(frozen=True, slots=True)
class BuiltTiers:
    """tiers None: there is none. summary: their sizes, for the line at the start."""

    tiers: ColdTiers | None
    summary: str
    notices: tuple[str, ...] = ()


def build_tiers(
    spec: CacheSpec,
    cache: CacheConfig,
    pool: PoolContent,
    fingerprint: bytes | None,
    device_bytes: int,
    *,
    has_accelerator: bool = False,
) -> BuiltTiers:
    """The tiers below pools of device_bytes. fingerprint: of the weights; None: nothing may outlive the process.

    What cannot be had (a folder in use, or that cannot be written) is a notice, never an error.
    """
    config = cache.tiers
    if not cache.prefix_caching:
        return BuiltTiers(None, "no colder tier")
    layout = layout_digest(spec, config, pool, fingerprint or b"")
    counters = TierCounters()
    background = BackgroundThread()
    notices: list[str] = []
    disk: DiskTier | None = None
    disk_budget = NO_BUDGET
    if config.folder is not None and config.disk_bytes != 0 and fingerprint is not None:
        base = Path(config.folder)
        try:
            folder = layout_folder(base, layout)
            lock = lock_folder(folder)
            disk_budget = _budget(spec, _disk_bytes(config, base), config.disk_snapshot_bytes)
            share = FolderShare(base, folder, disk_budget.num_bytes)
            codec = RowCodec(pool.row_parts) if config.int8_snapshots else None
            disk = DiskTier(
                folder, layout, background, counters, clock=time.monotonic, codec=codec, lock=lock, share=share
            )
        except (DiskTierError, OSError) as error:
            notices.append(f"no disk cache, conversations will not survive a restart: {error}")
            disk_budget = NO_BUDGET
    host_bytes = config.host_bytes
    if host_bytes is None:
        host_bytes = default_host_bytes(device_bytes, has_accelerator=has_accelerator, has_disk=disk is not None)
    host_budget = _budget(spec, host_bytes, config.host_snapshot_bytes)
    if disk is None and not host_bytes:
        return BuiltTiers(None, "no colder tier", tuple(notices))
    tiers = ColdTiers(
        spec,
        layout,
        pool,
        background,
        clock=time.monotonic,
        counters=counters,
        host_budget=host_budget,
        disk_budget=disk_budget,
        disk=disk,
    )
    sizes = [f"host cache {host_bytes / MIB:,.0f} MiB"]
    if disk is not None:
        held, others = tiers.index.disk.num_bytes / MIB, share.num_other_bytes / MIB
        sizes.append(f"disk cache {disk_budget.num_bytes / MIB:,.0f} MiB with {held:,.1f} MiB in use")
        if others:
            sizes.append(f"{others:,.1f} MiB of it by other models")
    return BuiltTiers(tiers, ", ".join(sizes), tuple(notices))


def layout_digest(spec: CacheSpec, config: TierConfig, pool: PoolContent, fingerprint: bytes) -> bytes:
    """Of everything that defines the bytes of a record: weights, types and shapes, versions, and how it is written."""
    described = {
        "format": FORMAT_VERSION,
        "version": turnkeep.__version__,
        "weights": fingerprint.hex(),
        "page_size": spec.page_size,
        "pools": pool.describe(),
        "int8_snapshots": config.int8_snapshots,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def default_host_bytes(device_bytes: int, *, has_accelerator: bool, has_disk: bool) -> int:
    """Bytes of the host tier where none were asked for."""
    if has_accelerator:
        available = available_memory_bytes()
        return min(device_bytes, (available or 0) // 2)
    return min(int(device_bytes * CPU_HOST_SHARE), MAX_CPU_HOST_BYTES) if has_disk else 0


def _disk_bytes(config: TierConfig, base: Path) -> int:
    if config.disk_bytes is not None:
        return config.disk_bytes
    return int(min((shutil.disk_usage(base).free + held_bytes(base)) * DEFAULT_DISK_SHARE, MAX_DEFAULT_DISK_BYTES))


def _budget(spec: CacheSpec, num_bytes: int, num_snapshot_bytes: int | None) -> TierBudget:
    """Split a size as a typical conversation needs it, unless the part for snapshots was named."""
    if num_snapshot_bytes is None:
        pages = -(-TYPICAL_TOKENS // spec.page_size) * spec.bytes_per_page
        snapshots = SNAPSHOTS_PER_CONVERSATION * spec.bytes_per_row
        num_snapshot_bytes = num_bytes * snapshots // max(pages + snapshots, 1)
    num_snapshot_bytes = min(num_snapshot_bytes, num_bytes)
    return TierBudget(num_bytes - num_snapshot_bytes, num_snapshot_bytes)
