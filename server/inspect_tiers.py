"""What `turnkeep inspect` shows of the colder tiers: those of a running server, and what lies in a folder at rest.

A server is asked over HTTP for what its dashboard shows; of a folder only names, sizes and times are read. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from turnkeep.cache.tiers.shared_folder import LayoutUse, layouts_in_use
from turnkeep.server.config import format_size

TIERS = ("host", "disk")
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier of a running engine. hits: loads that came from it, hit_tokens: prompt tokens they spared; evicted:
    records that left it for its budget. Counters begin with the engine."""

    tier: str
    page_budget_bytes: int
    snapshot_budget_bytes: int
    page_bytes: int
    snapshot_bytes: int
    num_page_records: int
    num_snapshot_records: int
    num_hits: int
    num_hit_tokens: int
    num_evicted: int


@dataclass(frozen=True, slots=True)
class ServerTiers:
    """The tiers of a running engine, and what went between them. other_bytes: of other models in the disk's folder."""

    tiers: tuple[TierReport, ...]
    offloaded_bytes: int  # device -> host memory
    written_bytes: int  # host memory -> disk
    read_bytes: int  # disk -> host memory
    loaded_bytes: int  # host memory -> device
    num_unwritten: int
    num_failed_loads: int
    num_ignored_files: int
    other_bytes: int


async def read_server_tiers(url: str, api_key: str | None) -> ServerTiers:
    """Ask a server. Raises aiohttp.ClientError."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers, raise_for_status=True) as session,
        session.get(f"{url}/ui/state") as response,
    ):
        engine = (await response.json())["engine"]
    return server_tiers(engine.get("gauges", {}), engine.get("counters", {}))


def server_tiers(gauges: Mapping[str, float], counters: Mapping[str, float]) -> ServerTiers:
    """From an engine's statistics; a tier that has no room is left out."""
    values = {name.removeprefix("cache_tier_"): int(value) for name, value in {**gauges, **counters}.items()}

    def value(name: str) -> int:
        return values.get(name, 0)

    def over_reasons(name: str) -> int:
        return sum(number for key, number in values.items() if key.startswith(f"{name}."))

    tiers = [
        TierReport(
            tier=tier,
            page_budget_bytes=value(f"{tier}_page_budget_bytes"),
            snapshot_budget_bytes=value(f"{tier}_snapshot_budget_bytes"),
            page_bytes=value(f"{tier}_page_bytes"),
            snapshot_bytes=value(f"{tier}_snapshot_bytes"),
            num_page_records=value(f"{tier}_num_page_records"),
            num_snapshot_records=value(f"{tier}_num_snapshot_records"),
            num_hits=value(f"num_hits.{tier}"),
            num_hit_tokens=value(f"num_hit_tokens.{tier}"),
            num_evicted=value(f"num_evicted.{tier}"),
        )
        for tier in TIERS
    ]
    return ServerTiers(
        tiers=tuple(tier for tier in tiers if tier.page_budget_bytes + tier.snapshot_budget_bytes),
        offloaded_bytes=value("offloaded_bytes"),
        written_bytes=value("written_bytes"),
        read_bytes=value("read_bytes"),
        loaded_bytes=value("loaded_bytes"),
        num_unwritten=value("num_unwritten"),
        num_failed_loads=over_reasons("num_failed_loads"),
        num_ignored_files=over_reasons("num_ignored_files"),
        other_bytes=value("disk_other_bytes"),
    )


def server_tiers_json(report: ServerTiers) -> dict[str, Any]:
    """The report as a JSON object; field names carry the units."""
    return asdict(report)


def print_server_tiers(report: ServerTiers, console: Console) -> None:
    """The report as a table and a line."""
    if not report.tiers:
        console.print("The server has no colder tiers.", highlight=False)
        return
    names = ("pages", "of", "snapshots", "of", "records", "hits", "tokens reused", "evicted")
    table = Table("tier", *names, title="Colder tiers")
    for tier in report.tiers:
        sizes = (tier.page_bytes, tier.page_budget_bytes, tier.snapshot_bytes, tier.snapshot_budget_bytes)
        numbers = (
            f"{tier.num_page_records} + {tier.num_snapshot_records}",
            *map(str, (tier.num_hits, tier.num_hit_tokens, tier.num_evicted)),
        )
        table.add_row(tier.tier, *map(format_size, sizes), *numbers)
    console.print(table)
    console.print(
        f"Copied since the engine began: {format_size(report.offloaded_bytes)} out of the device, "
        f"{format_size(report.written_bytes)} to disk, {format_size(report.read_bytes)} from disk, "
        f"{format_size(report.loaded_bytes)} back. {report.num_unwritten} not written yet, {report.num_failed_loads} "
        f"loads failed, {report.num_ignored_files} files ignored. Other models hold {format_size(report.other_bytes)} "
        "of the disk's folder.",
        highlight=False,
    )


def folder_tiers(folder: Path) -> tuple[LayoutUse, ...]:
    """What the disk tiers of all models hold in a folder, last used first."""
    return tuple(sorted(layouts_in_use(folder), key=lambda layout: layout.used_s, reverse=True))


def folder_json(layouts: tuple[LayoutUse, ...]) -> list[dict[str, Any]]:
    """The layouts as JSON objects."""
    return [asdict(layout) for layout in layouts]


def print_folder(layouts: tuple[LayoutUse, ...], folder: Path, console: Console) -> None:
    """The layouts as a table; nothing where there are none."""
    if not layouts:
        return
    num_bytes = sum(layout.page_bytes + layout.snapshot_bytes for layout in layouts)
    table = Table(
        *("layout", "pages", "snapshots", "records", "last used", ""),
        title=f"Disk cache in {folder}: {format_size(num_bytes)}",
    )
    for layout in layouts:
        table.add_row(
            layout.name[:12],
            format_size(layout.page_bytes),
            format_size(layout.snapshot_bytes),
            f"{layout.num_page_records} + {layout.num_snapshot_records}",
            datetime.fromtimestamp(layout.used_s).strftime("%Y-%m-%d %H:%M") if layout.used_s else "-",
            "in use" if layout.is_running else "",
        )
    console.print(table)
