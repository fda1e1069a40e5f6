"""Requirements that have no other home: addresses, leaks, padding, pins, and what must not change a prompt."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from live_server import CHAT, LiveServer, events, live_server, make_text_model, saying, user
from text_fixtures import NOW, TEMPLATE_NAMES, text_case

from turnkeep.server.chat_messages import normalize_messages
from turnkeep.server.prompts import PromptEncoder
from turnkeep.server.text_model import TextModel

ROOT = Path(__file__).resolve().parents[2]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
async def server(text_model: TextModel) -> AsyncIterator[LiveServer]:
    async with live_server(saying(text_model, "fine, thank you"), text_model=text_model) as live:
        yield live


async def test_addresses_in_a_request_are_never_opened(server: LiveServer) -> None:
    """SEC-SSRF-1: media, files and links, in every shape; a listener on loopback hears nothing."""
    num_connections = 0

    def heard(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        writer.close()

    listener = await asyncio.start_server(heard, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    for url in (f"http://127.0.0.1:{port}/x.png", f"http://localhost:{port}/", "file:///etc/passwd"):
        image = {"type": "image_url", "image_url": {"url": url}}
        requests: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"messages": [{"role": "user", "content": [image]}]}),
            ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
            ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_url": url}]}]}),
            (
                "/v1/messages",
                {
                    "max_tokens": 5,
                    "messages": [
                        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": url}}]}
                    ],
                },
            ),
        ]
        for path, body in requests:
            status, answer = await server.post({"model": "demo", **body}, path)
            assert status == 400, answer
        hosted = {"type": "mcp", "server_label": "x", "server_url": url}
        assert (await server.post({"model": "demo", "input": "hi", "tools": [hosted]}, "/v1/responses"))[0] == 200
    listener.close()
    await listener.wait_closed()
    assert num_connections == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/v1/completions", "/tokenize"])
async def test_a_fault_of_the_server_tells_nothing_about_it(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """SEC-LEAK-1."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("/home/secret/file.py: object at 0x7f0012345678")

    for name in ("prepare", "prepare_text"):
        monkeypatch.setattr(server.service.text_model, name, fail)
    monkeypatch.setattr(server.service.text_model.tokenizer, "encode", fail)
    prompt: dict[str, Any] = {"messages": user("hi")} if path in (CHAT, "/v1/messages") else {"prompt": "hi"}
    body = {"input": "hi"} if path == "/v1/responses" else prompt
    status, answer = await server.post({"model": "demo", "max_tokens": 5, **body}, path)
    assert status == 500
    text = json.dumps(answer)
    assert "error" in answer
    assert not re.search(r"secret|0x7f|Traceback|\.py|RuntimeError", text)


async def test_a_stream_can_be_padded_so_that_its_pieces_do_not_tell_their_lengths(server: LiveServer) -> None:
    """SEC-TIME-3: as OpenAI has it, only when asked for."""
    plain = await server.stream()
    padded = await server.stream(stream_options={"include_obfuscation": True})

    def text(body: bytes) -> str:
        chunks = [chunk for chunk in events(body)[:-1] if chunk["choices"]]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    def sizes(body: bytes) -> set[int]:
        return {len(frame) for frame in body.split(b"\n\n") if b'"content"' in frame}

    assert text(plain) == text(padded)
    assert len(sizes(plain)) > 1
    assert len(sizes(padded)) == 1
    assert b"obfuscation" not in plain


def test_every_package_that_is_installed_is_pinned() -> None:
    """SEC-SUPPLY-1: what `make` installs has one version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["structured"], *extras["test"], *extras["dev"], *extras["gguf"]]
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    names = {re.split(r"[<>=\[]", one)[0].strip().lower().replace("_", "-") for one in wanted}
    assert names - {pin.lower().replace("_", "-") for pin in pins} == set()


def test_the_fingerprint_tells_builds_and_models_apart_and_nothing_else() -> None:
    """API-CH-12."""
    assert make_text_model().fingerprint == make_text_model().fingerprint
    assert make_text_model("other").fingerprint != make_text_model().fingerprint


async def test_what_is_asked_of_the_answer_does_not_change_the_prompt(server: LiveServer) -> None:
    """TPL-14: a prefix survives another tool_choice or response_format."""
    schema = {"name": "x", "schema": {"type": "object"}}
    named = {"type": "function", "function": {"name": "look"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    bodies: list[dict[str, Any]] = [{}, {"parallel_tool_calls": False}]
    bodies += [{"tool_choice": choice} for choice in ("auto", "none", "required", named, allowed)]
    bodies += [{"response_format": {"type": "json_object"}}]
    bodies += [{"response_format": {"type": "json_schema", "json_schema": schema}}]
    prompts = set()
    for body in bodies:
        fields = {"model": "demo", "messages": user("hi"), "tools": TOOLS, **body}
        status, answer = await server.post(fields, CHAT + "/render")
        assert status == 200, answer
        prompts.add(tuple(answer["prompt_token_ids"]))
    assert len(prompts) == 1


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_odd_orders_of_messages_are_rendered_by_every_template(name: str) -> None:
    """API-FLT-1: what clients make of a broken stream: several answers in a row, an empty one, a result behind it."""
    case = text_case(name)
    answer, empty = {"role": "assistant", "content": "so"}, {"role": "assistant", "content": ""}
    calls = [{"id": "call00000", "type": "function", "function": {"name": "find_order", "arguments": "{}"}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "call00000", "content": "x"}
    orders: list[list[dict[str, Any]]] = [
        [*user("a"), answer, answer, *user("b")], [*user("a"), empty, *user("b")], [*user("a"), *user("b")],
        [*user("a"), answer],
    ]  # fmt: skip
    if case.takes_tools:
        orders += [[*user("a"), answer, called, result], [*user("a"), called, result, empty, answer, *user("b")]]
    for messages in orders:
        prompt = PromptEncoder(case.template, case.tokenizer).encode(normalize_messages(messages), now=NOW)
        assert prompt.token_ids
        assert "a" in prompt.text
