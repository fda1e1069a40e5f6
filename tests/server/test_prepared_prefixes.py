"""Where the next prompt will not repeat an answer, the engine is told how it begins; otherwise it is told nothing."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import live_server, saying, user

from turnkeep.server.text_model import TextModel

REASONED = "<think>This and that.</think>Fine."
CALLING = '<think>I look.</think><tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"x": {}}}}}]


async def test_the_prepared_prefix_is_how_the_next_prompt_begins(text_model: TextModel) -> None:
    async with live_server(saying(text_model, REASONED), text_model=text_model, api_keys=("a",)) as server:
        headers = {"Authorization": "Bearer a"}
        messages = user("Hello!")
        _, answer = await server.post({"model": "demo", "messages": messages, "conversation_id": "c"}, headers=headers)
        (prepared,) = server.engine.prepared
        assert prepared.conversation_id == "c"
        messages = [*messages, answer["choices"][0]["message"], *user("And now?")]
        await server.post({"model": "demo", "messages": messages, "conversation_id": "c"}, headers=headers)
        following = server.engine.submitted[-1]
        assert prepared.cache_root == following.cache_root != ""
        assert following.prompt_ids[: len(prepared.prompt_ids)] == list(prepared.prompt_ids)
        assert following.prompt_ids[len(prepared.prompt_ids) :] == text_model.tokenizer.encode(
            "And now?<|end|><|assistant|>"
        )


@pytest.mark.parametrize(
    ("says", "fields", "messages", "num_prepared"),
    [
        ("Fine.", {"conversation_id": "c"}, user("Hello!"), 0),  # the answer is repeated as it is
        (CALLING, {"conversation_id": "c", "tools": TOOLS}, user("Hello!"), 0),  # so is a call, in its turn
        (REASONED, {}, user("Hello!"), 0),  # a single question
        (REASONED, {}, [*user("A"), {"role": "assistant", "content": "B"}, *user("C")], 1),
        (REASONED, {"conversation_id": "c", "n": 2}, user("Hello!"), 0),  # which one goes on is not known
    ],
)
async def test_only_what_is_lost_and_will_be_asked_for_is_prepared(
    text_model: TextModel, says: str, fields: dict[str, Any], messages: list[dict[str, Any]], num_prepared: int
) -> None:
    async with live_server(saying(text_model, says), text_model=text_model) as server:
        status, _ = await server.post({"model": "demo", "messages": messages, **fields})
        assert status == 200
        assert len(server.engine.prepared) == num_prepared


async def test_a_conversation_that_ends_prepares_nothing(text_model: TextModel) -> None:
    async with live_server(saying(text_model, REASONED), text_model=text_model) as server:
        body = {"model": "demo", "messages": user("Hello!"), "conversation_id": "c"}
        await server.post(body, headers={"X-Conversation-Final": "1"})
        assert server.engine.prepared == []
