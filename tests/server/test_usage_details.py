"""Fields of ours in `usage`: what was lost and what was drafted reads the same in every API shape, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import CHAT, LiveServer, live_server, saying, user
from scripted_engine import Script

from turnkeep.server.text_model import TextModel

DRAFTS = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 3, "accepted_by_depth": [4, 2]}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": user("Hello!")}),
    "completions": ("/v1/completions", {"prompt": "Hello!"}),
    "responses": ("/v1/responses", {"input": "Hello!"}),
    "messages": ("/v1/messages", {"messages": user("Hello!"), "max_tokens": 64}),
}


async def usages(server: LiveServer, shape: str, **fields: Any) -> list[dict[str, Any]]:
    """Of the plain answer and of the stream."""
    path, body = SHAPES[shape]
    status, plain = await server.post({"model": "demo", **body, **fields}, path)
    assert status == 200, plain
    asked = {"stream_options": {"include_usage": True}} if shape in ("chat", "completions") else {}
    sent = {"model": "demo", "stream": True, **body, **fields, **asked}
    async with server.session.post(server.url + path, json=sent) as response:
        assert response.status == 200, await response.text()
        return [plain["usage"], last_usage((await response.read()).decode())]


def last_usage(stream: str) -> dict[str, Any]:
    payloads = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    found = [payload.get("usage") or payload.get("response", {}).get("usage") for payload in payloads]
    usage: dict[str, Any] = [one for one in found if one][-1]
    return usage


def details(usage: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of the prompt and of the output, wherever the shape puts it."""
    output = next(usage[name] for name in ("completion_tokens_details", "output_tokens_details") if name in usage)
    prompt = next((usage[name] for name in ("prompt_tokens_details", "input_tokens_details") if name in usage), usage)
    return prompt, output


def drafted(text_model: TextModel) -> Script:
    return saying(text_model, "<think>Yes.</think>Hello there", num_draft_nodes=9, accepted_by_depth=(4, 2))


@pytest.mark.parametrize("shape", SHAPES)
async def test_every_shape_says_how_many_drafts_were_right_by_depth(text_model: TextModel, shape: str) -> None:
    async with live_server(drafted(text_model), text_model=text_model) as server:
        for usage in await usages(server, shape):
            _, output = details(usage)
            assert {name: output[name] for name in DRAFTS} == DRAFTS


@pytest.mark.parametrize("shape", SHAPES)
async def test_no_shape_speaks_of_drafts_or_losses_where_there_are_none(text_model: TextModel, shape: str) -> None:
    async with live_server(saying(text_model, "Hello there"), text_model=text_model) as server:
        for usage in await usages(server, shape):
            prompt, output = details(usage)
            assert not {*DRAFTS, "lost_tokens"} & {*prompt, *output}


@pytest.mark.parametrize("shape", SHAPES)
async def test_every_shape_says_what_was_computed_again_and_why(text_model: TextModel, shape: str) -> None:
    script = saying(text_model, "Hello there", num_lost_tokens=5, loss_reason="no_snapshot")
    async with live_server(script, text_model=text_model) as server:
        for usage in await usages(server, shape):
            prompt, _ = details(usage)
            assert prompt["lost_tokens"] == {"no_snapshot": 5}


async def test_drafts_of_all_choices_and_losses_of_all_prompts_are_added_up(text_model: TextModel) -> None:
    script = drafted(text_model)
    script.num_lost_tokens, script.loss_reason = 5, "evicted"
    async with live_server(script, text_model=text_model) as server:
        for usage in await usages(server, "completions", prompt=["One", "Two"], n=2):
            prompt, output = details(usage)
            assert prompt["lost_tokens"] == {"evicted": 10}
            assert output["accepted_by_depth"] == [16, 8]
            assert output["reasoning_tokens"] == 0  # markup is text here


async def test_messages_tell_how_many_tokens_were_thought(text_model: TextModel) -> None:
    script = saying(text_model, "<think>Well, well.</think>Hello")
    async with live_server(script, text_model=text_model) as server:
        chat, *_ = await usages(server, "chat")
        num_thought = chat["completion_tokens_details"]["reasoning_tokens"]
        assert num_thought > 0
        for usage in await usages(server, "messages"):
            assert usage["output_tokens_details"] == {"thinking_tokens": num_thought}
