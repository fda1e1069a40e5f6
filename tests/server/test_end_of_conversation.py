"""A client that says its conversation is over lets its cache go first; one of another tenant it cannot end."""

from __future__ import annotations

import json

import pytest
from live_server import CHAT, LiveServer, live_server, saying, user

from turnkeep.server.conversations import is_last_turn
from turnkeep.server.text_model import TextModel


async def turn(server: LiveServer, headers: dict[str, str], api_key: str = "a", *, stream: bool = False) -> None:
    body = json.dumps({"model": "demo", "messages": user("hi"), "conversation_id": "c1", "stream": stream})
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}", **headers}
    async with server.session.post(server.url + CHAT, data=body, headers=sent) as response:
        assert response.status == 200
        await response.read()


async def test_deleting_the_cache_of_a_conversation_tells_the_engine(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "fine"), text_model=text_model, api_keys=("a", "b")) as server:
        await turn(server, {})
        url = f"{server.url}/v1/conversations/c1/cache"
        for key, statuses in (("b", (404,)), ("a", (200, 404))):
            for status in statuses:
                async with server.session.delete(url, headers={"Authorization": f"Bearer {key}"}) as response:
                    assert response.status == status
        assert server.engine.closed_conversations == ["c1"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_turn_closes_its_conversation_after_it(text_model: TextModel, stream: bool) -> None:
    async with live_server(saying(text_model, "fine"), text_model=text_model, api_keys=("a",)) as server:
        await turn(server, {})
        assert server.engine.closed_conversations == []
        await turn(server, {"X-Dynamo-Session-Final": "true"}, stream=stream)
        assert server.engine.closed_conversations == ["c1"]
        assert len(server.engine.ended_turns) == 2


@pytest.mark.parametrize(
    ("headers", "is_last"),
    [
        ({}, False), ({"X-Conversation-Final": "1"}, True), ({"x_conversation_final": "TRUE"}, True),
        ({"x-dynamo-session-final": "false"}, False), ({"x-dynamo-session-final": ""}, False),
    ],
)  # fmt: skip
def test_only_a_clear_yes_ends_a_conversation(headers: dict[str, str], is_last: bool) -> None:
    assert is_last_turn(headers) is is_last
