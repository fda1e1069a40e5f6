"""An answer that ends inside a run of tokens that were drafted and accepted together: by a stop string, an end token, a
limit or a grammar. The next turn computes its new tokens and at most 16 more. Closed turns keep their reasoning here,
so that the answer is repeated."""

from __future__ import annotations

from typing import Any

import pytest
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


@pytest.mark.parametrize("end", ENDS)
def test_the_turn_after_an_end_inside_an_accepted_path_computes_its_new_tokens(demo_server: Server, end: str) -> None:
    options, reason = ENDS[end]
    messages = [SYSTEM, {"role": "user", "content": "Hello! What can you do?"}]
    num_accepted = 0
    for attempt in range(4):
        body = {
            "model": "demo",
            "temperature": 0,
            "return_token_ids": True,
            "conversation_id": f"{end} {attempt}",
            "chat_template_kwargs": {"keep_thinking": True},
            **options,
        }
        status, first = demo_server.post("/v1/chat/completions", body | {"messages": messages})
        assert status == 200, first
        (choice,) = first["choices"]
        assert choice["finish_reason"] == reason
        follow = [*messages, choice["message"], {"role": "user", "content": "Mara lives in Oslo."}]
        status, second = demo_server.post("/v1/chat/completions", body | {"messages": follow, "max_tokens": 1})
        assert status == 200, second
        known = [*first["prompt_token_ids"], *choice["token_ids"]][:-1]  # the last was never fed to the model
        common = common_prefix(second["prompt_token_ids"], known)
        assert common > len(first["prompt_token_ids"]) + SLACK_TOKENS  # the answer is repeated
        num_cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert common - num_cached <= SLACK_TOKENS
        details = first["usage"]["completion_tokens_details"]
        num_accepted += details.get("accepted_prediction_tokens", 0)
        assert sum(details.get("accepted_by_depth", ())) == details.get("accepted_prediction_tokens", 0)
    assert num_accepted > 0
