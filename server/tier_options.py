"""Command-line options of the colder tiers, and what they mean for the engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnkeep.cache.tiers.config import TierConfig
from turnkeep.server.config import parse_size

FOLDER = "cache"  # in the state folder


def add_tier_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host-cache", type=_tier_size, metavar="SIZE", help="memory for what leaves the cache: SIZE, PAGES:SNAPSHOTS "
        "or 0 (default: on an accelerator half of what is free; on a CPU only to read ahead from disk)",
    )  # fmt: skip
    group.add_argument(
        "--disk-cache", type=_tier_size, metavar="SIZE", help="files in the state folder, of all models together, "
        "that a conversation goes on from after a restart: SIZE, PAGES:SNAPSHOTS or 0 (default: a tenth of what is "
        "free, at most 4GiB)",
    )  # fmt: skip
    group.add_argument(
        "--int8-snapshots", action=argparse.BooleanOptionalAction, default=False, help="write recurrent states to disk "
        "in eight bits: about a quarter of the bytes, but turns that go on from there may differ from a cold run",
    )  # fmt: skip


def tier_config(options: argparse.Namespace, state_dir: str | None) -> TierConfig:
    """state_dir None: there is no place for a disk tier."""
    host, disk = options.host_cache or (None, None), options.disk_cache or (None, None)
    return TierConfig(
        host_bytes=host[0],
        host_snapshot_bytes=host[1],
        disk_bytes=disk[0],
        disk_snapshot_bytes=disk[1],
        folder=None if state_dir is None else str(Path(state_dir) / FOLDER),
        int8_snapshots=options.int8_snapshots,
    )


def _tier_size(text: str) -> tuple[int, int | None]:
    """(bytes in all, bytes of these for snapshots) of SIZE or PAGES:SNAPSHOTS."""
    pages, separator, snapshots = text.partition(":")
    try:
        if not separator:
            return parse_size(pages), None
        num_snapshot_bytes = parse_size(snapshots)
        return parse_size(pages) + num_snapshot_bytes, num_snapshot_bytes
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
