"""The server is killed in mid-stream and started again: the SDK's conversation goes on, with no text twice."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from served_conversation import Server

from turnkeep.clients.client import Turnkeep
from turnkeep.clients.retry import RetryPolicy
from turnkeep.clients.turn import TextDelta, TurnRestarted

QUICK = RetryPolicy(max_retries=2, outage_s=60.0, initial_delay_s=0.1, max_delay_s=0.5)
FACT, QUESTION = "Mara lives in Oslo.", "Where does Mara live?"


@pytest.mark.parametrize("transport", ["websocket", "responses", "chat"])
def test_a_conversation_survives_the_server(tmp_path: Path, transport: str) -> None:
    options = ("--state-dir", str(tmp_path))
    server = Server(*options)
    restarted: list[Server] = []
    try:
        server.wait_until_ready()
        with Turnkeep(base_url=f"{server.url}/v1", api_key="none") as client:
            conversation = client.conversation(transport=transport, retries=QUICK)
            expected = conversation.fork().send(FACT)
            conversation.send(FACT)
            text = ""
            with conversation.stream(QUESTION) as events:
                for event in events:
                    assert not isinstance(event, TurnRestarted)
                    if not text:
                        server.process.kill()
                        server.process.wait()
                        starter = threading.Thread(target=lambda: restarted.append(Server(*options, port=server.port)))
                        starter.start()
                    text += event.text if isinstance(event, TextDelta) else "" if text else " "
                    text = text.lstrip() or " "
                starter.join()
            assert events.final.stats.num_attempts >= 2
            assert events.final.text == text.strip() == conversation.messages[-1]["content"]
            assert "Oslo" in text
            assert conversation.num_turns == 2
            assert conversation.messages[1]["content"] == expected.text
            assert conversation.send(QUESTION).text == events.final.text
            conversation.close()
    finally:
        for one in (server, *restarted):
            one.stop()
