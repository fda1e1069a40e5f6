"""The written list of routes and fields is that of the server."""

from __future__ import annotations

from pathlib import Path

from live_server import live_server, saying

from turnkeep.server.api_reference import api_reference
from turnkeep.server.text_model import TextModel

WRITTEN = Path(__file__).resolve().parents[2] / "docs" / "api-fields.md"


async def test_the_list_of_routes_and_fields_is_true(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "Hi."), text_model=text_model) as server:
        _, document = await server.get("/openapi.json")
    written = WRITTEN.read_text(encoding="utf-8")
    assert written == api_reference(document), "write it again, as turnkeep.server.api_reference says"
    for name in ("prompt_cache_key", "cache_salt", "previous_response_id", "tool_choice"):
        assert f"| `{name}`" in written
