"""What the server counts and measures, for Prometheus: one table of names and units, and where each number comes from.

Counters of the engine go on over its restarts: a new engine process starts at zero, the exported numbers do not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from turnkeep.engine.messages import Finished, Stats
from turnkeep.server.conversations import TurnRecord
from turnkeep.server.latency_histogram import LatencyHistogram
from turnkeep.server.turn_events import ChoiceEnded

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# (last, name): late turns must hit as early ones do.
_TURNS = ((1, "1"), (2, "2"), (5, "3-5"), (10, "6-10"), (20, "11-20"), (math.inf, "21-"))
_TOKEN_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

# The engine's fixed gauges: exported name -> (field of Stats, meaning).
ENGINE_GAUGES = {
    "turnkeep_requests_running": ("num_running", "Requests that run in the engine."),
    "turnkeep_requests_waiting": ("num_waiting", "Requests that wait for admission in the engine."),
    "turnkeep_requests_suspended": ("num_suspended", "Requests that gave their memory up and wait to go on."),
    "turnkeep_free_pages": ("num_free_pages", "Attention pages that hold nothing."),
    "turnkeep_free_state_rows": ("num_free_rows", "Recurrent state rows that hold nothing."),
}

_NOT_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


class EngineTotals:
    """The engine's counters summed over its restarts."""

    def __init__(self) -> None:
        self.latest: Stats | None = None
        self._finished: dict[str, float] = {}  # of the engines that are gone
        self._running: dict[str, float] = {}  # of the engine that runs

    def update(self, stats: Stats) -> None:
        """Take a heartbeat. A number that went down means that a new engine counts from zero."""
        counters = {"num_steps": float(stats.num_steps), **stats.counters}
        if any(value < self._running.get(name, 0.0) for name, value in counters.items()):
            self.engine_restarted()
        self._running = counters
        self.latest = stats

    def engine_restarted(self) -> None:
        for name, value in self._running.items():
            self._finished[name] = self._finished.get(name, 0.0) + value
        self._running = {}
        self.latest = None

    def totals(self) -> dict[str, float]:
        names = sorted(self._finished.keys() | self._running.keys())
        return {name: self._finished.get(name, 0.0) + self._running.get(name, 0.0) for name in names}


class _CountsCollector(Collector):
    """Reads the counts of a part of the server when Prometheus asks."""

    def __init__(self, name: str, meaning: str, label: str, read: Callable[[], Mapping[str, int]]) -> None:
        self._name, self._meaning, self._label, self._read = name, meaning, label, read

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._meaning, labels=[self._label])
        for label, count in sorted(self._read().items()):
            family.add_metric([label], count)
        yield family

    def describe(self) -> Iterable[Metric]:
        return ()


class _EngineCollector(Collector):
    """Reads the last heartbeat when Prometheus asks; names that the engine adds appear by themselves."""

    def __init__(self, totals: EngineTotals) -> None:
        self._totals = totals

    def collect(self) -> Iterator[Metric]:
        stats = self._totals.latest
        for name, (field, meaning) in ENGINE_GAUGES.items():
            yield GaugeMetricFamily(name, meaning, value=0.0 if stats is None else float(getattr(stats, field)))
        for name, value in (stats.gauges if stats is not None else {}).items():
            yield GaugeMetricFamily(_engine_name(name), f"Engine gauge {name}.", value=value)
        for name, value in self._totals.totals().items():
            yield CounterMetricFamily(_engine_name(name), f"Engine counter {name}, over restarts.", value=value)

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not need an engine


def _engine_name(name: str) -> str:
    """`num_` says nothing in a metric: cache_num_hits becomes turnkeep_engine_cache_hits(_total)."""
    return f"turnkeep_engine_{_NOT_A_NAME.sub('_', name.replace('num_', ''))}"


class ServerMetrics:
    """The numbers of one server. Every instance has its own registry."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.engine = EngineTotals()
        registry.register(_EngineCollector(self.engine))

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"turnkeep_{name}", meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, bounds: tuple[float, ...]) -> LatencyHistogram:
            made = LatencyHistogram(f"turnkeep_{name}", meaning, bounds)
            registry.register(made)
            return made

        self.engine_up = Gauge("turnkeep_engine_up", "1 while the engine can serve.", registry=registry)
        self.engine_restarts = counter("engine_restarts", "Engine processes started after one died.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that were reused and not computed.")
        self.lost_tokens = counter(
            "lost_tokens", "Tokens of conversations computed before and not reused, by why.", "reason"
        )
        self.turn_prompt_tokens = counter("turn_prompt_tokens", "Prompt tokens by number of the turn.", "turn")
        self.turn_cached_tokens = counter("turn_cached_tokens", "Of those, reused.", "turn")
        self.generated_tokens = counter("generated_tokens", "Tokens generated by finished requests.")
        self.finished = counter("requests_finished", "Engine requests by how they ended.", "reason")
        self.refused = counter("requests_refused", "Requests turned away, by what was short.", "reason")
        self.aborted = counter("requests_aborted", "Requests given up because the client went away.")
        self.slow_readers = counter("slow_readers", "Streams given up because the client did not take them.")
        self.errors = counter("http_errors", "Answers other than success, by HTTP status.", "status")
        self.time_to_first_token_s = histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", _LATENCY_S
        )
        self.inter_token_s = histogram(
            "inter_token_latency_seconds", "Between two deliveries of tokens of one request.", _TOKEN_GAP_S
        )
        self.request_s = histogram("request_duration_seconds", "From arrival to the end of the answer.", _LATENCY_S)
        self.queue_s = histogram("queue_time_seconds", "Waiting for admission in the engine.", _LATENCY_S)

    def register_counts(self, name: str, meaning: str, label: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Export what a part of the server counts by itself: one metric, a label for each count."""
        self.registry.register(_CountsCollector(f"turnkeep_{name}", meaning, label, read))

    def count_turn(self, number: int, record: TurnRecord) -> None:
        """The number-th turn of a conversation ended."""
        turn = next(name for last, name in _TURNS if number <= last)
        self.turn_prompt_tokens.labels(turn).inc(record.num_prompt_tokens)
        self.turn_cached_tokens.labels(turn).inc(record.num_cached_tokens)
        if record.num_lost_template:
            self.lost_tokens.labels("template").inc(record.num_lost_template)
        for reason, num_tokens in record.lost_tokens.items():
            self.lost_tokens.labels(reason).inc(num_tokens)

    def count_finished(self, finished: Finished, ended: ChoiceEnded | None) -> None:
        """One engine request ended; with an answer, the numbers are the ones that its usage shows."""
        self.finished.labels(finished.reason).inc()
        if ended is None:
            return
        if ended.index == 0:  # the choices of a turn share one prompt
            self.prompt_tokens.inc(ended.num_prompt_tokens)
            self.cached_tokens.inc(ended.num_cached_tokens)
        self.generated_tokens.inc(ended.num_output_tokens)
        self.queue_s.observe(finished.queue_s)

    def render(self) -> bytes:
        return generate_latest(self.registry)
