"""The order desk over the Responses API: as a chain, a conversation and a chat it says the same at the same cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from served_conversation import Server

from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.order_desk import SYSTEM_PROMPT, TOOLS, OrderDesk

# What a snapshot may lie short of the best possible position: the end token, and a merged token at a seam.
SLACK_TOKENS = 16
MAX_REQUESTS_A_TURN = 6
NUM_TURNS = 5

FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]

Respond = Callable[[list[dict[str, Any]]], dict[str, Any]]  # new items -> the response


def run_order_desk(respond: Respond, seed: int) -> list[list[dict[str, Any]]]:
    """The responses of each turn, with real tool functions."""
    script = conversation(seed, NUM_TURNS)
    desk = OrderDesk(script.seed)
    turns = []
    for turn in script.turns:
        items: list[dict[str, Any]] = [{"role": "user", "content": turn.user}]
        responses = []
        for _ in range(MAX_REQUESTS_A_TURN):
            responses.append(respond(items))
            calls = [item for item in responses[-1]["output"] if item["type"] == "function_call"]
            items = [
                {
                    "type": "function_call_output",
                    "call_id": call["call_id"],
                    "output": desk.call_json(call["name"], call["arguments"]),
                }
                for call in calls
            ]
            if not calls:
                break
        turns.append(responses)
    return turns


def make_respond(server: Server, **how: Any) -> Respond:
    """how: `conversation`, or nothing for a chain of responses."""
    previous: dict[str, Any] = {}

    def respond(items: list[dict[str, Any]]) -> dict[str, Any]:
        body = {"model": "demo", "input": items, "instructions": SYSTEM_PROMPT, "tools": FUNCTIONS, "temperature": 0}
        status, response = server.post("/v1/responses", {**body, "max_output_tokens": 96, **how, **previous})
        assert status == 200, response
        if not how:
            previous["previous_response_id"] = response["id"]
        return response

    return respond


def make_chat(server: Server) -> Respond:
    """The same by chat completions; the answer is brought into the form of a response."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}]

    def respond(items: list[dict[str, Any]]) -> dict[str, Any]:
        for item in items:
            is_result = item.get("type") == "function_call_output"
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(result if is_result else item)
        body = {"model": "demo", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 96}
        status, answer = server.post("/v1/chat/completions", {**body, "conversation_id": "as-a-chat"})
        assert status == 200, answer
        message = answer["choices"][0]["message"]
        messages.append(message)
        output = [{"type": "message", "content": [{"text": message["content"]}]}] if message["content"] else []
        output += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls") or ()
        ]
        usage = {"input_tokens": answer["usage"]["prompt_tokens"]}
        return {"output": output, "usage": usage}

    return respond


def said(turns: list[list[dict[str, Any]]]) -> list[Any]:
    """Texts, calls and prompt lengths, without ids."""
    return [
        (
            response["usage"]["input_tokens"],
            [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"],
            [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"],
        )
        for turn in turns
        for response in turn
    ]


def assert_only_new_tokens_were_computed(turns: list[list[dict[str, Any]]]) -> None:
    turn_start: dict[str, Any] | None = None
    for turn in turns:
        for index, response in enumerate(turn):
            usage = response["usage"]
            cached = usage["input_tokens_details"]["cached_tokens"]
            if index > 0:  # a tool result continues from the end of the answer
                before = turn[index - 1]["usage"]
                assert cached >= before["input_tokens"] + before["output_tokens"] - SLACK_TOKENS, usage
            elif turn_start is not None:  # at least from where the turn before began
                assert cached >= turn_start["input_tokens"] - SLACK_TOKENS, usage
        turn_start = turn[0]["usage"]


def test_chain_conversation_and_chat_say_the_same_and_recompute_only_new_tokens(demo_server: Server) -> None:
    chain = run_order_desk(make_respond(demo_server), seed=21)
    status, made = demo_server.post("/v1/conversations", {})
    assert status == 200
    as_conversation = run_order_desk(make_respond(demo_server, conversation=made["id"]), seed=21)
    as_chat = run_order_desk(make_chat(demo_server), seed=21)
    assert any(len(turn) > 1 for turn in chain), "the conversation should have tool loops"
    assert said(chain) == said(as_conversation) == said(as_chat)
    assert_only_new_tokens_were_computed(chain)
    assert_only_new_tokens_were_computed(as_conversation)
