"""Requests that break before a handler sees them: told early, told right, and not taken for faults of the server."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator

import pytest
from live_server import CHAT, LiveServer, live_server, saying, user

from turnkeep.server import http_connection
from turnkeep.server.text_model import TextModel

BODY = json.dumps({"model": "demo", "messages": user("hi")}).encode()
HEAD = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


@pytest.fixture
async def server(text_model: TextModel) -> AsyncIterator[LiveServer]:
    async with live_server(saying(text_model, "fine"), text_model=text_model, max_body_bytes=4096) as live:
        yield live


async def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_sent(server: LiveServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(5):
        writer.write(HEAD + b"Content-Length: 1000000000\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 413")
    assert b"Connection: close" in head


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/v1/completions", "/tokenize"])
async def test_a_body_that_turns_out_too_large_is_413_in_pieces_and_compressed(server: LiveServer, path: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 2000

    for data, encoding in ((pieces(), {}), (gzip.compress(b" " * 100_000), {"Content-Encoding": "gzip"})):
        headers = {"Content-Type": "application/json", **encoding}
        async with server.session.post(server.url + path, data=data, headers=headers) as response:
            assert response.status == 413
            assert "error" in await response.json()


async def test_a_body_that_cannot_be_decoded_is_no_fault_of_the_server(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    for data in (b"no gzip", gzip.compress(BODY)[:12], b"\x1f\x8b\x08\x00" + b"x" * 50):
        async with server.session.post(server.url + CHAT, data=data, headers=headers) as response:
            assert response.status == 400
    assert (await server.chat())[0] == 200
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize("sent", [b"", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_a_head_that_does_not_come_to_its_end_is_given_up(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """SEC-SLOW-1: also for the second request of a connection."""
    monkeypatch.setattr(http_connection, "MAX_HEAD_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(5):
        if sent:
            writer.write(sent)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
        received = await reader.read()
    writer.close()
    assert b"HTTP/1.1" not in received
    assert (await server.chat())[0] == 200


async def test_a_slow_body_and_an_idle_connection_are_not_taken_for_a_slow_head(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "MAX_HEAD_S", 0.02)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(5):
        for _ in range(2):
            await asyncio.sleep(0.05)  # longer than a head may take
            writer.write(HEAD + f"Content-Length: {len(BODY)}\r\n\r\n".encode())
            for start in range(0, len(BODY), 20):
                writer.write(BODY[start : start + 20])
                await asyncio.sleep(0.02)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            num_bytes = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(num_bytes)
    writer.close()


@pytest.mark.parametrize("text", [r"\ud800", r"a\udfffb", r"\ud83d\u0041", r"\ude00\ud83d"])
async def test_half_a_surrogate_pair_is_named_as_what_it_is(server: LiveServer, text: str) -> None:
    """SEC-JSON-2."""
    body = BODY.replace(b'"hi"', f'"{text}"'.encode())
    status, answer = await server.post(body)
    assert status == 400
    assert "half a surrogate pair" in answer["error"]["message"]
    assert (await server.post(BODY.replace(b'"hi"', rb'"\ud83d\ude00 \\ud800"')))[0] == 200


async def test_ids_that_cannot_be_used_are_counted(server: LiveServer) -> None:
    """CONV-ID-7: the request is served without them, and somebody can see it."""
    for unusable in ("a/b", "x" * 300, "a\nb"):
        assert (await server.chat(conversation_id=unusable))[0] == 200
    assert (await server.chat(conversation_id="a-b"))[0] == 200
    assert await server.metric('turnkeep_conversations_total{event="unusable_ids"}') == 3
    assert await server.metric('turnkeep_conversations_total{event="source:conversation_id"}') == 1
