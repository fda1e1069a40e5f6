"""Cache policies on recorded conversations: the real cache manager, a fake clock, no tensors.

    python -m benchmarks.cache_policies [--traces DIR] [--reference CSV] [--plot PNG]

Prints a table, one JSON line per cell (trace, rendering, model, memory, policy) and what the whole grid took. Without a
folder of convtrace/1 files a small synthetic trace is generated. --reference: hit rates of published policies and of an
offline reference (columns trace, render, model, gb, policy, hit_rate), to print how much more is recomputed.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.cache_replay import MODELS, POLICIES, Replay
from benchmarks.convtrace import TraceRequest, load_trace, trace_kind, write_synthetic_trace
from rich.console import Console
from rich.progress import track
from rich.table import Table

CAPACITIES_GB: dict[str, tuple[float, ...]] = {
    "claude_code": (16, 32, 64, 128),
    "mooncake_conversation": (16, 64, 256),
    "mtbench101": (0.5, 1, 2),
    "swe_agent_demos": (0.5, 1, 2, 4),
    "tau_airline": (1, 2, 4, 8, 16),
}
DEFAULT_CAPACITIES_GB = (0.5, 1, 2)
AMPLE_GB = 0.0  # no limit
PAGE_SIZES = {"text": 16, "hash": 64}
OFFLINE = ("belady", "probe")  # rows of the reference that know the future, or stand in where that is worse
NOT_PUBLISHED = (*OFFLINE, "oracle", "kv-only", "recommended", "none")


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay. gb 0: no limit."""

    path: str
    render: str
    model: str
    gb: float
    policy: str

    @property
    def trace(self) -> str:
        return Path(self.path).stem

    @property
    def replay(self) -> Cell:
        """The cell whose replay is this one's too: without snapshots only the bytes of keys and values matter."""
        if self.policy not in ("kv_only", "oracle"):
            return self
        kv_bytes = MODELS[self.model].kv_bytes
        model = next(name for name, sizes in MODELS.items() if sizes.kv_bytes == kv_bytes)
        return replace(self, model=model if self.gb else next(iter(MODELS)), policy="kv_only" if self.gb else "oracle")


@cache
def _requests(path: str, render: str) -> list[TraceRequest]:
    """Loaded before the workers are forked, so that they have them already; where they are not, each loads its own."""
    return load_trace(Path(path), render)


def _num_tokens(cell: Cell) -> int:
    return sum(request.num_prompt_tokens + request.num_output_tokens for request in _requests(cell.path, cell.render))


def _start_worker() -> None:
    gc.disable()  # a replay leaves no cycles before its end, and looking for them costs as much as the replay


def run_cell(cell: Cell) -> dict[str, Any]:
    """Runs in a worker process."""
    gc.collect()  # the replay before
    start_s = time.process_time()
    requests = _requests(cell.path, cell.render)
    num_tokens = _num_tokens(cell)
    memory_bytes = int(cell.gb * 1e9) if cell.gb else None
    page_size = PAGE_SIZES[trace_kind(Path(cell.path))]
    replay = Replay(cell.policy, MODELS[cell.model], memory_bytes, page_size, min(num_tokens, 1 << 26))
    outcome = replay.run(requests)
    described = {name: value for name, value in asdict(cell).items() if name != "path"}
    cpu_s = round(time.process_time() - start_s, 2)
    return {"trace": cell.trace, **described, "page_size": page_size, **outcome.summary(), "cpu_s": cpu_s}


