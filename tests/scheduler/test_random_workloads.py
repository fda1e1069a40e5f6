"""Random workloads on small pools: conservation after every step, progress, one Finished each, the right tokens."""

from __future__ import annotations

import random

import pytest
from content_probe import expected_output
from drafting_probe import DraftingProbe
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_builders import VOCAB_SIZE, Bench, make_bench, make_request


class Workload:
    """Conversations that share trunks, on one bench, and what each request must give."""

    def __init__(self, bench: Bench, seed: int, longest: int) -> None:
        self.bench = bench
        self.random = random.Random(seed)
        self.longest = longest
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.histories: list[tuple[str, list[int], int]] = []  # conversation, tokens, end of its trunk
        self.turn_requests: dict[str, int] = {}  # request -> its conversation
        self.max_age = 0

    def submit(self) -> None:
        chance = self.random
        if not self.histories or chance.random() < 0.3:
            trunk = [chance.randrange(3)] * chance.randrange(1, max(self.longest // 3, 2))
            self.histories.append((f"c{len(self.histories)}", trunk, len(trunk)))
        index = chance.randrange(max(len(self.histories) - 8, 0), len(self.histories))
        conversation, history, trunk_end = self.histories[index]
        prompt = history + [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, self.longest // 3 + 2))]
        max_new_tokens = chance.randrange(1, self.longest // 3 + 2)
        request_id = f"r{len(self.prompts)}"
        boundaries = sorted({(trunk_end, "trunk"), (len(prompt) - chance.randrange(0, 3), "turn_start")})
        request = make_request(
            request_id,
            prompt,
            max_new_tokens,
            boundaries=boundaries,  # type: ignore[arg-type]
            conversation_id=conversation if chance.random() < 0.8 else None,
            priority=chance.choice([0, 0, 0, 1]),
            cache_root=chance.choice(["", "", "tenant"]),
            may_be_stopped=chance.random() < 0.5,
        )
        self.prompts[request_id] = (prompt, max_new_tokens)
        self.turn_requests[request_id] = index
        self.bench.scheduler.submit(request)

    def pick(self) -> str | None:
        return self.random.choice(list(self.prompts)) if self.prompts else None

    def end_turns(self) -> None:
        """What the server does after each Finished; half of the histories grow by the answer."""
        finished = self.bench.finished()
        outputs = self.bench.outputs()
        for request_id in [name for name in self.turn_requests if name in finished]:
            index = self.turn_requests.pop(request_id)
            prompt, _ = self.prompts[request_id]
            history = prompt + outputs.get(request_id, [])
            stable = len(history) - self.random.choice([0, 0, 1, 4])
            if self.random.random() < 0.9:
                self.bench.scheduler.end_turn(request_id, max(stable, 0))
            conversation, _, trunk_end = self.histories[index]
            if len(history) < self.longest * 2 // 3:
                self.histories[index] = (conversation, history[: max(stable, 1)], min(trunk_end, max(stable, 1)))

    def check_end(self) -> None:
        bench = self.bench
        bench.run()
        self.end_turns()
        finished = bench.finished()
        assert finished.keys() == self.prompts.keys()
        outputs = bench.outputs()
        for request_id, (prompt, max_new_tokens) in self.prompts.items():
            output = outputs.get(request_id, [])
            assert output == expected_output(prompt, len(output), VOCAB_SIZE), request_id
            end = finished[request_id]
            assert end.reason in ("length", "stop", "abort", "refused", "error")
            assert (end.reason == "length") == (len(output) == max_new_tokens)
            assert end.reason != "error" or end.message == "the probe was told to fail"
            num_tokens = len(prompt) + max_new_tokens
            never_fits = num_tokens > 60 or bench.cache.pages_for(num_tokens - 1) > bench.cache.stats().num_pages
            assert (end.reason == "refused") == never_fits
        bench.cache.check()
        pools = bench.cache.stats()
        assert bench.cache.can_provide(pools.num_pages, pools.num_rows)


KINDS = {
    "hybrid": {"has_pages": True, "has_state": True},
    "attention_only": {"has_pages": True, "has_state": False},
    "attention_free": {"has_pages": False, "has_state": True},
}


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of submits, steps, aborts, stops, ends of turns and failing steps."""

    @initialize(
        kind=st.sampled_from(sorted(KINDS)),
        num_pages=st.integers(8, 30),
        num_rows=st.integers(2, 12),
        max_running=st.integers(1, 5),
        max_step_tokens=st.sampled_from([1, 3, 7, 16, 64]),
        page_size=st.sampled_from([1, 3, 4]),
        seed=st.integers(0, 2**32),
        has_drafts=st.booleans(),
    )
    def start(self, kind: str, num_pages: int, num_rows: int, seed: int, has_drafts: bool, **limits: int) -> None:
        bench = make_bench(
            num_pages=num_pages,
            num_state_rows=num_rows,
            max_model_len=60,
            draft_seed=seed if has_drafts else None,
            **KINDS[kind],
            **limits,
        )
        self.workload = Workload(bench, seed, longest=30)

    @rule(count=st.integers(1, 4))
    def submit(self, count: int) -> None:
        for _ in range(count):
            self.workload.submit()

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.workload.bench.step()
            self.workload.bench.cache.check()
        self.workload.end_turns()

    @rule()
    def abort(self) -> None:
        name = self.workload.pick()
        if name is not None:
            self.workload.bench.scheduler.abort(name)

    @rule()
    def stop(self) -> None:
        name = self.workload.pick()
        if name is not None:
            self.workload.bench.scheduler.stop(name, self.workload.random.choice([None, 0, 2, 6]))

    @rule(index=st.integers(0, 9), root=st.sampled_from(["", "tenant"]))
    def close_conversation(self, index: int, root: str) -> None:
        self.workload.bench.scheduler.close_conversation(root, f"c{index}")

    @rule()
    def fail_next_step(self) -> None:
        self.workload.bench.probe.fail_next = 1

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "workload"):
            self.workload.bench.cache.check()

    def teardown(self) -> None:
        if hasattr(self, "workload"):
            self.workload.bench.probe.fail_next = 0
            self.workload.check_end()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_drafts", [False, True])
def test_bursts_on_a_tiny_pool_finish_in_bounded_time_with_the_right_tokens(
    kind: str, seed: int, has_drafts: bool
) -> None:
    bench = make_bench(
        num_pages=40,
        num_state_rows=10,
        max_running=4,
        max_step_tokens=16,
        max_model_len=60,
        draft_seed=seed if has_drafts else None,
        **KINDS[kind],
    )
    workload = Workload(bench, seed, longest=40)
    chance = random.Random(seed)
    num_steps = 0
    for _ in range(25):
        for _ in range(chance.choice([1, 2, 12])):
            workload.submit()
        for _ in range(chance.randrange(1, 12)):
            bench.step()
            bench.cache.check()
            num_steps += 1
        workload.end_turns()
        name = workload.pick()
        if name is not None and chance.random() < 0.3:
            bench.scheduler.abort(name)
    # Every step computes at least one token of the oldest request, so the work bounds the steps.
    work = sum(len(prompt) + count for prompt, count in workload.prompts.values())
    bench.run(max_steps=work)
    workload.check_end()
    reasons = [finished.reason for finished in bench.finished().values()]
    assert reasons.count("error") == 0
    if isinstance(bench.probe, DraftingProbe):
        assert bench.probe.num_accepted > 100
        assert bench.probe.num_folds > 0 or kind == "attention_only"


def test_many_idle_conversations_never_keep_a_new_request_out() -> None:
    bench = make_bench(num_pages=60, num_state_rows=12, max_running=3)
    for index in range(120):
        name = f"r{index}"
        bench.scheduler.submit(
            make_request(name, 30, 4, salt=index, boundaries=[(29, "turn_start")], conversation_id=f"c{index}")
        )
        bench.run(max_steps=20)
        bench.scheduler.end_turn(name, 1000)
        bench.cache.check()
    assert {finished.reason for finished in bench.finished().values()} == {"length"}
