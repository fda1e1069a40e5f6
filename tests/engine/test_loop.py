"""The loop: messages in, events out, failing steps, shutdown. The runner is a probe, nothing imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from content_probe import expected_output
from scheduler_builders import VOCAB_SIZE, Bench, make_bench, make_request

from turnkeep.cache.boundary import Boundary
from turnkeep.engine.loop import MAX_FAILED_STEPS, EngineFailure, EngineLoop
from turnkeep.engine.messages import (
    Abort,
    Admitted,
    CloseConversation,
    EndTurn,
    Finished,
    FromEngine,
    ReadStats,
    Shutdown,
    Stats,
    Stop,
    Submit,
    Tokens,
)
from turnkeep.scheduler.request import SamplingParams
from turnkeep.scheduler.step_plan import StepOutput, StepPlan


class LoopOnProbe:
    """An engine loop over a content probe."""

    def __init__(self, **settings: int) -> None:
        self.bench: Bench = make_bench(**settings)
        self.events: list[FromEngine] = []
        self.loop = EngineLoop(self.bench.scheduler, self.bench.probe, self.events.append, self.bench.clock)

    def run(self) -> None:
        while self.loop.has_work:
            self.loop.step()

    def of(self, request_id: str) -> list[FromEngine]:
        return [event for event in self.events if getattr(event, "request_id", None) == request_id]


def submit(request_id: str, num_tokens: int = 10, max_new_tokens: int = 3, *, salt: int = 0) -> Submit:
    return Submit(
        request_id=request_id,
        prompt_ids=make_request("x", num_tokens, salt=salt).token_ids,
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        boundaries=(Boundary(num_tokens, "turn_start"),),
        conversation_id="c",
    )


def test_a_request_is_admitted_gives_its_tokens_and_finishes_in_this_order() -> None:
    engine = LoopOnProbe()
    message = submit("r")
    engine.loop.receive(message)
    engine.run()
    expected = expected_output(message.prompt_ids, 3, VOCAB_SIZE)
    assert engine.of("r") == [
        Admitted("r", 0, 0),
        *(Tokens("r", [token]) for token in expected),
        Finished(
            request_id="r",
            reason="length",
            num_prompt_tokens=10,
            num_output_tokens=3,
            queue_s=0.0,
        ),
    ]
    assert engine.loop.step() is False


def test_messages_reach_the_scheduler() -> None:
    engine = LoopOnProbe()
    for name in ("aborted", "stopped"):
        engine.loop.receive(submit(name, max_new_tokens=100, salt=len(name)))
    engine.loop.step()
    engine.loop.receive(Abort("aborted"))
    engine.loop.receive(Stop("stopped"))
    engine.loop.receive(EndTurn("stopped", 1000))
    engine.loop.receive(CloseConversation("", "c"))
    reasons = {event.request_id: event.reason for event in engine.events if isinstance(event, Finished)}
    assert reasons == {"aborted": "abort", "stopped": "stop"}
    assert not engine.loop.has_work


def test_a_refused_request_says_why() -> None:
    engine = LoopOnProbe()
    engine.loop.receive(submit("r", 10, 10_000))
    (event,) = engine.of("r")
    assert isinstance(event, Finished)
    assert event.reason == "refused"
    assert event.message is not None
    assert "10010" in event.message


def test_a_second_submit_of_an_open_id_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    engine = LoopOnProbe()
    engine.loop.receive(submit("r"))
    engine.loop.receive(submit("r", 5))
    engine.run()
    assert sum(isinstance(event, Finished) for event in engine.events) == 1
    assert "'r' is still open" in caplog.text


def test_stats_come_on_request_and_about_every_second() -> None:
    engine = LoopOnProbe()
    engine.loop.receive(ReadStats())
    (answer,) = engine.events
    assert isinstance(answer, Stats)
    assert answer.requested
    assert answer.num_free_pages == 64
    assert answer.gauges["cache_num_free_rows"] == 32
    assert answer.gauges["max_running"] == 8
    assert answer.counters["num_steps"] == 0
    engine.loop.receive(submit("r", max_new_tokens=20))
    for _ in range(10):
        engine.bench.clock.now_s += 0.25
        engine.loop.step()
    stats = [event for event in engine.events if isinstance(event, Stats) and not event.requested]
    assert len(stats) == 3
    assert stats[-1].num_running == 1
    assert stats[-1].counters["num_generated_tokens"] > 0


def test_counters_never_go_down() -> None:
    engine = LoopOnProbe()
    before = engine.loop.stats().counters
    for index in range(4):
        engine.loop.receive(submit(f"r{index}", salt=index))
        engine.loop.step()
        engine.loop.receive(Abort(f"r{index}"))
        after = engine.loop.stats().counters
        assert all(after[name] >= value for name, value in before.items())
        before = after


def test_one_failing_step_ends_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    engine = LoopOnProbe(max_step_tokens=10)
    engine.loop.receive(submit("first"))
    engine.loop.receive(submit("second", salt=3))
    engine.bench.probe.fail_next = 1
    engine.run()
    failed, done = engine.of("first")[-1], engine.of("second")[-1]
    assert isinstance(failed, Finished)
    assert failed.reason == "error"
    assert failed.message == "the step failed: RuntimeError: the probe was told to fail"
    assert isinstance(done, Finished)
    assert done.reason == "length"
    assert "a step of 1 requests failed" in caplog.text


def test_steps_that_keep_failing_end_the_engine_and_every_request() -> None:
    engine = LoopOnProbe(max_step_tokens=10, max_running=2)
    for index in range(8):
        engine.loop.receive(submit(f"r{index}", salt=index))
    engine.bench.probe.fail_next = 100
    with pytest.raises(EngineFailure, match="3 steps in a row"):
        engine.run()
    finished = [event for event in engine.events if isinstance(event, Finished)]
    assert len(finished) == 8
    assert {event.reason for event in finished} == {"error"}
    assert engine.bench.probe.fail_next == 100 - MAX_FAILED_STEPS


def test_failures_with_successes_between_do_not_end_the_engine() -> None:
    engine = LoopOnProbe()
    for index in range(2 * MAX_FAILED_STEPS):
        engine.loop.receive(submit(f"bad{index}", salt=index))
        engine.bench.probe.fail_next = 1
        engine.loop.step()
        engine.loop.receive(submit(f"good{index}", salt=index))
        engine.run()
    engine.bench.cache.check()


def test_shutdown_ends_what_runs_and_what_waits() -> None:
    engine = LoopOnProbe(max_running=1)
    for index in range(3):
        engine.loop.receive(submit(f"r{index}", salt=index))
    engine.loop.step()
    engine.loop.receive(Shutdown())
    assert engine.loop.is_shut_down
    assert not engine.loop.has_work
    finished = [event for event in engine.events if isinstance(event, Finished)]
    assert [event.reason for event in finished] == ["abort"] * 3
    engine.bench.cache.check()


class RunnerWithoutLogits:
    """Gives no token for one request, as when the model's logits are not finite."""

    def __init__(self, run: Callable[[StepPlan], StepOutput], request_id: str) -> None:
        self._run = run
        self._request_id = request_id

    def run(self, plan: StepPlan) -> StepOutput:
        output = self._run(plan)
        tokens = dict(output.tokens)
        errors = {self._request_id: "no finite logits"} if tokens.pop(self._request_id, None) else {}
        return StepOutput(tokens=tokens, duration_s=math.inf, errors=errors)


def test_a_request_without_logits_ends_alone() -> None:
    bench = make_bench()
    events: list[FromEngine] = []
    loop = EngineLoop(bench.scheduler, RunnerWithoutLogits(bench.probe.run, "bad"), events.append, bench.clock)
    for name in ("good", "bad"):
        loop.receive(submit(name, salt=len(name)))
    while loop.has_work:
        loop.step()
    found = {event.request_id: (event.reason, event.message) for event in events if isinstance(event, Finished)}
    assert found == {"good": ("length", None), "bad": ("error", "no finite logits")}
    bench.cache.check()
