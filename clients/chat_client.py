"""A small streaming client for the terminal commands: one conversation over HTTP, with what every request cost.

Plain aiohttp; it uses nothing of the server but its address.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec


class RequestFailedError(Exception):
    """The server answered with an error, or the stream broke off."""


@dataclass(slots=True)
class Reply:
    """One answer and its cost."""

    message: dict[str, Any]  # the assistant message, to be sent back as it is
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    time_to_first_token_s: float
    duration_s: float

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that had to be computed."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = self.message.get("tool_calls", [])
        return calls


@dataclass(slots=True)
class _Parts:
    """An answer while it comes in."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    first_token_s: float | None = None

    def add_calls(self, pieces: list[dict[str, Any]]) -> None:
        for piece in pieces:
            if piece["index"] == len(self.calls):
                function = {"name": piece["function"]["name"], "arguments": ""}
                self.calls.append({"id": piece["id"], "type": "function", "function": function})
            self.calls[piece["index"]]["function"]["arguments"] += piece["function"].get("arguments") or ""

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


OnText = Callable[[str, str], None]  # kind ("reasoning" or "content"), text


class ChatClient:
    """One conversation with one model. The caller keeps the messages."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, api_key: str | None) -> None:
        self.model = model
        self.conversation_id = f"terminal-{uuid.uuid4().hex}"
        self._session = session
        self._url = url
        self._headers = _headers(api_key)

    @classmethod
    async def connect(cls, session: aiohttp.ClientSession, url: str, api_key: str | None) -> ChatClient:
        """Take the server's first model. Raises RequestFailedError, aiohttp.ClientError."""
        async with session.get(f"{url}/v1/models", headers=_headers(api_key)) as response:
            if response.status != 200:
                raise RequestFailedError(await _error_message(response))
            models = (await response.json())["data"]
        return cls(session, url, models[0]["id"], api_key)

    async def send(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        on_text: OnText | None = None,
        **options: Any,
    ) -> Reply:
        """Stream one answer; `options` are further fields of the request. Raises RequestFailedError."""
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "conversation_id": self.conversation_id,
            **options,
        }
        if tools:
            body["tools"] = tools
        parts, started_s = _Parts(), time.monotonic()
        url = f"{self._url}/v1/chat/completions"
        async with self._session.post(url, data=msgspec.json.encode(body), headers=self._headers) as response:
            if response.status != 200:
                raise RequestFailedError(await _error_message(response))
            async for chunk in _events(response):
                _take(chunk, parts, on_text)
        if parts.finish_reason is None or parts.usage is None:
            raise RequestFailedError("the answer broke off")
        now_s = time.monotonic()
        usage = parts.usage
        return Reply(
            message=parts.message(),
            finish_reason=parts.finish_reason,
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            num_generated_tokens=usage["completion_tokens"],
            time_to_first_token_s=(parts.first_token_s or now_s) - started_s,
            duration_s=now_s - started_s,
        )


def _take(chunk: dict[str, Any], parts: _Parts, on_text: OnText | None) -> None:
    if "error" in chunk:
        raise RequestFailedError(chunk["error"]["message"])
    if chunk.get("usage"):
        parts.usage = chunk["usage"]
    for choice in chunk["choices"]:
        delta = choice["delta"]
        reasoning, content = delta.get("reasoning_content") or "", delta.get("content") or ""
        if parts.first_token_s is None and (reasoning or content or delta.get("tool_calls")):
            parts.first_token_s = time.monotonic()
        parts.reasoning += reasoning
        parts.content += content
        parts.add_calls(delta.get("tool_calls") or [])
        parts.finish_reason = choice.get("finish_reason") or parts.finish_reason
        for kind, text in (("reasoning", reasoning), ("content", content)):
            if text and on_text is not None:
                on_text(kind, text)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The payloads of a stream up to [DONE]. Raises RequestFailedError when the connection breaks before it."""
    buffer = b""
    try:
        async for data in response.content.iter_any():
            *frames, buffer = (buffer + data).split(b"\n\n")
            for frame in frames:
                if frame == b"data: [DONE]":
                    return
                if frame.startswith(b"data: "):
                    yield msgspec.json.decode(frame[6:])
    except aiohttp.ClientPayloadError:
        raise RequestFailedError("the connection broke off in the middle of the answer") from None


async def _error_message(response: aiohttp.ClientResponse) -> str:
    try:
        return f"the server answered {response.status}: {(await response.json())['error']['message']}"
    except (ValueError, KeyError, TypeError, aiohttp.ClientError):
        return f"the server answered {response.status}"


def _headers(api_key: str | None) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return headers
