"""What clients do after a broken stream, and with ids that are wrong, against a whole server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_conversation import Server

LONG = "A letter about lamps, boxes and the house of Anna, which goes on for a while. " * 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("scripted")
    broken = {"match": "break", "answer": "one two three four five", "fault": {"kind": "error", "after_tokens": 2}}
    script = folder / "script.json"
    script.write_text(json.dumps({"rules": [broken]}))
    running = Server(
        "--engine", f"scripted:{script}", "--state-dir", str(folder / "state"), model="demo", log=folder / "log"
    )
    running.wait_until_ready()
    yield running
    assert running.stop() == 0, Path(folder / "log").read_text()[-2000:]


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "messages": [{"role": "user", "content": text}], **fields}


def cached(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def read_stream(server: Server, fields: dict[str, Any]) -> bytes:
    """All that comes of a streamed answer, to its end or to where it breaks."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps({**fields, "stream": True}), headers)
    received = b""
    try:
        received = connection.getresponse().read()
    except http.client.IncompleteRead as error:
        received = error.partial
    finally:
        connection.close()
    return received


@pytest.mark.parametrize("streams_again", [True, False])
def test_a_turn_that_broke_is_sent_again_for_the_price_of_its_last_token(server: Server, streams_again: bool) -> None:
    """API-FLT-2, API-FLT-3. The fault happens once for each rule and engine, so only the first stream breaks."""
    text = f"Please break. {LONG}{streams_again}"
    first = read_stream(server, body(text))
    if b"[DONE]" not in first:
        assert b'"error"' in first
    if streams_again:
        again = read_stream(server, body(text, stream_options={"include_usage": True}))
        assert b"[DONE]" in again
        last = json.loads(again.split(b"data: ")[-2])
    else:
        status, last = server.post("/v1/chat/completions", body(text))
        assert status == 200
    num_cached, num_prompt = cached(last)
    assert num_prompt - num_cached <= 16, (num_cached, num_prompt)


def test_a_wrong_id_costs_time_and_never_a_token(server: Server) -> None:
    """CONV-ID-2: two conversations under one id; the engine itself checks what it reads back from its cache."""
    for text in ("alpha " + LONG, "beta " + LONG, "alpha " + LONG + " more", "beta again", "alpha " + LONG):
        status, answer = server.post("/v1/chat/completions", body(text, conversation_id="shared"))
        assert status == 200
        assert answer["choices"][0]["message"]["content"].strip() == text.strip()
