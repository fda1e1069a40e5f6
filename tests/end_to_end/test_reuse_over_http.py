"""A returning turn costs its new tokens and nothing else: measured over HTTP, request by request."""

from __future__ import annotations

from served_conversation import ConversationDriver, Server

from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, TOOLS, OrderDesk

# What a snapshot may lie short of the best possible position: the end token, and a merged token at a seam.
SLACK_TOKENS = 16
MAX_REQUESTS_A_TURN = 6


def run_order_desk(server: Server, *, seed: int, num_turns: int, conversation_id: str | None) -> ConversationDriver:
    """The agent with real tool functions; a wrong answer of the model does not matter here, a lost prefix does."""
    script = conversation(seed, num_turns)
    desk = OrderDesk(script.seed)
    driver = ConversationDriver(server, conversation_id, {"tools": TOOLS, "max_tokens": 96})
    driver.messages.append({"role": "system", "content": SYSTEM_PROMPT})
    for turn in script.turns:
        driver.messages.append({"role": "user", "content": turn.user})
        for _ in range(MAX_REQUESTS_A_TURN):
            calls = driver.request().get("tool_calls") or []
            for call in calls:
                result = desk.call_json(call["function"]["name"], call["function"]["arguments"])
                driver.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls:
                break
    return driver


def assert_only_new_tokens_were_computed(driver: ConversationDriver) -> None:
    for index, reuse in enumerate(driver.reuse[1:], start=1):
        assert reuse.num_excess_tokens <= SLACK_TOKENS, f"request {index}: {reuse}"


def test_order_desk_agent_of_20_turns_recomputes_only_new_tokens(demo_server: Server) -> None:
    driver = run_order_desk(demo_server, seed=11, num_turns=20, conversation_id="order-desk-reuse")
    assert len(driver.reuse) >= 25, "the conversation should have tool loops"
    assert_only_new_tokens_were_computed(driver)
    prompt = sum(reuse.num_prompt_tokens for reuse in driver.reuse[1:])
    cached = sum(reuse.num_cached_tokens for reuse in driver.reuse[1:])
    assert cached / prompt > 0.9


def test_a_new_user_message_after_a_tool_loop_resumes_at_the_turn_start(demo_server: Server) -> None:
    driver = run_order_desk(demo_server, seed=12, num_turns=6, conversation_id="after-tool-loop")
    roles = [message["role"] for message in driver.messages]
    followed_a_loop = [
        index
        for index, message in enumerate(driver.messages)
        if message["role"] == "user" and index > 3 and roles[index - 2] == "tool"
    ]
    assert followed_a_loop, "the script should have a user message after a tool loop"
    assert_only_new_tokens_were_computed(driver)


def test_reuse_needs_no_conversation_id(demo_server: Server) -> None:
    driver = run_order_desk(demo_server, seed=13, num_turns=6, conversation_id=None)
    assert_only_new_tokens_were_computed(driver)


def test_a_new_conversation_reuses_the_trunk(demo_server: Server) -> None:
    run_order_desk(demo_server, seed=14, num_turns=1, conversation_id="trunk-first")
    second = run_order_desk(demo_server, seed=15, num_turns=1, conversation_id="trunk-second")
    trunk_and_tools = second.reuse[0].num_cached_tokens
    assert trunk_and_tools >= 50
    assert second.reuse[0].num_prompt_tokens - trunk_and_tools <= 64


def test_cache_report_says_what_each_turn_reused(demo_server: Server) -> None:
    driver = run_order_desk(demo_server, seed=16, num_turns=3, conversation_id="report")
    status, body = demo_server.get("/v1/conversations/report/cache")
    assert status == 200
    for reuse in driver.reuse:
        assert str(reuse.num_prompt_tokens) in body
    assert demo_server.get("/v1/conversations/never-seen/cache")[0] == 404


def test_smollm2_recomputes_only_the_new_message(smollm2_server: Server) -> None:
    driver = ConversationDriver(smollm2_server, "english", {"model": "smollm2", "max_tokens": 12})
    questions = [
        "Hello, who are you?",
        "Name three colors.",
        "Which of them is the color of the sky?",
        "And what is 2 + 2?",
        "Thank you. Tell me a fact about the moon.",
        "Is it   far away?\n\nAnswer in one word.",
    ]
    for question in questions:
        driver.messages.append({"role": "user", "content": question})
        message = driver.request()
        assert message["content"].strip()
    assert_only_new_tokens_were_computed(driver)
    # Append-only template: all that is computed again is the end of the last answer and the new message.
    for reuse in driver.reuse[1:]:
        assert reuse.num_recomputed_tokens <= SLACK_TOKENS + 32
