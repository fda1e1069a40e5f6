"""An answer that ends inside a run of tokens that were drafted and accepted together: by a stop string, an end token, a
limit or a grammar. The next turn computes its new tokens and at most 16 more. Closed turns keep their reasoning here,
so that the answer is repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from served_conversation import Server, common_prefix

SYSTEM = {"role": "system", "content": "You are the agent of an order desk."}
SLACK_TOKENS = 16
SCHEMA = {
    "type": "object",
    "properties": {"orders": {"type": "array", "items": {"enum": ["B47", "C12"]}, "minItems": 6, "maxItems": 6}},
    "required": ["orders"],
    "additionalProperties": False,
}
ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "stop string": ({"stop": [" prices", " stock"]}, "stop"),
    "stop string in a word": ({"stop": ["memb"]}, "stop"),
    "end token": ({}, "stop"),
    "limit": ({"max_tokens": 21}, "length"),
    "grammar": ({"response_format": {"type": "json_schema", "json_schema": {"name": "o", "schema": SCHEMA}}}, "stop"),
}


@dataclass
class Ended:
    """A turn that ended, and what the one after it had to compute."""

    reason: str
    num_accepted_tokens: int
    num_repeated_tokens: int  # of the answer
    num_computed_again: int


def two_turns(server: Server, conversation_id: str, options: dict[str, Any]) -> Ended:
    messages = [SYSTEM, {"role": "user", "content": "Hello! What can you do?"}]
    body = {
        "model": "demo",
        "temperature": 0,
        "return_token_ids": True,
        "conversation_id": conversation_id,
        "chat_template_kwargs": {"keep_thinking": True},
        **options,
    }
    status, first = server.post("/v1/chat/completions", body | {"messages": messages})
    assert status == 200, first
    (choice,) = first["choices"]
    follow = [*messages, choice["message"], {"role": "user", "content": "Mara lives in Oslo."}]
    status, second = server.post("/v1/chat/completions", body | {"messages": follow, "max_tokens": 1})
    assert status == 200, second
    known = [*first["prompt_token_ids"], *choice["token_ids"]][:-1]  # the last was never fed to the model
    common = common_prefix(second["prompt_token_ids"], known)
    details = first["usage"]["completion_tokens_details"]
    num_accepted = details.get("accepted_prediction_tokens", 0)
    assert sum(details.get("accepted_by_depth", ())) == num_accepted
    return Ended(
        choice["finish_reason"],
        num_accepted,
        common - len(first["prompt_token_ids"]),
        common - second["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


def test_the_turn_after_an_end_inside_an_accepted_path_computes_its_new_tokens(demo_server: Server) -> None:
    num_accepted = 0
    for end, (options, reason) in ENDS.items():
        for attempt in range(3):
            ended = two_turns(demo_server, f"{end} {attempt}", options)
            assert ended.reason == reason, end
            assert ended.num_repeated_tokens > SLACK_TOKENS, end
            assert ended.num_computed_again <= SLACK_TOKENS, end
            num_accepted += ended.num_accepted_tokens
    assert num_accepted > 0


def test_every_api_counts_the_drafts_of_its_answer_as_the_engine_does(demo_server: Server) -> None:
    question = [{"role": "user", "content": "Hello! What can you do?"}]
    same = {"model": "demo", "temperature": 0}
    num_accepted = 0
    for path, body in {
        "/v1/chat/completions": {"messages": [SYSTEM, *question]},
        "/v1/responses": {"instructions": SYSTEM["content"], "input": question, "store": False},
        "/v1/messages": {"system": SYSTEM["content"], "messages": question, "max_tokens": 200},
    }.items():
        before = accepted_by_depth(demo_server)
        told: list[int] = [0] * len(before)
        for _ in range(3):  # how much is drafted is decided by what steps cost and gave before
            status, answer = demo_server.post(path, same | body)
            assert status == 200, answer
            usage = answer["usage"]
            details = usage.get("completion_tokens_details") or usage.get("output_tokens_details")
            for depth, number in enumerate(details.get("accepted_by_depth", ())):
                told[depth] += number
        counted = accepted_by_depth(demo_server)
        assert told == [now - then for now, then in zip(counted, before, strict=True)], path
        num_accepted += sum(told)
    assert num_accepted > 0


def accepted_by_depth(server: Server) -> list[int]:
    values = server.metrics()
    names = [f"turnkeep_engine_draft_accepted_nodes_{depth}_total" for depth in range(1, 8)]
    return [int(values.get(name, 0)) for name in names]
