"""Requests generated from the API's own description, right and wrong: never a 5xx, every refusal in its envelope.

TURNKEEP_GENERATED_REQUESTS sets how many (default 1200); TURNKEEP_GENERATED_SEED starts another series. With many of
them the memory must stay flat, too: what one request leaves is bounded, and the bounds are reached early.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from live_server import LiveServer, live_server, saying

from turnkeep.server.text_model import TextModel

NUM_REQUESTS = int(os.environ.get("TURNKEEP_GENERATED_REQUESTS", "1200"))
SEED = int(os.environ.get("TURNKEEP_GENERATED_SEED", "1"))
MAX_DEPTH = 5
MAX_ERROR_BYTES = 64 * 1024
ENOUGH_TO_WEIGH = 10_000  # requests; fewer do not fill the bounded tables
MAX_GROWTH_BYTES = 48 * 2**20  # from when half of them are answered
ANSWER = '<think>a</think>b <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, 1e300, 0.5, "", "x", "demo", "user", "\0", "ü😀", "a" * 300),
    *([], {}, [None], ["x"], [1, 2], {"type": "text", "text": "hi"}, {"type": "function"}, {"$ref": "#/x"}),
]
WORDS = "type role content name text schema function parameters id input user assistant message auto required".split()
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "name": "f", "function": {"name": "f"}, "input_schema": {"type": "object"}}
# What makes a body pass its first checks often enough to reach the later ones.
LIKELY: dict[str, list[Any]] = {
    "model": ["demo"],
    "messages": [MESSAGES, [{"role": "system", "content": "s"}, *MESSAGES]],
    "prompt": ["hi", [1, 2, 3], ["a", "b"]],
    "input": ["hi", [{"role": "user", "content": "hi"}]],
    "max_tokens": [5, 1],
    "tokens": [[1, 2]],
    "tools": [[TOOL], None],
    "n": [None, 1, 2],
    "items": [[{"type": "message", "role": "user", "content": "hi"}]],
}


class Generator:
    """Bodies for a schema of the document, most of them with something wrong."""

    def __init__(self, document: dict[str, Any], choice: random.Random) -> None:
        self.components = document["components"]["schemas"]
        self.choice = choice

    def body(self, schema: dict[str, Any]) -> Any:
        return self.value(schema, 0)

    def value(self, schema: dict[str, Any], depth: int) -> Any:
        if self.choice.random() < 0.04 or depth > MAX_DEPTH:
            return self.choice.choice(ODD)
        if "$ref" in schema:
            return self.value(self.components[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.value(self.choice.choice(schema["anyOf"]), depth + 1)
        if "enum" in schema:
            return self.choice.choice(schema["enum"])
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = self.choice.choice(kind)
        if kind == "object":
            return self.object(schema, depth)
        if kind == "array":
            return [self.value(schema.get("items", {}), depth + 1) for _ in range(self.choice.randrange(3))]
        if kind == "string":
            return self.choice.choice(WORDS)
        if kind in ("integer", "number"):
            return self.choice.choice([0, 1, 2, 0.5, -1, 99999]) if kind == "number" else self.choice.randrange(-1, 5)
        if kind == "boolean":
            return self.choice.random() < 0.5
        return None if kind == "null" else self.choice.choice(ODD)

    def object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties: dict[str, Any] = schema.get("properties", {})
        required = set(schema.get("required", ()))
        result = {}
        for name, field in properties.items():
            if name in required or self.choice.random() < 3 / (3 + len(properties)):
                is_likely = name in LIKELY and self.choice.random() < 0.9
                result[name] = self.choice.choice(LIKELY[name]) if is_likely else self.value(field, depth + 1)
        if not properties:
            result = {self.choice.choice(WORDS): self.choice.choice(ODD) for _ in range(self.choice.randrange(3))}
        return result


def resident_bytes() -> int:
    """Memory of this process, server and client together."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def send(server: LiveServer, method: str, path: str, body: Any) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    async with server.session.request(method, server.url + path, data=data, headers=headers) as response:
        return response.status, await response.text()


def check(status: int, text: str, what: str) -> None:
    assert status < 500, f"{what} -> {status} {text[:500]}"
    if status >= 400:
        assert len(text) <= MAX_ERROR_BYTES, what
        error = json.loads(text)["error"]
        assert isinstance(error["message"], str), what
        assert error["type"], what


async def test_no_generated_request_breaks_the_server(text_model: TextModel) -> None:
    choice = random.Random(SEED)
    seen: set[int] = set()
    async with live_server(saying(text_model, ANSWER, tokens_per_event=20), text_model=text_model) as server:
        _, document = await server.get("/openapi.json")
        generator = Generator(document, choice)
        operations = [
            (method, path, operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
            if (method, path) != ("get", "/v1/responses")  # a WebSocket
        ]
        with_body = [one for one in operations if "requestBody" in one[2]]
        half_way = 0
        for number in range(NUM_REQUESTS):
            if number == NUM_REQUESTS // 2:
                half_way = resident_bytes()
            method, path, operation = choice.choice(with_body if choice.random() < 0.9 else operations)
            for parameter in operation.get("parameters", ()):
                path = path.replace(f"{{{parameter['name']}}}", choice.choice(["x", "conv_1", "resp_1", "%00", "demo"]))
            body = None
            if "requestBody" in operation:
                body = generator.body(operation["requestBody"]["content"]["application/json"]["schema"])
            status, text = await send(server, method, path, body)
            seen.add(status)
            check(status, text, f"{method} {path} {json.dumps(body)[:3000]}")
        await server.until(lambda: server.service.num_open_turns == 0)
        growth = resident_bytes() - half_way
        assert (await server.get("/health"))[0] == 200
    print(f"{NUM_REQUESTS} requests, {growth / 2**20:.1f} MiB more than half way")
    assert NUM_REQUESTS < ENOUGH_TO_WEIGH or growth <= MAX_GROWTH_BYTES
    assert {200, 400, 404} <= seen, "the requests should reach success and refusals alike"
