"""What a client can get wrong: always OpenAI's envelope, the right status, never a 500, and the server goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import openai
import pytest
from live_server import CHAT, LiveServer, live_server, saying, user
from scripted_engine import Script

from turnkeep.server.http_guard import OPEN_PATHS, tenant_of
from turnkeep.server.text_model import TextModel

JSON = {"Content-Type": "application/json"}


@pytest.fixture
async def server(text_model: TextModel) -> AsyncIterator[LiveServer]:
    async with live_server(saying(text_model, "fine"), text_model=text_model) as live:
        yield live


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "messages": user("hi"), **fields}).encode()


async def send(
    server: LiveServer, data: bytes, method: str = "POST", path: str = CHAT, headers: Mapping[str, str] = JSON
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    async with server.session.request(method, server.url + path, data=data, headers=headers) as response:
        return response.status, json.loads(await response.read()), response.headers


BAD_BODIES = {
    "empty body": (b"", 400, None),
    "not JSON": (b"hello", 400, None),
    "cut JSON": (b'{"model": "demo"', 400, None),
    "not an object": (b"[1]", 400, None),
    "not UTF-8": (b'{"model": "demo", "messages": [{"role": "user", "content": "\xff\xfe"}]}', 400, None),
    "UTF-16": (body().decode().encode("utf-16"), 400, None),
    "lone surrogate": (b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, None),
    "deep nesting": (body()[:-1] + b', "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
    "deep tool": (
        body()[:-1] + b', "tools": [{"type": "function", "function": {"name": "f", "parameters": '
        + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}}]}", 400, "tools[0].function.parameters",
    ),
    "NaN": (body()[:-1] + b', "temperature": NaN}', 400, None),
    "huge number": (body()[:-1] + b', "seed": 1' + b"0" * 400 + b"}", 400, "seed"),
    "no model": (b'{"messages": [{"role": "user", "content": "hi"}]}', 400, "model"),
    "unknown model": (body(model="gpt-nothing"), 404, "model"),
    "empty messages": (body(messages=[]), 400, "messages"),
    "no messages": (b'{"model": "demo"}', 400, "messages"),
    "wrong role": (body(messages=[{"role": "king", "content": "hi"}]), 400, "messages[0].role"),
    "image": (
        body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[0].content[0].type",
    ),
    "negative max_tokens": (body(max_tokens=-1), 400, "max_tokens"),
    "over-long prompt": (body(messages=user("word " * 5000)), 400, "messages"),
    "wrong type": (body(temperature="hot"), 400, "temperature"),
    "list for object": (body(stream_options=[]), 400, "stream_options"),
    "too many choices": (body(n=10_000_000), 400, "n"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bad_input_is_refused_in_the_envelope_and_the_server_goes_on(server: LiveServer, name: str) -> None:
    data, expected_status, param = BAD_BODIES[name]
    for stream in (False, True):
        sent = data.replace(b'{"model"', b'{"stream": true, "model"', 1) if stream else data
        status, answer, headers = await send(server, sent)
        assert status == expected_status, answer
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["param"] == param
        assert headers["Content-Type"].startswith("application/json")
        assert len(json.dumps(answer)) < 4096
    assert (await server.chat())[0] == 200
    assert not server.service.num_open_turns


async def test_unknown_fields_are_ignored(server: LiveServer) -> None:
    status, _ = await server.chat(unknown={"a": [1]}, messages=[{"role": "user", "content": "x", "odd": 1}])
    assert status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/conversations/nobody/cache", 404, "not_found"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
    ],
)
async def test_wrong_addresses_and_methods_answer_in_the_envelope(
    server: LiveServer, method: str, path: str, status: int, code: str
) -> None:
    got, answer, headers = await send(server, b"", method, path)
    assert got == status
    assert answer["error"]["code"] == code
    if status == 405:
        assert "GET" in headers["Allow"] or "POST" in headers["Allow"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_a_body_that_is_not_declared_as_json_is_415(server: LiveServer, content_type: str) -> None:
    status, answer, _ = await send(server, body(), headers={"Content-Type": content_type})
    assert status == 415
    assert answer["error"]["code"] == "unsupported_media_type"


async def test_bodies_are_capped_also_when_compressed(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "fine"), text_model=text_model, max_body_bytes=10_000) as server:
        big = body(messages=user("x" * 20_000))
        status, answer, _ = await send(server, big)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        compressed = gzip.compress(big)
        assert len(compressed) < 1000
        status, answer, _ = await send(server, compressed, headers={**JSON, "Content-Encoding": "gzip"})
        assert status == 413
        status, _, _ = await send(server, gzip.compress(body()), headers={**JSON, "Content-Encoding": "gzip"})
        assert status == 200
        status, answer, _ = await send(server, b"no gzip", headers={**JSON, "Content-Encoding": "gzip"})
        assert (status, set(answer)) == (400, {"error"})
        assert (await server.chat())[0] == 200


async def test_request_ids_are_echoed_when_they_are_safe(server: LiveServer) -> None:
    _, _, headers = await send(server, body(), headers={**JSON, "X-Request-Id": "my-id_1"})
    assert headers["x-request-id"] == headers["request-id"] == "my-id_1"
    _, _, headers = await send(server, b"{}", headers={**JSON, "X-Request-Id": "x" * 500})
    assert headers["x-request-id"].startswith("req_")
    _, _, headers = await send(server, b"", "GET", "/nowhere", headers={})
    assert headers["x-request-id"].startswith("req_")


async def test_a_refusal_of_the_engine_gets_a_real_status_also_when_streamed(text_model: TextModel) -> None:
    script = Script(refuse="it needs 900 pages, there are 64")
    async with live_server(script, text_model=text_model) as server:
        for stream in (False, True):
            status, answer = await server.chat(stream=stream)
            assert status == 400
            assert answer["error"]["code"] == "context_length_exceeded"
            assert "900 pages" in answer["error"]["message"]
        assert not server.service.num_open_turns


async def test_a_full_queue_is_429_before_any_work(text_model: TextModel) -> None:
    admit = asyncio.Event()
    script = saying(text_model, "Hi", admit=admit)
    async with live_server(script, text_model=text_model, max_waiting=2) as server:
        waiting = [asyncio.create_task(server.chat()) for _ in range(2)]
        await server.until(lambda: server.service.num_open_turns == 2)
        async with server.session.post(server.url + CHAT, data=b"not even JSON", headers=JSON) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"]["code"] == "rate_limit_exceeded"
        admit.set()
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
        assert (await server.chat())[0] == 200


async def test_the_official_client_raises_its_typed_errors(server: LiveServer) -> None:
    create = server.client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        await create(model="none", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError) as bad:
        await create(model="demo", messages=[], stream=True)
    assert missing.value.code == "model_not_found"
    assert bad.value.param == "messages"
    assert bad.value.request_id is not None


class TestAuthentication:
    """With keys, nothing but the probes answers without one."""

    @pytest.fixture
    async def server(self, text_model: TextModel) -> AsyncIterator[LiveServer]:
        keys = ("first-key", "second-ключ")
        async with live_server(saying(text_model, "fine"), text_model=text_model, api_keys=keys) as live:
            yield live

    @pytest.mark.parametrize(
        "headers",
        [
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic first-key"},
            {"Authorization": "Bearer first-ke"},
            {"Authorization": "Bearer " + "x" * 4000},
            {"Authorization": "Bearer naïve-ключ"},
            {"x-api-key": "wrong"},
        ],
    )
    async def test_wrong_keys_are_401_on_every_route(self, server: LiveServer, headers: dict[str, str]) -> None:
        paths = [
            "/v1/chat/completions", "/v1/chat/completions/", "//v1/chat/completions", "/v1/%63hat/completions",
            "/v1/chat/completions/render", "/v1/models", "/v1/models/demo", "/v1/conversations/x/cache", "/metrics",
            "/version", "/nowhere", "/health/",
        ]  # fmt: skip
        for path in paths:
            for method in ("GET", "POST"):
                status, answer, _ = await send(server, body(), method, path, {**JSON, **headers})
                assert status == 401, (method, path)
                assert answer["error"]["code"] == "invalid_api_key"
                assert "first-key" not in json.dumps(answer)

    async def test_every_key_opens_the_server_in_its_usual_places(self, server: LiveServer) -> None:
        for headers in (
            {"Authorization": "Bearer first-key"},
            {"Authorization": "bearer  first-key"},
            {"authorization": "Bearer second-ключ"},
            {"x-api-key": "first-key"},
        ):
            status, _, _ = await send(server, body(), headers={**JSON, **headers})
            assert status == 200, headers

    async def test_probes_need_no_key(self, server: LiveServer) -> None:
        for path in OPEN_PATHS:
            async with server.session.get(server.url + path) as response:
                assert response.status == 200

    async def test_tenants_share_neither_cache_nor_reports(self, server: LiveServer) -> None:
        first, second = ({**JSON, "x-api-key": key} for key in ("first-key", "second-ключ"))
        for headers in (first, second, first):
            await send(server, body(conversation_id="same"), headers=headers)
        await send(server, body(conversation_id="same", cache_salt="pepper"), headers=first)
        roots = [submit.cache_root for submit in server.engine.submitted]
        assert roots[0] == roots[2]
        assert len(set(roots)) == 3
        assert all("first-key" not in root for root in roots)
        await send(server, body(conversation_id="mine"), headers=first)
        for headers, expected in ((first, 200), (second, 404)):
            async with server.session.get(f"{server.url}/v1/conversations/mine/cache", headers=headers) as response:
                assert response.status == expected


def test_a_tenants_name_does_not_give_its_key_away() -> None:
    assert tenant_of("secret") != tenant_of("secret2")
    assert "secret" not in tenant_of("secret")
