"""Whole conversations as agents hold them: tool loops, stripped reasoning, edits, side calls, crowds."""

from __future__ import annotations

import random

import pytest
from cache_driver import MODEL_KINDS, CacheDriver, ModelKind

STATEFUL: tuple[ModelKind, ...] = ("hybrid", "attention_free")
TRUNK = [900 + token_id for token_id in range(37)]


class Agent:
    """A conversation whose template strips what the agent thought and did as soon as the user speaks again.

    history: what every later prompt repeats. Inside a tool loop prompts repeat everything.
    """

    def __init__(self, driver: CacheDriver, conversation_id: str | None, seed: int) -> None:
        self.driver = driver
        self.conversation_id = conversation_id
        self.generator = random.Random(seed)
        self.history = list(TRUNK)
        self.recomputed: list[int] = []
        self.lost: list[int] = []

    def tokens(self, low: int, high: int) -> list[int]:
        return [self.generator.randrange(800) for _ in range(self.generator.randrange(low, high))]

    def user_turn(self, num_tool_calls: int) -> None:
        """A user message, so many tool calls with reasoning, and a final answer. Only the answer's text stays."""
        self.history += self.tokens(5, 30)
        turn_start = len(self.history)
        prompt = [*self.history, 1, 2]  # generation prompt
        for _ in range(num_tool_calls):
            known = self.request(prompt, turn_start, is_final=False)
            prompt = [*known, *self.tokens(3, 20)]
        self.request(prompt, turn_start, is_final=True)
        self.history += self.tokens(4, 12)  # the final answer without its reasoning

    def request(self, prompt: list[int], turn_start: int, *, is_final: bool) -> list[int]:
        answer = self.tokens(3, 15)
        run = self.driver.turn(
            prompt,
            answer,
            self.conversation_id,
            trunk=len(TRUNK),
            turn_start=turn_start,
            stable_tokens=turn_start if is_final else len(prompt) + len(answer),
        )
        self.recomputed.append(len(prompt) - run.num_reused)
        return run.token_ids


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("conversation_id", ["agent", None])
@pytest.mark.parametrize("page_size", [4, 16])
def test_every_turn_of_a_tool_loop_costs_its_new_tokens(
    kind: ModelKind, conversation_id: str | None, page_size: int
) -> None:
    driver = CacheDriver(kind, page_size=page_size, num_pages=400, num_rows=8)
    agent = Agent(driver, conversation_id, seed=3)
    user_turns = random.Random(4)
    for _ in range(20):
        before = len(agent.history)
        num_tool_calls = user_turns.randrange(4)
        first = len(agent.recomputed)
        agent.user_turn(num_tool_calls)
        if before > len(TRUNK):
            # Right after a loop: the last answer (kept text), the user message, the generation prompt.
            assert agent.recomputed[first] <= 12 + 30 + 2
        # Inside the loop: the last sampled token and the tool's result.
        assert all(number <= 21 for number in agent.recomputed[first + 1 :])
    stats = driver.cache.stats()
    assert stats.num_branches == 1
    assert stats.counters.evicted_snapshots.total() > 0  # eight rows do not hold everything
    assert not driver.snapshot_positions("turn_end", superseded=False)
    assert len(driver.snapshot_positions("turn_start", superseded=False)) == 1


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_where_prompts_only_grow_every_turn_resumes_at_the_end_of_the_last(kind: ModelKind) -> None:
    driver = CacheDriver(kind, num_pages=200, num_rows=6)
    known = list(TRUNK)
    for number in range(20):
        prompt = [*known, *range(10, 15 + number)]
        run = driver.turn(prompt, [1, 2, 3, 4], "c", trunk=len(TRUNK), turn_start=len(prompt) - 1)
        if number:
            assert run.num_reused == len(known) - 1  # the last sampled token was never computed
        known = run.token_ids


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_retry_of_an_answer_recomputes_nothing_of_the_question(kind: ModelKind) -> None:
    driver = CacheDriver(kind)
    prompt = [*TRUNK, *range(20)]
    driver.turn([*prompt, 1], [5, 6, 7], "c", trunk=len(TRUNK), turn_start=len(prompt))
    for answer in ([8, 9], [10], [11, 12, 13]):
        assert driver.turn([*prompt, 1], answer, "c", turn_start=len(prompt)).num_reused == len(prompt)


