"""What a replay has shown: one table for people, one JSON line for programs, one picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from turnkeep.clients.replay import Replay, ReplayedRequest


class PlotError(Exception):
    """There is no matplotlib to draw with."""


def summary(replayed: Replay) -> dict[str, Any]:
    """Numbers of the run. Times in seconds; the p-values are None where nothing was measured."""
    done = [request for request in replayed.requests if request.error is None]
    follow_ups = [request for request in done if request.turn > 0]
    prompt = sum(request.num_prompt_tokens for request in done)
    cached = sum(request.num_cached_tokens for request in done)
    output = sum(request.num_output_tokens for request in done)
    return {
        "requests": len(replayed.requests),
        "failed": len(replayed.requests) - len(done),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": cached / prompt if prompt else 0.0,
        "output_tokens": output,
        "recomputed_per_follow_up_p50": percentile([request.num_computed_tokens for request in follow_ups], 0.5),
        "recomputed_per_follow_up_p95": percentile([request.num_computed_tokens for request in follow_ups], 0.95),
        "ttft_s_p50": percentile([request.time_to_first_token_s for request in done], 0.5),
        "ttft_s_p95": percentile([request.time_to_first_token_s for request in done], 0.95),
        "wall_s": replayed.wall_s,
        "output_tokens_per_s": output / replayed.wall_s if replayed.wall_s else 0.0,
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile; None without values."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(replayed: Replay) -> Table:
    """The summary, and why requests failed."""
    made = Table(title="Replay", show_header=False)
    for name, value in summary(replayed).items():
        shown = "–" if value is None else f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
        made.add_row(name.replace("_", " "), shown)
    for error, count in Counter(request.error for request in replayed.requests if request.error).most_common(5):
        made.add_row(f"failed {count}×", error[:100])
    return made


def plot(replayed: Replay, path: Path) -> None:
    """Time to first token over computed prompt tokens, and reuse by turn, as a PNG. Raises PlotError, OSError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotError("a plot needs matplotlib: pip install 'turnkeep[plot]'") from None
    done = [request for request in replayed.requests if request.error is None]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.scatter(
        [request.num_computed_tokens for request in done],
        [1000 * request.time_to_first_token_s for request in done],
        s=10,
        alpha=0.6,
    )
    left.set_xlabel("prompt tokens computed")
    left.set_ylabel("time to first token (ms)")
    turns = sorted({request.turn for request in done})
    right.plot(turns, [_share([one for one in done if one.turn == turn]) for turn in turns], marker=".")
    right.set_xlabel("turn")
    right.set_ylabel("prompt tokens reused (%)")
    right.set_ylim(0, 100)
    figure.savefig(path, dpi=120)


def _share(requests: Sequence[ReplayedRequest]) -> float:
    prompt = sum(request.num_prompt_tokens for request in requests)
    return 100.0 * sum(request.num_cached_tokens for request in requests) / prompt if prompt else 0.0
