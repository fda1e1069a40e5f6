"""The metrics: readable by Prometheus, right, and monotonic when the engine is replaced."""

from __future__ import annotations

from live_server import live_server, saying
from prometheus_client.parser import text_string_to_metric_families

from turnkeep.engine.messages import Finished, Stats
from turnkeep.server.metrics import CONTENT_TYPE, EngineTotals, ServerMetrics
from turnkeep.server.text_model import TextModel
from turnkeep.server.turn_events import ChoiceEnded


def stats(num_steps: int, **counters: float) -> Stats:
    return Stats(
        num_steps=num_steps,
        num_running=1,
        num_waiting=2,
        num_suspended=3,
        num_free_pages=4,
        num_free_rows=5,
        gauges={"cache_num_pages": 9.0},
        counters=counters,
    )


def samples(metrics: ServerMetrics) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if not sample.labels
    }


def test_the_engines_numbers_appear_under_their_names() -> None:
    metrics = ServerMetrics()
    metrics.engine.update(stats(7, cache_num_evicted_pages=3.0, cache_created_snapshots_turn_end=2.0))
    found = samples(metrics)
    assert found["turnkeep_requests_running"] == 1
    assert found["turnkeep_requests_waiting"] == 2
    assert found["turnkeep_requests_suspended"] == 3
    assert found["turnkeep_free_pages"] == 4
    assert found["turnkeep_free_state_rows"] == 5
    assert found["turnkeep_engine_steps_total"] == 7
    assert found["turnkeep_engine_cache_evicted_pages_total"] == 3
    assert found["turnkeep_engine_cache_created_snapshots_turn_end_total"] == 2
    assert found["turnkeep_engine_cache_pages"] == 9


def test_counters_go_on_when_a_new_engine_starts_at_zero() -> None:
    totals = EngineTotals()
    totals.update(stats(10, hits=5.0, misses=1.0))
    totals.engine_restarted()
    assert totals.totals() == {"num_steps": 10.0, "hits": 5.0, "misses": 1.0}
    totals.update(stats(2, hits=1.0))
    assert totals.totals() == {"num_steps": 12.0, "hits": 6.0, "misses": 1.0}
    # A restart that nobody announced shows in a number that went down.
    totals.update(stats(1, hits=1.0))
    assert totals.totals() == {"num_steps": 13.0, "hits": 7.0, "misses": 1.0}


def test_gauges_of_a_dead_engine_are_not_shown_as_if_it_lived() -> None:
    metrics = ServerMetrics()
    metrics.engine.update(stats(7))
    metrics.engine.engine_restarted()
    assert samples(metrics)["turnkeep_requests_running"] == 0


def test_the_prompt_of_several_choices_is_counted_once() -> None:
    metrics = ServerMetrics()
    for index in range(3):
        finished = Finished(request_id=str(index), reason="stop", queue_s=0.5)
        metrics.count_finished(finished, ChoiceEnded(index, "stop", 100, 60, 7, 2))
    metrics.count_finished(Finished(request_id="x", reason="abort"), None)
    found = samples(metrics)
    assert found["turnkeep_prompt_tokens_total"] == 100
    assert found["turnkeep_cached_tokens_total"] == 60
    assert found["turnkeep_generated_tokens_total"] == 21
    assert found["turnkeep_queue_time_seconds_count"] == 3


async def test_a_scrape_tells_what_was_served_refused_and_broken_off(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi there"), text_model=text_model) as server:
        for _ in range(3):
            await server.chat()
        await server.chat(max_tokens=1)
        await server.chat(temperature=9)
        await server.chat("word " * 5000)
        async with server.session.head(f"{server.url}/metrics") as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == CONTENT_TYPE
        assert await server.metric('turnkeep_requests_finished_total{reason="stop"}') == 3
        assert await server.metric('turnkeep_requests_finished_total{reason="length"}') == 1
        assert await server.metric('turnkeep_http_errors_total{status="400"}') == 2
        assert await server.metric('turnkeep_requests_refused_total{reason="context"}') == 1
        assert await server.metric("turnkeep_time_to_first_token_seconds_count") == 4
        assert await server.metric("turnkeep_request_duration_seconds_count") == 4
        assert await server.metric("turnkeep_engine_up") == 1
        assert await server.metric("turnkeep_engine_steps_total") == 4


async def test_engine_counters_stay_monotonic_over_a_death(text_model: TextModel) -> None:
    name = "turnkeep_engine_snapshots_created_total"
    async with live_server(saying(text_model, "Hi"), text_model=text_model) as server:
        server.engine.counters["snapshots_created"] = 5.0
        assert await server.metric(name) == 5
        server.engine.die()
        await server.until(lambda: len(server.engines) == 2 and server.supervisor.is_ready)
        assert await server.metric(name) == 5
        server.engine.counters["snapshots_created"] = 2.0
        assert await server.metric(name) == 7
