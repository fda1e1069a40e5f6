"""Send a recorded trace to a server, each conversation in its order, and measure what every request has cost."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from turnkeep.clients.trace_file import TracedRequest


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """concurrency: requests under way at once. arrival_scale: 1 keeps the recorded pace, 2 doubles the pauses, 0 waits
    for nothing. max_output_tokens bounds what each request generates."""

    model: str
    concurrency: int = 8
    arrival_scale: float = 0.0
    max_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """What became of one request. error: the server's reason, or how the connection ended; numbers are then 0."""

    conversation_id: str
    turn: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    time_to_first_token_s: float = 0.0
    duration_s: float = 0.0
    error: str | None = None

    @property
    def num_computed_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_cached_tokens


@dataclass(slots=True)
class Replay:
    """The whole run, in order of completion."""

    requests: list[ReplayedRequest] = field(default_factory=list)
    wall_s: float = 0.0


OnRequest = Callable[[ReplayedRequest], None]


async def replay(
    session: aiohttp.ClientSession, url: str, trace: list[TracedRequest], options: ReplayOptions, on_request: OnRequest
) -> Replay:
    """Play the trace against the server at `url` (without /v1). A request that fails is counted, no more."""
    conversations: defaultdict[str, list[TracedRequest]] = defaultdict(list)
    for request in trace:
        conversations[request.conversation_id].append(request)
    result, slots, started_s = Replay(), asyncio.Semaphore(options.concurrency), time.monotonic()

    async def play(turns: list[TracedRequest]) -> None:
        for request in turns:
            await asyncio.sleep(max(0.0, started_s + request.arrival_s * options.arrival_scale - time.monotonic()))
            async with slots:
                done = await _send(session, url, request, options)
            result.requests.append(done)
            on_request(done)

    async with asyncio.TaskGroup() as group:
        for turns in conversations.values():
            group.create_task(play(turns))
    result.wall_s = time.monotonic() - started_s
    return result


async def _send(
    session: aiohttp.ClientSession, url: str, request: TracedRequest, options: ReplayOptions
) -> ReplayedRequest:
    path, body = _body(request, options)
    started_s = time.monotonic()
    first_s: float | None = None
    usage: dict[str, Any] | None = None
    try:
        async with session.post(f"{url}{path}", json=body) as response:
            if response.status != 200:
                return _failed(request, f"status {response.status}: {(await response.text())[:200]}")
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                payload = json.loads(line[6:])
                if "error" in payload:
                    return _failed(request, payload["error"]["message"])
                if first_s is None and payload["choices"]:
                    first_s = time.monotonic()
                usage = payload.get("usage") or usage
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return _failed(request, f"{type(error).__name__}: {error}")
    if usage is None:
        return _failed(request, "the answer broke off")
    now_s = time.monotonic()
    return ReplayedRequest(
        request.conversation_id,
        request.turn,
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        num_output_tokens=usage["completion_tokens"],
        time_to_first_token_s=(first_s or now_s) - started_s,
        duration_s=now_s - started_s,
    )


def _body(request: TracedRequest, options: ReplayOptions) -> tuple[str, dict[str, Any]]:
    max_tokens = request.output_tokens
    if options.max_output_tokens is not None:
        max_tokens = min(max_tokens, options.max_output_tokens)
    body: dict[str, Any] = {
        "model": options.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max(1, max_tokens),
        "temperature": 0.0,
        "conversation_id": request.conversation_id,
    }
    if request.prompt_ids is not None:
        return "/v1/completions", {**body, "prompt": request.prompt_ids}
    body["messages"] = request.messages
    if request.tools:
        body["tools"] = request.tools
    return "/v1/chat/completions", body


def _failed(request: TracedRequest, error: str) -> ReplayedRequest:
    return ReplayedRequest(request.conversation_id, request.turn, error=error)
