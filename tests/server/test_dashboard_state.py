"""The state behind /ui: what it shows, and to whom."""

from __future__ import annotations

import re
from pathlib import Path

from live_server import live_server, saying

from turnkeep.server.dashboard import endpoint
from turnkeep.server.http_guard import DASHBOARD_PATHS
from turnkeep.server.text_model import TextModel


async def test_the_state_tells_of_engine_and_conversations(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi."), text_model=text_model) as server:
        for name in ("older", "newer"):
            await server.chat(conversation_id=name)
        status, state = await server.get("/ui/state")
        assert status == 200
        assert [one["conversation_id"] for one in state["conversations"]] == ["newer", "older"]
        assert state["conversations"][0]["turns"][0]["output_tokens"] > 0
        assert state["engine"]["state"] == "ready"
        assert state["engine"]["num_running"] == 0
        assert "by decision of a test" in state["engine"]["limiting_resource"]


async def test_a_tenant_sees_its_own_conversations_only(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi."), text_model=text_model, api_keys=("a", "b")) as server:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "conversation_id": "mine"}
        await server.post(body, headers={"Authorization": "Bearer a"})
        for key, names in (("a", ["mine"]), ("b", [])):
            _, state = await server.get("/ui/state", headers={"Authorization": f"Bearer {key}"})
            assert [one["conversation_id"] for one in state["conversations"]] == names
        assert (await server.get("/ui/state"))[0] == 401


async def test_the_page_needs_no_key_and_loads_nothing_from_elsewhere(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi."), text_model=text_model, api_keys=("a",)) as server:
        for path in DASHBOARD_PATHS:
            async with server.session.get(server.url + path) as response:
                assert response.status == 200
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                text = await response.text()
            assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", text) == []
            assert "innerHTML" not in text


def test_every_part_of_the_page_is_open_and_exists() -> None:
    assert set(endpoint.PARTS) | {"/ui/"} == set(DASHBOARD_PATHS)
    assert {name for name, _ in endpoint.PARTS.values()} == {
        path.name for path in Path(endpoint.FOLDER).iterdir() if path.suffix in (".html", ".css", ".js")
    }
