"""Whatever a client sends, it is answered or refused in the envelope: never a 5xx."""

from __future__ import annotations

import json
import os
import random
from typing import Any

from live_server import live_server, saying

from turnkeep.server.responses.input_items import HOSTED, ID_PREFIXES
from turnkeep.server.responses.shapes import ResponsesRequest
from turnkeep.server.text_model import TextModel

NUM_BODIES = int(os.environ.get("TURNKEEP_RANDOM_BODIES", "300"))
SEED = int(os.environ.get("TURNKEEP_RANDOM_SEED", "1"))

SCALARS: list[Any] = [
    None, True, False, 0, 1, -1, 2.5, 10**30, -(10**18), "", "x", "auto", "none", "demo", "user", "é\u2028\0",
    "a" * 300, "resp_" + "0" * 32, "conv_" + "0" * 32, "msg_" + "0" * 32 + "i0", "../..", [], {}, [[]], [{}],
    {"a": "b"}, {"id": 5},
]  # fmt: skip
KEYS = (
    "type", "role", "content", "id", "call_id", "name", "arguments", "output", "summary", "encrypted_content", "text",
    "tools", "input", "parameters", "namespace", "x",
)  # fmt: skip
KINDS = (
    *ID_PREFIXES, *sorted(HOSTED), "item_reference", "function", "custom", "namespace", "input_text", "output_text",
)  # fmt: skip


def value(rng: random.Random, depth: int = 3) -> Any:
    if depth == 0 or rng.random() < 0.5:
        return rng.choice(SCALARS)
    if rng.random() < 0.4:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    return {rng.choice(KEYS): value(rng, depth - 1) for _ in range(rng.randrange(5))}


def item(rng: random.Random) -> Any:
    """Mostly of the right form."""
    kind = rng.choice(KINDS)
    fields: dict[str, Any] = {
        "type": kind, "role": rng.choice(["user", "assistant", "system", "developer"]), "content": "text",
        "id": "item_1", "call_id": "c", "name": "f", "arguments": "{}", "output": "out", "summary": [],
        "input": "in", "tools": [], "encrypted_content": "tk1.AAAA",
    }  # fmt: skip
    for key in rng.sample(sorted(fields), rng.randrange(3)):
        fields[key] = value(rng, 2)
    for key in rng.sample(sorted(fields), rng.randrange(3)):
        fields.pop(key, None)
    return fields


def body(rng: random.Random) -> Any:
    fields: dict[str, Any] = {"model": "demo", "input": "x"}
    for name in rng.sample(ResponsesRequest.__struct_fields__, rng.randrange(5)):
        if name not in ("model", "stream", "background"):
            fields[name] = value(rng)
    if rng.random() < 0.7:
        fields["input"] = [item(rng) if rng.random() < 0.9 else value(rng) for _ in range(rng.randrange(4))]
    if rng.random() < 0.3:
        fields["tools"] = [item(rng) for _ in range(rng.randrange(3))]
    return fields


async def test_random_bodies_never_give_a_server_error(text_model: TextModel) -> None:
    rng = random.Random(SEED)
    counts = {200: 0, 400: 0}
    async with live_server(saying(text_model, "<think>a</think>b"), text_model=text_model) as server:
        conversation = await server.client.conversations.create()
        for number in range(NUM_BODIES):
            path = rng.choice(
                ["/v1/responses", "/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact",
                 "/v1/conversations", f"/v1/conversations/{conversation.id}",
                 f"/v1/conversations/{conversation.id}/items"]
            )  # fmt: skip
            sent = body(rng)
            if "conversations" in path:
                sent = {"items": sent["input"], "metadata": value(rng)}
            elif rng.random() < 0.3:
                sent["conversation"] = conversation.id
            status, answer = await server.post(json.dumps(sent).encode(), path)
            assert status < 500, f"body {number}, {path}: {sent}"
            counts[status] = counts.get(status, 0) + 1
            if status >= 400:
                assert set(answer["error"]) == {"message", "type", "param", "code"}, answer
        items = [one async for one in server.client.conversations.items.list(conversation.id, limit=100, order="asc")]
        assert len({one.id for one in items}) == len(items)
        query = {"limit": "5", "after": "nothing", "order": "asc"}
        for name in ("limit", "order", "after", "stream", "starting_after", "include"):
            for text in ("", "-1", "NaN", "é", "9" * 5000, "true", "asc"):
                for where in (f"conversations/{conversation.id}/items", f"responses/resp_{'0' * 32}"):
                    url = f"{server.url}/v1/{where}"
                    async with server.session.get(url, params={**query, name: text}) as response:
                        assert response.status < 500, (name, text[:20])
    assert counts[200] >= NUM_BODIES // 10
    assert counts[400] >= NUM_BODIES // 10