@pytest.mark.parametrize("kind", STATEFUL)
def test_an_edit_of_an_old_message_falls_back_to_the_trunk_and_spares_the_old_line(kind: ModelKind) -> None:
    driver = CacheDriver(kind, num_pages=200)
    agent = Agent(driver, "c", seed=9)
    for _ in range(3):
        agent.user_turn(1)
    main = list(agent.history)
    edited = [*TRUNK, 801, 802, 803]
    run = driver.turn([*edited, 1], [5, 6], "c", trunk=len(TRUNK), turn_start=len(edited))
    assert run.num_reused == len(TRUNK)
    assert driver.turn([*edited, 1, 5, 6, 7], [8], "c").num_reused == len(edited) + 2
    match = driver.match([*main, 3])
    assert match.num_tokens >= len(main) - 12
    assert match.snapshot is not None
    assert not match.snapshot.is_superseded


def test_side_calls_with_the_same_trunk_do_not_evict_the_line_of_work() -> None:
    driver = CacheDriver(num_pages=120, num_rows=8)
    agent = Agent(driver, "c", seed=1)
    agent.user_turn(2)
    agent.user_turn(2)
    for number in range(30):
        title = [*TRUNK, 810, number, number + 1]
        driver.turn([*title, 1], [5, 6, 7], "c", trunk=len(TRUNK), turn_start=len(title))
    first = len(agent.recomputed)
    agent.user_turn(2)
    assert agent.recomputed[first] <= 12 + 30 + 2
    assert max(agent.recomputed[first + 1 :]) <= 21
    assert driver.match([*TRUNK, 3]).num_tokens == len(TRUNK)


def test_superseded_snapshots_go_before_any_conversation_is_hurt() -> None:
    driver = CacheDriver(num_pages=400, num_rows=12)
    agents = [Agent(driver, f"c{number}", seed=number) for number in range(4)]
    for _ in range(6):
        for agent in agents:
            agent.user_turn(2)
    for agent in agents:
        match = driver.match([*agent.history, 3])
        assert match.num_tokens >= len(agent.history) - 12


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_a_crowd_of_conversations_in_a_pool_for_few_leaks_nothing(kind: ModelKind) -> None:
    driver = CacheDriver(kind, num_pages=150, num_rows=12, checks=False)
    agents = [Agent(driver, f"c{number}" if number % 3 else None, seed=number) for number in range(40)]
    order = random.Random(7)
    for number in range(160):
        order.choice(agents).user_turn(order.randrange(3))
        if number % 20 == 0:
            driver.cache.check()
    for number in range(40):
        driver.cache.close_conversation("", f"c{number}")
    driver.cache.check()
    driver.assert_empty()


@pytest.mark.parametrize("kind", STATEFUL)
def test_sub_agents_fork_from_their_parent_and_never_evict_it(kind: ModelKind) -> None:
    driver = CacheDriver(kind, num_pages=200, num_rows=14)
    parent = driver.turn([*TRUNK, *range(20)], [1, 2], "parent", trunk=len(TRUNK), turn_start=len(TRUNK) + 19)
    known = parent.token_ids
    children = [driver.open([*known, 700 + number], f"child{number}") for number in range(4)]
    for child in children:
        assert child is not None
        assert child.num_reused == len(known) - 1
        driver.settle(driver.finish_turn(child, [3, 4]), 1000)
    assert driver.turn([*known, 5], [6], "parent").num_reused == len(known) - 1
    driver.check()


def test_hit_and_cold_reuse_add_up_in_the_statistics() -> None:
    driver = CacheDriver(num_pages=300)
    agent = Agent(driver, "c", seed=2)
    for _ in range(5):
        agent.user_turn(2)
    counters = driver.cache.stats().counters
    assert counters.num_prompt_tokens - counters.num_reused_tokens == sum(agent.recomputed)
    assert counters.num_hits == counters.num_opens - 1
    values = driver.cache.stats().counter_values()
    assert values["num_reused_tokens"] == counters.num_reused_tokens
    assert values["created_snapshots.turn_start"] == 5
    assert values["dropped_snapshots.turn_end"] == 5
    assert driver.cache.stats().gauge_values()["num_snapshots.trunk"] == 1
