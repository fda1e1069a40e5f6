"""What an outsider may try, one test a row of the security requirements that has no home in another file.

Refusals of bad values are in test_app_refusals.py, deaths and drains in test_app_disconnects.py, limits of keys in
test_tenant_limits.py, the sandbox in test_chat_template.py, generated requests in test_fuzz.py.
"""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_server import CHAT, LiveServer, live_server, saying, user
from scripted_engine import Script

from turnkeep.engine.config import EngineConfig
from turnkeep.engine.handle import EngineHandle, InProcessEngine
from turnkeep.engine.messages import Loading
from turnkeep.server import request_body
from turnkeep.server.config import ServerConfig
from turnkeep.server.http_guard import OPEN_PATHS
from turnkeep.server.serve import RunningServer, running_server
from turnkeep.server.text_model import TextModel

ROOT = Path(__file__).resolve().parents[2]
KEYS = ("correct-key-one", "correct-key-two")


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


@pytest.fixture
async def server(text_model: TextModel) -> AsyncIterator[LiveServer]:
    async with live_server(saying(text_model, "fine"), text_model=text_model) as live:
        yield live


@pytest.fixture
async def locked(text_model: TextModel) -> AsyncIterator[LiveServer]:
    async with live_server(saying(text_model, "fine"), text_model=text_model, api_keys=KEYS) as live:
        yield live


