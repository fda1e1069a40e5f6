"""A template that drops the reasoning of a tool loop costs the next turn nothing when the engine was idle meanwhile."""

from __future__ import annotations

import time

from live_server import make_text_model
from served_conversation import ConversationDriver, Server

from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, TOOLS, OrderDesk

SLACK_TOKENS = 16
IDLE_S = 1.0
PREPARED = "turnkeep_engine_preparations_finished_total"


def wait_for_preparation(server: Server, num_before: float, timeout_s: float = 20.0) -> None:
    """At least a second of an idle engine, as between the turns of a person; more where the machine is busy."""
    idle_until = time.monotonic() + IDLE_S
    deadline = time.monotonic() + timeout_s
    while server.metrics().get(PREPARED, 0.0) <= num_before or time.monotonic() < idle_until:
        assert time.monotonic() < deadline, "nothing was prepared"
        time.sleep(0.1)


def num_new_tokens(driver: ConversationDriver, user_token: int) -> int:
    """Of the newest prompt, from its last user message on."""
    prompt = driver.computed[-1][: driver.reuse[-1].num_prompt_tokens]
    return len(prompt) - max(place for place, token in enumerate(prompt) if token == user_token)


def test_the_turn_after_a_tool_loop_costs_its_new_message(demo_server: Server) -> None:
    driver = ConversationDriver(demo_server, "prepared", {"tools": TOOLS, "max_tokens": 96})
    driver.messages.append({"role": "system", "content": SYSTEM_PROMPT})
    script = conversation(12, 8)
    desk = OrderDesk(script.seed)
    (user_token,) = make_text_model().tokenizer.encode("<|user|>")
    num_checked = 0
    was_loop = False
    for turn in script.turns:
        driver.messages.append({"role": "user", "content": turn.user})
        num_prepared = demo_server.metrics().get(PREPARED, 0.0)
        calls = driver.request().get("tool_calls") or []
        if was_loop:
            reuse = driver.reuse[-1]
            num_new = num_new_tokens(driver, user_token)
            assert reuse.num_recomputed_tokens <= num_new + SLACK_TOKENS, f"{turn.user!r}: {reuse}, {num_new} new"
            assert reuse.common_prefix_tokens < reuse.num_cached_tokens, "the template should have dropped something"
            num_checked += 1
        was_loop = bool(calls)
        for _ in range(5):
            if not calls:
                break
            for call in calls:
                result = desk.call_json(call["function"]["name"], call["function"]["arguments"])
                driver.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            num_prepared = demo_server.metrics().get(PREPARED, 0.0)
            calls = driver.request().get("tool_calls") or []
        if was_loop:
            wait_for_preparation(demo_server, num_prepared)
    assert num_checked >= 2, "the script should have user messages after tool loops"
    metrics = demo_server.metrics()
    num_used = metrics["turnkeep_engine_cache_used_prepared_tokens_total"]
    assert 0 < num_used <= metrics["turnkeep_engine_preparations_tokens_total"]
