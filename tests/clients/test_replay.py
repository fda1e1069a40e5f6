"""Traces become requests that say the same on every replay; what they cost is measured, failures are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from live_server import live_server, saying
from scripted_engine import Script

from turnkeep.clients.replay import Replay, ReplayedRequest, ReplayOptions, replay
from turnkeep.clients.replay_report import percentile, plot, summary
from turnkeep.clients.trace_file import TraceError, read_trace
from turnkeep.engine.messages import Submit
from turnkeep.server.cli import main
from turnkeep.server.text_model import TextModel


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def write(path: Path, header: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    lines = [{"format": "convtrace/1", **header}, *rows]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def turn(conversation: str, number: int, arrival_s: float, **fields: Any) -> dict[str, Any]:
    made = {"conversation_id": conversation, "turn": number, "arrival_s": arrival_s, "input_len": 9, "output_len": 3}
    return {**made, **fields}


@pytest.fixture
def text_trace(tmp_path: Path) -> Path:
    reply = {"role": "assistant", "content": "Recorded."}
    rows = [
        turn("a", 0, 0.0, tools="desk", append=[user("One")], reply=reply),
        turn("b", 0, 0.1, tools=None, append=[user("Other")], reply=reply),
        turn("a", 1, 0.2, tools="desk", append=[user("Two")], reply=reply),
    ]
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    return write(tmp_path / "text.jsonl", {"kind": "text", "tools": {"desk": [tool]}}, rows)


def test_the_recorded_reply_goes_into_the_history(text_trace: Path) -> None:
    first, other, second = read_trace(text_trace)
    assert (first.messages, other.tools, second.turn) == ([user("One")], None, 1)
    assert second.messages == [user("One"), {"role": "assistant", "content": "Recorded."}, user("Two")]
    assert second.tools is not None


def test_equal_blocks_become_equal_tokens(tmp_path: Path) -> None:
    rows = [
        turn("a", 0, 0.0, input_len=20, hash_ranges=[[7, 2]]),
        turn("a", 1, 1.0, input_len=27, hash_ranges=[[7, 3]]),
    ]
    path = write(tmp_path / "hash.jsonl", {"kind": "hash", "block": 8}, rows)
    first, second = read_trace(path, vocab_size=300)
    assert first.prompt_ids is not None
    assert second.prompt_ids is not None
    assert (len(first.prompt_ids), len(second.prompt_ids)) == (20, 27)
    assert first.prompt_ids[:16] == second.prompt_ids[:16]
    assert first.prompt_ids[16:] != second.prompt_ids[16:20]
    assert all(100 <= token < 300 for token in second.prompt_ids)
    assert read_trace(path, vocab_size=300) == [first, second]
    assert read_trace(path, vocab_size=300, max_requests=1) == [first]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "convtrace/1"}', "no", '{"format": "convtrace/1", "kind": "text"}\n{}']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"bad\.jsonl"):
        read_trace(path)


async def test_conversations_keep_their_order_and_what_fails_is_counted(
    text_model: TextModel, text_trace: Path
) -> None:
    def direct(submit: Submit) -> Script:
        if submit.conversation_id == "b":
            return Script(refuse="too large")
        return saying(text_model, "Hi.", num_cached_tokens=5)

    seen: list[ReplayedRequest] = []
    async with live_server(direct, text_model=text_model) as server, aiohttp.ClientSession() as session:
        options = ReplayOptions("demo", concurrency=2, max_output_tokens=2)
        result = await replay(session, server.url, read_trace(text_trace), options, seen.append)
        assert [submit.sampling.max_new_tokens for submit in server.engine.submitted] == [2, 2, 2]
    assert [one.turn for one in seen if one.conversation_id == "a"] == [0, 1]
    numbers = summary(result)
    assert (numbers["requests"], numbers["failed"]) == (3, 1)
    assert numbers["cached_tokens"] == 10
    assert "too large" in next(one.error or "" for one in seen if one.conversation_id == "b")


async def test_the_recorded_pauses_are_kept_where_wanted(text_model: TextModel, text_trace: Path) -> None:
    async with (
        live_server(saying(text_model, "Hi."), text_model=text_model) as server,
        aiohttp.ClientSession() as session,
    ):
        options = ReplayOptions("demo", arrival_scale=1.0)
        result = await replay(session, server.url, read_trace(text_trace), options, lambda _: None)
    assert result.wall_s >= 0.2


def test_the_summary_of_nothing_divides_by_nothing(tmp_path: Path) -> None:
    numbers = summary(Replay([ReplayedRequest("a", 0, error="gone")], wall_s=0.0))
    assert (numbers["cached_share"], numbers["ttft_s_p50"], numbers["failed"]) == (0.0, None, 1)
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plot(Replay([ReplayedRequest("a", 0, 10, 5, 3, 0.1, 0.2)]), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


async def test_the_command_prints_a_table_and_one_json_line(
    text_model: TextModel, text_trace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import asyncio

    async with live_server(saying(text_model, "Hi."), text_model=text_model) as server:
        arguments = ["replay", str(text_trace), "--url", server.url, "--requests", "2"]
        assert await asyncio.to_thread(main, arguments) == 0
    output = capfd.readouterr().out
    assert json.loads(output.strip().splitlines()[-1])["requests"] == 2
    assert "cached share" in output


def test_a_missing_trace_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "none.jsonl"), "--url", "http://127.0.0.1:9"]) == 1
    assert capfd.readouterr().err.count("\n") == 1