async def raw(port: int, data: bytes, *, until: bytes = b"\r\n\r\n", limit_s: float = 5.0) -> bytes:
    """What the server answers to bytes, up to a mark or to its end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        async with asyncio.timeout(limit_s):
            writer.write(data)
            while until not in received and (piece := await reader.read(65536)):
                received += piece
    finally:
        writer.close()
    return received


def post_head(num_bytes: int, path: str = CHAT) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {num_bytes}"]
    return "\r\n".join([*lines, "", ""]).encode()


def routes(live: LiveServer) -> list[tuple[str, str]]:
    """(method, path) of everything that the application answers, with values in the places of variables."""
    runner = live.runner
    assert runner is not None
    found = []
    for route in runner.app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        while "{" in path:
            path = path[: path.index("{")] + "x" + path[path.index("}") + 1 :]
        found.append((route.method, path))
    return found


async def test_every_route_but_the_probes_needs_a_key(locked: LiveServer) -> None:
    checked = 0
    for method, path in routes(locked):
        async with locked.session.request(method if method != "*" else "GET", locked.url + path) as response:
            assert (response.status == 401) == (path not in OPEN_PATHS), (method, path, response.status)
            checked += 1
    assert checked > 15


@pytest.mark.parametrize(
    "path",
    [
        "//v1/models", "/v1//models", "/v1/models/", "/%761/models", "/v1/./models", "/health/../v1/models",
        "/v1/models?x=/health", "/health/", "/health%2f", "/HEALTH", "/nothing", "/ready;x", "/v1/models%00",
    ],
)  # fmt: skip
async def test_no_way_of_writing_a_path_gets_around_the_key(locked: LiveServer, path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nX-HTTP-Method-Override: OPTIONS\r\nConnection: close\r\n\r\n"
    status = (await raw(locked.port, head.encode())).split(b" ", 2)[1]
    assert status in (b"401", b"400")


async def test_a_websocket_needs_a_key(locked: LiveServer) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await locked.session.ws_connect(locked.url + "/v1/responses")
    assert caught.value.status == 401


@pytest.mark.parametrize(
    "header", ["x" * 8000, "Bearer", "Bearer ", "Basic eDp5", "Bearer correct-key-on", "Bearer correct-key-one1", "é"]
)
async def test_a_wrong_key_is_401_however_it_looks(locked: LiveServer, header: str) -> None:
    assert (await locked.get("/v1/models", {"Authorization": header}))[0] == 401


async def test_any_of_several_keys_opens_in_any_spelling_of_the_scheme(locked: LiveServer) -> None:
    for headers in (key(KEYS[0]), {"authorization": f"bEARER {KEYS[1]}"}, {"x-api-key": KEYS[1]}):
        assert (await locked.get("/v1/models", headers))[0] == 200


async def test_keys_are_in_no_log_and_no_metric(locked: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for name in (*KEYS, "wrong-key-three"):
        await locked.post({"model": "demo", "messages": user("hi")}, headers=key(name))
    _, metrics = await locked.get("/metrics", key(KEYS[0]))
    for text in (caplog.text, metrics):
        assert "correct-key" not in text
        assert "wrong-key" not in text


def test_there_are_no_administrative_routes() -> None:
    source = (ROOT / "server" / "app.py").read_text()
    assert not [
        word for word in ("reset", "sleep", "profile", "weights", "abort", "debug", "shutdown") if f"/{word}" in source
    ]


def test_nothing_of_ours_reads_data_as_code() -> None:
    forbidden = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
    found = []
    for room in ("cache", "clients", "engine", "kernels", "models", "scheduler", "server"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    names = [node.func.id] if node.func.id in ("eval", "exec") else []
                wrong = [name for name in names if name.split(".")[0] in forbidden | {"eval", "exec"}]
                found += [f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {name}" for name in wrong]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": user("hi"), "chat_template": "{{ 7*7 }}"}),
        (CHAT, {"messages": user("hi"), "chat_template_kwargs": {"chat_template": "{{ 7*7 }}"}}),
        (CHAT + "/render", {"messages": user("hi"), "chat_template": "{{ 7*7 }}"}),
        ("/tokenize", {"messages": user("hi"), "chat_template_kwargs": {"chat_template": "{{ 7*7 }}"}}),
    ],
)
async def test_templates_in_requests_are_refused(server: LiveServer, path: str, fields: Mapping[str, Any]) -> None:
    status, answer = await server.post({"model": "demo", **fields}, path)
    assert status == 400
    assert "template" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 9), ("n", 5_000_000), ("top_logprobs", 21), ("top_logprobs", -1), ("stop", ["a"] * 150_000),
        ("stop", "x" * 100_000), ("stop_token_ids", [1] * 129), ("stop_token_ids", [10**9]), ("stop_token_ids", [-1]),
        ("logit_bias", {str(number): 0 for number in range(1025)}), ("logit_bias", {"99999999": 1}),
        ("temperature", 1e308), ("top_p", -1), ("repetition_penalty", 0), ("seed", 10**400), ("max_tokens", 0),
        ("min_tokens", -5), ("priority", 10**12), ("cache_salt", "x" * 257), ("cache_salt", ""),
    ],
)  # fmt: skip
async def test_sizes_are_bounded_before_anything_is_made_of_them(server: LiveServer, field: str, value: Any) -> None:
    started_s = time.process_time()
    status, answer = await server.post(
        {"model": "demo", "messages": user("hi"), "logprobs": field == "top_logprobs", field: value}
    )
    assert status == 400, answer
    assert len(json.dumps(answer)) < 64 * 1024
    assert time.process_time() - started_s < 2.0
    assert not server.engine.submitted


async def test_an_error_is_small_whatever_the_request(server: LiveServer) -> None:
    long = "\u0000<b>" * 15_000
    bodies: list[Any] = [
        {"model": long, "messages": user("hi")},
        {"model": "demo", "messages": [{"role": long, "content": "x"}]},
        {"model": "demo", "messages": user("hi"), "tool_choice": long},
        {"model": "demo", "messages": user("hi"), long: 1, "temperature": long},
        {"model": "demo", "messages": [{"role": "user", "content": [{"type": long}]}] * 5},
    ]
    for body in bodies:
        status, answer = await server.post(body)
        assert 400 <= status < 500
        assert len(json.dumps(answer)) < 64 * 1024


async def test_what_a_client_names_cannot_write_log_lines(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    evil = "\x1b[31mred\r\nERROR forged line"
    await server.post({"model": evil, "messages": user("hi")})
    await server.post({"model": "demo", "messages": user("hi"), "conversation_id": evil, "prompt_cache_key": evil})
    await server.get("/v1/models/" + "%1b%0d%0aERROR")
    assert "\x1b" not in caplog.text
    assert "forged" not in caplog.text


async def test_no_browser_origin_is_allowed(server: LiveServer) -> None:
    for origin in ("null", "https://example.org", "http://localhost:3000"):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        for method in ("OPTIONS", "POST"):
            body = json.dumps({"model": "demo", "messages": user("hi")})
            sent = {**headers, "Content-Type": "application/json"}
            async with server.session.request(method, server.url + CHAT, data=body, headers=sent) as response:
                assert not [name for name in response.headers if name.lower().startswith("access-control-")]


async def test_waiting_for_permission_to_send_a_body_works(server: LiveServer) -> None:
    body = json.dumps({"model": "demo", "messages": user("hi")}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(5):
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 100")
        assert await reader.readline() == b"\r\n"
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_bodies_may_come_in_chunks_and_compressed(server: LiveServer) -> None:
    data = json.dumps({"model": "demo", "messages": user("hi")}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 7):
            yield data[start : start + 7]

    async with server.session.post(
        server.url + CHAT, data=pieces(), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 200
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with server.session.post(server.url + CHAT, data=gzip.compress(data), headers=headers) as response:
        assert response.status == 200


async def test_headers_are_bounded_and_the_server_goes_on(server: LiveServer) -> None:
    for lines in (f"X-Long: {'x' * 100_000}\r\n", "".join(f"X-{number}: y\r\n" for number in range(50_000))):
        received = await raw(server.port, f"GET /v1/models HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
        assert received == b"" or received.split(b" ", 2)[1] in (b"400", b"431"), received[:200]
    assert (await server.chat())[0] == 200


async def test_a_body_that_stops_is_given_up(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_IDLE_S", 0.05)
    received = await raw(server.port, post_head(1000) + b'{"model"', until=b"}}")
    assert received.startswith(b"HTTP/1.1 408")
    assert b"Connection: close" in received
    assert (await server.chat())[0] == 200


async def test_a_slow_body_that_goes_on_is_waited_for(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "BODY_IDLE_S", 0.5)
    data = json.dumps({"model": "demo", "messages": user("hi")}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 8):
            yield data[start : start + 8]
            await asyncio.sleep(0.02)

    async with server.session.post(
        server.url + CHAT, data=pieces(), headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 200


async def test_idle_connections_do_not_keep_others_out(server: LiveServer) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(200)]
    for _, writer in idle[::2]:
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
    async with asyncio.timeout(5):
        assert (await server.chat())[0] == 200
    for _, writer in idle:
        writer.close()


async def test_a_reader_that_takes_nothing_is_given_up_and_its_turn_ends(text_model: TextModel) -> None:
    script = Script(text_model.tokenizer.encode("words and more words "), is_endless=True, tokens_per_event=50)
    async with live_server(
        script, text_model=text_model, write_timeout_s=0.2, engine_options={"max_model_len": 10**9}
    ) as server:
        body = json.dumps(
            {"model": "demo", "messages": user("hi"), "stream": True, "logprobs": True, "top_logprobs": 20}
        ).encode()
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1024)
        writer.write(post_head(len(body)) + body)
        await reader.readline()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(20):
            await server.engine.wait_until(lambda: len(server.engine.submitted) == 1)
            while not server.engine.aborted:
                assert (await server.get("/version"))[0] == 200
                await asyncio.sleep(0.02)
        assert await server.metric("turnkeep_slow_readers_total") == 1
        assert server.engine.num_playing == 0
        writer.close()


@pytest.mark.parametrize(
    "text", ["x" * 300_000, "1" * 300_000, "😀" * 75_000, " " * 300_000, "<|user|>" * 30_000, "a\u0301" * 100_000]
)
async def test_strange_texts_take_linear_time(text_model: TextModel, text: str) -> None:
    started_s = time.process_time()
    text_model.tokenizer.encode(text[: len(text) // 8], allow_special=False)
    short_s = time.process_time() - started_s
    started_s = time.process_time()
    text_model.tokenizer.encode(text, allow_special=False)
    assert time.process_time() - started_s < 40 * short_s + 1.0


def make_engine(config: ServerConfig, on_loading: Any) -> EngineHandle:
    return InProcessEngine(config.engine)


@pytest.fixture
async def scripted(tmp_path: Path) -> AsyncIterator[RunningServer]:
    """The whole server over a scripted engine in this process, with two keys."""
    script = tmp_path / "script.json"
    script.write_text('{"rules": []}')
    engine = EngineConfig(model="demo", script=str(script), memory_bytes=1 << 20, max_running=8)
    config = ServerConfig(engine=engine, port=0, api_keys=KEYS)
    async with running_server(config, make_engine=make_engine) as running:
        yield running


async def ask(running: RunningServer, name: str, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"model": "scripted", **fields}
    async with (
        aiohttp.ClientSession() as session,
        session.post(running.url + path, json=body, headers=key(name)) as response,
    ):
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def test_prefixes_are_shared_by_one_tenant_and_salt_only(scripted: RunningServer) -> None:
    async def num_cached(name: str, salt: str | None = None) -> int:
        fields = {} if salt is None else {"cache_salt": salt}
        answer = await ask(scripted, name, messages=user("the same long words " * 30), **fields)
        cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached

    assert await num_cached(KEYS[0]) == 0
    assert await num_cached(KEYS[0]) > 0
    assert await num_cached(KEYS[1]) == 0
    assert await num_cached(KEYS[0], "salt") == 0
    assert await num_cached(KEYS[0], "salt") > 0
    assert await num_cached(KEYS[1], "salt") == 0


async def test_what_one_tenant_stored_another_cannot_find(scripted: RunningServer) -> None:
    answer = await ask(scripted, KEYS[0], "/v1/responses", input="remember", store=True)
    assert len(answer["id"]) >= 32
    async with aiohttp.ClientSession() as session:
        for name, status in ((KEYS[0], 200), (KEYS[1], 404)):
            async with session.get(f"{scripted.url}/v1/responses/{answer['id']}", headers=key(name)) as response:
                assert response.status == status
        body = {"model": "scripted", "input": "what?", "previous_response_id": answer["id"]}
        async with session.post(f"{scripted.url}/v1/responses", json=body, headers=key(KEYS[1])) as response:
            assert response.status in (400, 404)


async def test_a_crash_in_the_middle_is_an_error_event_then_503_then_a_new_engine(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    fault = {"kind": "crash", "after_tokens": 3}
    script.write_text(json.dumps({"rules": [{"match": "die", "answer": "a b c d e f", "fault": fault}]}))
    engine = EngineConfig(model="demo", script=str(script), memory_bytes=1 << 20)
    seen: list[Loading] = []
    async with running_server(ServerConfig(engine=engine, port=0), on_loading=seen.append) as running:
        body = {"model": "scripted", "messages": user("die"), "stream": True}
        async with aiohttp.ClientSession() as session:
            data = json.dumps(body).encode()
            received = await raw(int(running.url.rpartition(":")[2]), post_head(len(data)) + data, until=b"[DONE]")
            assert b'"error":{"message":"Internal server error' in received
            assert b"[DONE]" not in received
            async with session.get(running.url + "/health") as response:
                assert response.status == 503
            async with asyncio.timeout(30):
                while not running.supervisor.is_ready:
                    await asyncio.sleep(0.05)
            async with session.post(running.url + CHAT, json={**body, "stream": False}) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == "a b c d e f"
