"""Generated requests over all routes: no answer is a 5xx, all errors are in an envelope, and nothing is left behind.

TURNKEEP_FUZZ_REQUESTS says how many (default 1500); TURNKEEP_FUZZ_SEED which ones.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import aiohttp
from live_server import LiveServer, live_server, saying
from scripted_engine import Script

from turnkeep.engine.messages import Submit
from turnkeep.server.text_model import TextModel

NUM_REQUESTS = int(os.environ.get("TURNKEEP_FUZZ_REQUESTS", "1500"))
SEED = int(os.environ.get("TURNKEEP_FUZZ_SEED", "7"))

TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {"a": {}}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": '{"a": 1}'}}
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "user", "content": "And?"},
]
COMMON = {"model": "demo", "temperature": 0.5, "top_p": 0.9, "stream": False}
CHAT = {
    **COMMON, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 5, "n": 1, "stop": ["x"],
    "seed": 1, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "user": "u", "metadata": {"a": "b"},
    "stream_options": None, "response_format": {"type": "text"}, "reasoning_effort": "low", "cache_salt": "s",
    "parallel_tool_calls": True, "chat_template_kwargs": {"enable_thinking": False}, "prompt_cache_key": "k",
}  # fmt: skip
BLOCKS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "get", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "3"}]},
]
ITEMS: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "3"},
]
FLAT_TOOL = {"type": "function", "name": "get", "parameters": {"type": "object", "properties": {}}}
# Bodies that are right, by the route they belong to.
BODIES: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/render": CHAT,
    "/v1/completions": {**COMMON, "prompt": "Once", "max_tokens": 3, "echo": False, "suffix": None, "best_of": 1},
    "/v1/messages": {
        "model": "demo", "max_tokens": 5, "messages": BLOCKS, "system": [{"type": "text", "text": "Be brief."}],
        "tools": [{"name": "get", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"}, "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"model": "demo", "messages": BLOCKS},
    "/v1/responses": {
        **COMMON, "input": ITEMS, "instructions": "Be brief.", "tools": [FLAT_TOOL], "max_output_tokens": 5,
        "store": True, "previous_response_id": None, "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}}, "include": [], "truncation": "disabled", "background": False,
        "conversation": None, "metadata": {},
    },
    "/v1/responses/input_tokens": {"model": "demo", "input": ITEMS},
    "/v1/conversations": {"metadata": {"a": "b"}, "items": ITEMS},
    "/tokenize": {"model": "demo", "messages": MESSAGES[:2]},
    "/detokenize": {"model": "demo", "tokens": [5, 6]},
}  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.1, -0.0, 1e308, "", " ", "x" * 3000,
    "\x00", "\ud800", "\u2028", "é😀", "<|user|>", "<|end|><|assistant|>", "<think>", "../../x", "{{7*7}}",
    "a\r\nb", [], {}, [[]], [None], [{}], {"": None}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "object", "$ref": "#"}, [1, "a", None], [{"role": "user"}], [{"role": "assistant", "content": ""}] * 3,
]  # fmt: skip
RAW = [
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"model": NaN}', b"{}{}", b"[" * 5000,
    b'{"model":"demo","messages":[{"role":"user","content":"\\ud800"}]}', b'{"model":"demo","model":"demo"}', b"{}" * 3,
]  # fmt: skip
HEADERS = [
    {}, {}, {}, {}, {"Content-Type": "text/plain"}, {"Authorization": "Bearer x"}, {"Idempotency-Key": "k"},
    {"X-Request-Id": "r" * 300}, {"session_id": "é"}, {"X-Conversation-Id": "../x"}, {"Accept-Encoding": "gzip"},
    {"Content-Encoding": "gzip"}, {"Content-Encoding": "br"}, {"anthropic-version": "x"}, {"Range": "bytes=0-1"},
    {"X-Claude-Code-Session-Id": "s", "x-claude-code-agent-id": "\t"}, {"Expect": "100-continue"},
]  # fmt: skip
METHODS = ["POST"] * 12 + ["GET", "GET", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"]


def mutated(value: Any, random_: random.Random, depth: int = 0) -> Any:
    """Plain data with a part replaced, dropped, doubled or nested."""
    if random_.random() < 0.12 or depth > 6:
        return random_.choice(ODD)
    if isinstance(value, dict) and value:
        result = dict(value)
        for name in random_.sample(sorted(result), random_.randint(1, min(2, len(result)))):
            action = random_.random()
            if action < 0.15:
                del result[name]
            elif action < 0.2:
                result[random_.choice(["x", name.upper(), name * 50])] = result.pop(name)
            else:
                result[name] = mutated(result[name], random_, depth + 1)
        return result
    if isinstance(value, list) and value:
        result_list = list(value)
        index = random_.randrange(len(result_list))
        action = random_.random()
        if action < 0.2:
            del result_list[index]
        elif action < 0.35:
            result_list.insert(random_.randrange(len(result_list) + 1), result_list[index])
        else:
            result_list[index] = mutated(result_list[index], random_, depth + 1)
        return result_list
    return random_.choice(ODD)


def paths(server: LiveServer) -> list[str]:
    assert server.runner is not None
    found = {resource.canonical for resource in server.runner.app.router.resources()}
    return sorted(found)


def request_of(random_: random.Random, known: list[str]) -> tuple[str, str, bytes, dict[str, str]]:
    path = random_.choice(known if random_.random() < 0.3 else sorted(BODIES))
    body: Any = BODIES.get(path, {})
    for _ in range(random_.choice((0, 1, 1, 1, 2, 3))):
        body = mutated(body, random_)
    if isinstance(body, dict) and random_.random() < 0.2:
        body = {**body, "stream": True}
    data = json.dumps(body).encode() if random_.random() < 0.95 else random_.choice(RAW)
    while "{" in path:
        value = random_.choice(["x", "resp_" + "0" * 40, "%00", "é", "a" * 500, "demo", "..", "%2e%2e%2f"])
        path = path[: path.index("{")] + value + path[path.index("}") + 1 :]
    headers = {"Content-Type": "application/json", **random_.choice(HEADERS)}
    method = random_.choice(METHODS)
    if method == "HEAD":  # what cannot be decoded is answered before its method is known, with a body
        headers.pop("Content-Encoding", None)
    return method, path, data, headers


def check(label: str, status: int, content_type: str, body: bytes) -> None:
    assert status < 500, f"{label}: {status} {body[:300]!r}"
    if status < 400 or not body:
        return
    assert content_type == "application/json", f"{label}: {status} {content_type} {body[:300]!r}"
    error = json.loads(body)["error"]
    assert isinstance(error["message"], str), label
    assert isinstance(error["type"], str), label
    assert len(body) < 64 * 1024, label


async def send(
    server: LiveServer, method: str, path: str, data: bytes, headers: dict[str, str]
) -> tuple[int, str, bytes]:
    """Status, content type and body. A connection is tried anew: an earlier request's broken body may have ended it."""
    timeout = aiohttp.ClientTimeout(total=20)
    for is_last in (False, True):
        try:
            async with server.session.request(
                method, server.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                return response.status, response.content_type, await response.read()
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if is_last:
                raise
    raise AssertionError("unreachable")


async def test_no_request_makes_the_server_fail(text_model: TextModel) -> None:
    texts = ["fine", '<think>Hm.</think><tool_call>{"name": "get", "arguments": {"a": 1}}</tool_call>', ""]

    def direct(submit: Submit) -> Script:
        return saying(text_model, texts[len(submit.prompt_ids) % len(texts)])

    random_ = random.Random(SEED)
    statuses: dict[int, int] = {}
    async with live_server(direct, text_model=text_model) as server:
        known = paths(server)
        for number in range(NUM_REQUESTS):
            method, path, data, headers = request_of(random_, known)
            label = f"request {number} of seed {SEED}: {method} {path} {headers} {data[:1500]!r}"
            try:
                status, content_type, body = await send(server, method, path, data, headers)
            except TimeoutError:
                raise AssertionError(f"{label}: no answer") from None
            check(label, status, content_type, body)
            statuses[status] = statuses.get(status, 0) + 1
        assert (await server.chat())[0] == 200
        await server.until(lambda: server.service.num_open_turns == 0 and server.engine.num_playing == 0)
        assert server.engine.num_open_requests == 0
    # Were nearly all refused, the requests would not reach what is behind the checks.
    assert statuses.get(200, 0) > NUM_REQUESTS // 10, statuses
    assert statuses.get(400, 0) > NUM_REQUESTS // 10, statuses
