"""What may be configured about the colder tiers. Every field has a working default."""

from __future__ import annotations

import msgspec


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes, pages and snapshots together; None: decided from the machine, 0: no such tier.

    The ..._snapshot_bytes say how much of a size is for snapshots; None: in the proportion of a typical conversation.
    folder: where the disk tier lies; without one there is none.
    """

    host_bytes: int | None = None
    host_snapshot_bytes: int | None = None
    disk_bytes: int | None = None
    disk_snapshot_bytes: int | None = None
    folder: str | None = None
    int8_snapshots: bool = False  # state matrices on disk in eight bits: a quarter of the bytes, and not exact
