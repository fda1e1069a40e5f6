"""What a server holds while it works, and what becomes of it when the server is gone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from live_server import live_server, saying

from turnkeep.server.responses import plan, run
from turnkeep.server.stores import SqliteStore, StoredResponse
from turnkeep.server.text_model import TextModel

RESPONSES = "/v1/responses"


async def leave_running(folder: Path, id: str, lease_until_s: float) -> None:
    """A response that another server works on, or worked on when it died."""
    store = SqliteStore(folder)
    await store.open()
    body = {"id": id, "status": "in_progress", "output": [], "error": None}
    stored = StoredResponse(
        id=id, created_s=1.0, status="in_progress", is_background=True, input_items=[], body=body,
        lease_until_s=lease_until_s,
    )  # fmt: skip
    await store.put_response("", stored)
    await store.close()


async def test_a_background_response_of_a_dead_server_has_failed(text_model: TextModel, tmp_path: Path) -> None:
    dead, alive = f"resp_{'1' * 32}", f"resp_{'2' * 32}"
    await leave_running(tmp_path, dead, time.time() - 1)
    await leave_running(tmp_path, alive, time.time() + 60)
    async with live_server(saying(text_model, "x"), text_model=text_model, state_dir=str(tmp_path)) as server:
        status, failed = await server.get(f"{RESPONSES}/{dead}")
        assert (status, failed["status"], failed["error"]["code"]) == (200, "failed", "server_error")
        status, again = await server.post({}, f"{RESPONSES}/{dead}/cancel")
        assert (status, again["status"]) == (200, "failed")
        status, running = await server.get(f"{RESPONSES}/{alive}")
        assert (status, running["status"]) == (200, "in_progress")
        status, cancelled = await server.post({}, f"{RESPONSES}/{alive}/cancel")
        assert (status, cancelled["status"]) == (200, "cancelled")
        body = {"model": "demo", "input": "x", "previous_response_id": alive}
        status, refused = await server.post(body, RESPONSES)
        assert (status, refused["error"]["param"]) == (400, "previous_response_id")


async def test_a_turn_longer_than_its_lease_keeps_its_conversation(
    text_model: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_s = 0.3
    monkeypatch.setattr(plan, "LEASE_S", lease_s)
    monkeypatch.setattr(run, "LEASE_S", lease_s)
    resume = asyncio.Event()
    script = saying(text_model, "a b", pause_after=1, resume=resume)
    async with live_server(script, text_model=text_model) as server:
        conversation = await server.client.conversations.create()
        body: dict[str, Any] = {"model": "demo", "input": "x", "conversation": conversation.id}
        running = asyncio.create_task(server.post(body, RESPONSES))
        await server.until(lambda: server.engine.num_playing == 1)
        await asyncio.sleep(1.5 * lease_s)  # there is nothing to wait for but the time itself
        assert (await server.post(body, RESPONSES))[0] == 409
        resume.set()
        assert (await running)[0] == 200
        assert (await server.post(body, RESPONSES))[0] == 200
