"""Clients that go away: whatever they had asked for is freed, at any moment of the request."""

from __future__ import annotations

import json
import random
import socket
import time

from served_conversation import Server

NUM_CYCLES = 1000
LONG_PROMPT = "Mara lives in Oslo. " * 40


def request_bytes(port: int, *, stream: bool, prompt: str) -> bytes:
    body = json.dumps(
        {
            "model": "demo",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": stream,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def idle_state(server: Server) -> tuple[float, float, float, float]:
    """running, waiting, and the pages and rows that a request holds (neither free nor kept only for reuse)."""
    metrics = server.metrics()
    held = {
        pool: metrics[f"turnkeep_engine_cache_{pool}"]
        - metrics[f"turnkeep_engine_cache_free_{pool}"]
        - metrics[f"turnkeep_engine_cache_evictable_{pool}"]
        for pool in ("pages", "rows")
    }
    return (
        metrics["turnkeep_requests_running"] + metrics["turnkeep_requests_suspended"],
        metrics["turnkeep_requests_waiting"],
        held["pages"],
        held["rows"],
    )


def wait_until_idle(server: Server, timeout_s: float = 30.0) -> tuple[float, float, float, float]:
    deadline = time.monotonic() + timeout_s
    while (state := idle_state(server)) != (0, 0, 0, 0) and time.monotonic() < deadline:
        time.sleep(0.2)
    return state


def test_a_thousand_disconnects_leave_nothing_behind(demo_server: Server) -> None:
    generator = random.Random(5)
    aborted_before = demo_server.metrics()["turnkeep_requests_aborted_total"]
    for cycle in range(NUM_CYCLES):
        stream = cycle % 2 == 0
        prompt = LONG_PROMPT if cycle % 5 == 0 else f"Where does Mara live? {cycle}"
        with socket.create_connection(("127.0.0.1", demo_server.port), timeout=30) as connection:
            connection.sendall(request_bytes(demo_server.port, stream=stream, prompt=prompt))
            kind = generator.random()
            if kind < 0.5 and stream:
                connection.recv(256)  # the answer has begun: the engine is at work on it
            elif kind < 0.7:
                time.sleep(generator.random() * 0.004)
            if kind > 0.8:
                # RST instead of FIN
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert wait_until_idle(demo_server) == (0, 0, 0, 0)
    # A quarter of the clients left an answer that had begun; only a few of those may have been complete.
    assert demo_server.metrics()["turnkeep_requests_aborted_total"] - aborted_before > NUM_CYCLES / 5
    status, answer = demo_server.post(
        "/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}
    )
    assert status == 200, answer
