"""The grammar of a response's events, checked event by event, and the response that they add up to."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

Event = dict[str, Any]

TERMINAL = {"response.completed", "response.incomplete", "response.failed"}


def read_events(body: bytes) -> list[Event]:
    """The events of a stream's body; every frame is named like its event."""
    assert body.endswith(b"\n\n"), body[-80:]
    events = []
    for frame in body.decode().split("\n\n")[:-1]:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


async def read_until(response: aiohttp.ClientResponse, marker: bytes, data: bytes = b"") -> bytes:
    """The body so far, with `marker` in it."""
    while marker not in data:
        chunk = await response.content.readany()
        assert chunk, f"the stream ended without {marker!r}: {data[-300:]!r}"
        data += chunk
    return data


def check_events(events: list[Event], first_number: int = 0) -> dict[str, Any]:
    """Raises AssertionError for anything that breaks the grammar. Returns the response of the last event."""
    assert [event["sequence_number"] for event in events] == list(range(first_number, first_number + len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert events[0]["response"]["output"] == []
    assert kinds.count("response.in_progress") == 1
    assert [kind in TERMINAL for kind in kinds] == [False] * (len(kinds) - 1) + [True], kinds
    ids = {event["response"]["id"] for event in events if "response" in event}
    assert len(ids) == 1
    output: list[dict[str, Any]] = []
    items = [event for event in events if "output_index" in event]
    while items:
        added = items.pop(0)
        assert added["type"] == "response.output_item.added"
        assert added["output_index"] == len(output)
        assert added["item"]["status"] == "in_progress"
        own: list[Event] = []
        while items[0]["type"] != "response.output_item.done":
            own.append(items.pop(0))
            assert own[-1]["item_id"] == added["item"]["id"]
            assert own[-1]["output_index"] == len(output)
        done = items.pop(0)
        assert done["output_index"] == len(output)
        item = done["item"]
        assert {key: item[key] for key in ("id", "type")} == {key: added["item"][key] for key in ("id", "type")}
        check_item(own, item)
        output.append(item)
    response: dict[str, Any] = events[-1]["response"]
    assert response["output"] == output
    assert all(item["status"] == "completed" for item in output[:-1])
    assert len({item["id"] for item in output}) == len(output)
    return response


def check_item(own: list[Event], item: dict[str, Any]) -> None:
    """The events between an item's beginning and its end."""
    kinds = [event["type"].removeprefix("response.") for event in own]
    if item["type"] == "function_call":
        text, delta, wrap = item["arguments"], "function_call_arguments", []
        assert own[-1]["name"] == item["name"]
        assert own[-1]["arguments"] == text
    elif item["type"] == "custom_tool_call":
        text, delta, wrap = item["input"], "custom_tool_call_input", []
        assert own[-1]["input"] == text
    else:
        is_summary = item["type"] == "reasoning" and bool(item["summary"])
        (part,) = item["summary"] if is_summary else item["content"]
        text = part["text"]
        delta = {"output_text": "output_text", "reasoning_text": "reasoning_text"}.get(
            part["type"], "reasoning_summary_text"
        )
        wrap = ["reasoning_summary_part" if is_summary else "content_part"]
        assert own[0]["part"] == {**part, "text": "", **({"logprobs": []} if "logprobs" in part else {})}
        assert own[-1]["part"] == part
        assert own[-2]["text"] == text
    deltas = [event["delta"] for event in own if event["type"] == f"response.{delta}.delta"]
    assert "".join(deltas) == text
    assert all(deltas) or item["type"] == "custom_tool_call"
    expected = [*(f"{part}.added" for part in wrap), *[f"{delta}.delta"] * len(deltas), f"{delta}.done"]
    assert kinds == [*expected, *(f"{part}.done" for part in wrap)]


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """What of a response does not change from one run to the next."""
    own = response["id"].removeprefix("resp_")
    text = json.dumps({**response, "created_at": 0, "completed_at": 0}).replace(own, "ID")
    for item in response["output"]:
        if "call_id" in item:
            text = text.replace(item["call_id"], "CALL")
    result: dict[str, Any] = json.loads(text)
    return result