def run_grid(cells: Sequence[Cell], num_workers: int | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """One row a cell, and one a replay: some cells share theirs."""
    replays = sorted({cell.replay for cell in cells}, key=lambda cell: (-_num_tokens(cell), cell.gb or math.inf))
    gc.freeze()
    with ProcessPoolExecutor(num_workers, initializer=_start_worker) as pool:
        waiting = {pool.submit(run_cell, replay): replay for replay in replays}
        progress = track(as_completed(waiting), total=len(replays), console=Console(stderr=True))
        found = {waiting[done]: done.result() for done in progress}
    rows = [found[cell.replay] | {"model": cell.model, "policy": cell.policy} for cell in cells]
    return rows, list(found.values())


def cells_of(paths: Iterable[Path], models: Sequence[str], policies: Sequence[str], gbs: Sequence[float]) -> list[Cell]:
    """The grid."""
    cells = []
    for path in paths:
        renders = ("exact", "think") if trace_kind(path) == "text" else ("exact",)
        capacities = gbs or (*CAPACITIES_GB.get(path.stem, DEFAULT_CAPACITIES_GB), AMPLE_GB)
        for render in renders:
            cells.append(Cell(str(path), render, models[0], AMPLE_GB, "oracle"))
            cells += [
                Cell(str(path), render, model, gb, policy)
                for model in models
                for gb in capacities
                for policy in policies
                if policy != "oracle"
            ]
    return cells


class Reference:
    """Hit rates measured elsewhere, by cell."""

    def __init__(self, path: Path) -> None:
        self._rates: dict[tuple[str, str, str, float], dict[str, float]] = {}
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                key = (row["trace"], row["render"], row["model"], float(row["gb"]))
                self._rates.setdefault(key, {})[row["policy"]] = float(row["hit_rate"])

    def compare(self, row: dict[str, Any]) -> dict[str, Any]:
        """The best published hit rate, the offline one, and tokens recomputed over the offline reference."""
        rates = self._rates.get((row["trace"], row["render"], row["model"], row["gb"]), {})
        published = [rate for policy, rate in rates.items() if policy not in NOT_PUBLISHED]
        offline = [rates[policy] for policy in OFFLINE if policy in rates]
        if not published or not offline:
            return {}
        best, reference = max(published), max(offline)
        ratio = (1 - row["hit_rate"]) / max(1 - reference, 1e-9)
        is_contended = best < reference - 0.01
        return {"best_published": best, "offline": reference, "over_offline": ratio, "is_contended": is_contended}


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    columns = {
        "trace": "trace", "render": "render", "model": "model", "gb": "GB", "policy": "policy", "hit_rate": "hit %",
        "later_p50": "P50", "later_p95": "P95", "gb_written": "GB written", "snapshots_per_hit": "per hit",
        "never_used": "never %", "best_published": "published %", "over_offline": "x offline",
    }  # fmt: skip
    table = Table(*columns.values(), title="Follow-up turns recompute P50 / P95 tokens; GB 0 is no limit")
    for row in rows:
        table.add_row(*(_text(name, row.get(name)) for name in columns))
    console.print(table)


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in ("hit_rate", "never_used", "best_published"):
        return f"{100 * value:.1f}"
    return f"{value:.2f}" if isinstance(value, float) and name != "gb" else f"{value:g}" if name == "gb" else str(value)


def summaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per model and policy, contended cells: mean (geometric) and maximum of tokens recomputed over offline."""
    found = []
    for model, policy in sorted({(row["model"], row["policy"]) for row in rows}):
        cells = [row for row in rows if row["model"] == model and row["policy"] == policy and row.get("is_contended")]
        if cells:
            ratios = [row["over_offline"] for row in cells]
            found.append(
                {
                    "model": model,
                    "policy": policy,
                    "contended_cells": len(cells),
                    "geometric_mean": math.exp(sum(map(math.log, ratios)) / len(ratios)),
                    "max": max(ratios),
                    "above_best_published": sum(row["hit_rate"] > row["best_published"] for row in cells),
                }
            )
    return found


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Hit rate over memory, one panel per trace and rendering of the first model. Needs the extra `plot`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    model = rows[0]["model"]
    panels = sorted({(row["trace"], row["render"]) for row in rows})
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.5), squeeze=False)
    for axis, (trace, render) in zip(axes[0], panels, strict=True):
        for policy in POLICIES:
            points = sorted(
                (row["gb"], 100 * row["hit_rate"])
                for row in rows
                if (row["trace"], row["render"], row["model"], row["policy"]) == (trace, render, model, policy)
                and row["gb"]
            )
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=policy)
        axis.set(title=f"{trace} ({render})", xlabel="GB", ylabel="token hit rate %", xscale="log")
    axes[0][0].legend()
    figure.suptitle(model)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder of convtrace/1 files (or TURNKEEP_TRACES); else synthetic")
    parser.add_argument("--only", nargs="*", help="names of traces")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--policies", nargs="*", choices=POLICIES, default=["density", "lru", "flop_per_byte", "kv_only"]
    )
    parser.add_argument("--gb", type=float, nargs="*", default=[], help="instead of each trace's own capacities")
    parser.add_argument("--reference", type=Path, help="CSV of hit rates to compare with")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="write the JSON lines here too")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    options = parser.parse_args()
    console = Console(width=170)
    folder = options.traces or (Path(os.environ["TURNKEEP_TRACES"]) if "TURNKEEP_TRACES" in os.environ else None)
    with tempfile.TemporaryDirectory() as scratch:
        if folder is None:
            folder = Path(scratch)
            write_synthetic_trace(folder / "synthetic.jsonl")
        paths = [path for path in sorted(folder.glob("*.jsonl")) if not options.only or path.stem in options.only]
        cells = cells_of(paths, options.models, options.policies, options.gb)
        start_s = time.monotonic()
        rows, replays = run_grid(cells, options.workers)
        wall_s = time.monotonic() - start_s
    rows.sort(key=lambda row: (row["model"], row["trace"], row["render"], row["gb"] or math.inf, row["policy"]))
    if options.reference is not None:
        reference = Reference(options.reference)
        rows = [row | reference.compare(row) for row in rows]
    print_table(rows, console)
    about = {"date": datetime.now(UTC).date().isoformat(), "python": platform.python_version(), "seed": 0}
    lines = [json.dumps(about | item) for item in [*rows, *summaries(rows)]]
    print("\n".join(lines))
    if options.json is not None:
        options.json.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(rows, options.plot)
    cpu_s = sum(replay["cpu_s"] for replay in replays)
    workers = f"{options.workers} workers, {cpu_s:.0f} s of processor time"
    console.print(f"{len(rows)} cells, {len(replays)} replays: {wall_s:.0f} s with {workers}")


if __name__ == "__main__":
    main()
