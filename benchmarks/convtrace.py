"""Conversation traces in the convtrace/1 format as requests whose tokens are runs of consecutive ids.

Equal text becomes equal ids, so that prefixes are shared where they would be. Two renderings of text traces: `exact`
(the next prompt repeats the reply) and `think` (replies start with reasoning, which the template drops at the next
user message and keeps inside a tool loop). Traces of block hashes carry their own rendering. Also writes a small
synthetic trace, so that the benchmark runs where no recorded one is at hand.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from turnkeep.cache.encoded_tokens import TOKEN_BYTES, EncodedTokens

Run = tuple[int, int]  # first id, number of ids
PIECES = re.compile(r"[A-Za-z]+|\d|[^\sA-Za-z\d]+|\s+")
NUM_HEADER, NUM_END, NUM_THINK_OPEN = 3, 2, 2  # tokens of a message's header and end, and of the reasoning mark


@dataclass(slots=True)
class TraceRequest:
    """One turn. turn_start: end of the last user message; stable: tokens of prompt + output that the next repeats."""

    conversation_id: str
    turn: int
    arrival_s: float
    prompt: list[Run]
    output: list[Run]
    num_prompt_tokens: int
    num_output_tokens: int
    turn_start: int
    trunk: int  # end of tools and system message, 0 where unknown
    stable: int
    has_tool_call: bool

    def token_ids(self) -> tuple[EncodedTokens, EncodedTokens]:
        """The prompt, and the prompt with the output."""
        prompt = b"".join(map(_ID_BYTES.of, self.prompt))
        output = b"".join(map(_ID_BYTES.of, self.output))
        return EncodedTokens.from_bytes(prompt), EncodedTokens.from_bytes(prompt + output)


class _IdBytes:
    """All ids from 0 on, encoded once: a run is a piece of that."""

    def __init__(self) -> None:
        self._encoded = memoryview(b"")

    def reserve(self, num_ids: int) -> None:
        if TOKEN_BYTES * num_ids > len(self._encoded):
            self._encoded = memoryview(np.arange(num_ids, dtype=">u4")).cast("B")

    def of(self, run: Run) -> memoryview:
        return self._encoded[TOKEN_BYTES * run[0] : TOKEN_BYTES * (run[0] + run[1])]


_ID_BYTES = _IdBytes()


def load_trace(path: Path, rendering: str) -> list[TraceRequest]:
    """All requests in order of arrival. Raises ValueError for a file that is not convtrace/1."""
    with path.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    if not lines or lines[0].get("format") != "convtrace/1":
        raise ValueError(f"{path.name} is not a convtrace/1 file")
    header, rows = lines[0], lines[1:]
    if header["kind"] == "hash":
        requests = list(_hash_requests(header["block"], rows))
    else:
        requests = list(_text_requests(header.get("tools", {}), rows, rendering))
    runs = (run for request in requests for run in request.prompt + request.output)
    _ID_BYTES.reserve(max(map(sum, runs), default=0))
    return requests


def trace_kind(path: Path) -> str:
    """`text` or `hash`."""
    with path.open(encoding="utf-8") as file:
        return str(json.loads(file.readline())["kind"])


class Ids:
    """Hands out ranges of ids: the same key gets the same ids."""

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._known: dict[object, list[Run]] = {}

    def fresh(self, number: int) -> list[Run]:
        """Ids that nothing else has; the gap after them keeps neighbours from merging."""
        first = self._next
        self._next += number + 1
        return [(first, number)] if number else []

    def of(self, key: object, number: int) -> list[Run]:
        runs = self._known.get(key)
        if runs is None:
            runs = self._known[key] = self.fresh(number)
        return runs

    def of_text(self, kind: str, text: str) -> list[Run]:
        """Ids for as many tokens as a text has; counted once."""
        key = (kind, hashlib.sha256(text.encode()).digest())
        return self._known.get(key) or self.of(key, num_text_tokens(text))


def num_text_tokens(text: str) -> int:
    """An estimate that depends on the text alone, within a tenth of a large byte-pair vocabulary."""
    number = 0
    for found in PIECES.finditer(text):
        piece = found.group()
        if piece[0].isspace():
            number += "\n" in piece or len(piece) > 1
        elif piece[0].isdigit():
            number += 1
        elif piece[0].isascii() and piece[0].isalpha():
            number += 1 + (len(piece) - 1) // 7
        elif piece.isascii():
            number += -(-len(piece) // 2)
        else:
            number += max(1, int(len(piece) * 0.8))
    return number


def _slice(runs: list[Run], start: int, end: int) -> list[Run]:
    """Tokens [start, end) of some runs."""
    found, position = [], 0
    for first, number in runs:
        lower, upper = max(start - position, 0), min(end - position, number)
        if lower < upper:
            found.append((first + lower, upper - lower))
        position += number
        if position >= end:
            break
    return found


def _merged(runs: list[Run]) -> list[Run]:
    merged: list[Run] = []
    for first, number in runs:
        if merged and sum(merged[-1]) == first:
            merged[-1] = (merged[-1][0], merged[-1][1] + number)
        elif number:
            merged.append((first, number))
    return merged


def _length(runs: list[Run]) -> int:
    return sum(number for _, number in runs)


# Text


def _text_requests(tools: dict[str, Any], rows: list[dict[str, Any]], rendering: str) -> Iterator[TraceRequest]:
    ids, history = Ids(), dict[str, list[dict[str, Any]]]()
    for row in rows:
        name = row["conversation_id"]
        messages = history.get(name, []) + row["append"]
        history[name] = [*messages, row["reply"]]
        yield _render(ids, row, messages, tools.get(row["tools"]), is_thinking=rendering == "think")


def _render(
    ids: Ids, row: dict[str, Any], messages: list[dict[str, Any]], tools: Any, *, is_thinking: bool
) -> TraceRequest:
    name, runs = row["conversation_id"], list[Run]()
    if tools:
        runs += ids.of_text("tools", json.dumps(tools))
    last_user = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)
    turn_start = trunk = 0
    for index, message in enumerate(messages):
        role = message["role"]
        runs += ids.of(("header", role), NUM_HEADER)
        if is_thinking and role == "assistant" and index > last_user:
            runs += _thinking(ids, name, index)
        runs += _body(ids, message) + ids.of("end", NUM_END)
        if index == last_user:
            turn_start = _length(runs)
        if role == "system" and index == 0:
            trunk = _length(runs)
    turn_start = turn_start or _length(runs)
    runs += ids.of(("header", "assistant"), NUM_HEADER)
    output = _body(ids, row["reply"]) + ids.of("end", NUM_END)
    if is_thinking:
        thinking = _thinking(ids, name, len(messages))
        runs += _slice(thinking, 0, NUM_THINK_OPEN)
        output = _slice(thinking, NUM_THINK_OPEN, 1 << 30) + output
    has_tool_call = bool(row["reply"].get("tool_calls"))
    num_prompt, num_output = _length(runs), _length(output)
    is_dropped = is_thinking and not has_tool_call
    stable = turn_start if is_dropped else num_prompt + num_output
    return TraceRequest(
        name, row["turn"], row["arrival_s"], _merged(runs), _merged(output), num_prompt, num_output,
        turn_start, trunk, stable, has_tool_call,
    )  # fmt: skip


def _body(ids: Ids, message: dict[str, Any]) -> list[Run]:
    parts = [message.get("content") or ""]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        parts.append(f"{function.get('name')}({text})")
    return ids.of_text("body", "\n".join(part for part in parts if part))


def _thinking(ids: Ids, conversation_id: str, index: int) -> list[Run]:
    """Made-up reasoning: lognormal in length with a median of 150 tokens, the same whenever it is rendered."""
    drawn = random.Random(f"{conversation_id}/{index}").gauss(math.log(150), 0.8)
    number = max(8, int(min(2000, math.exp(drawn))))
    return ids.of("think", NUM_THINK_OPEN) + ids.of(("think", conversation_id, index), number)


# Hashes


@dataclass(slots=True)
class _Before:
    """The turn before: its blocks, the tokens after the last full one, its reply."""

    blocks: list[int]
    num_full: int
    tail: list[Run]
    output: list[Run]
    is_thinking: bool
    turn_start: int


def _hash_requests(block: int, rows: list[dict[str, Any]]) -> Iterator[TraceRequest]:
    """A block id names its tokens and all before them. After the parent's full blocks a continuation goes on with
    the parent's last tokens and its reply, which blocks of its own then cover."""
    expanded = [[first + i for first, n in row["hash_ranges"] for i in range(n)] for row in rows]
    ranks = {name: rank for rank, name in enumerate(sorted({name for blocks in expanded for name in blocks}))}
    expanded = [[ranks[name] for name in blocks] for blocks in expanded]  # token ids must fit in 32 bits
    ids = Ids(len(ranks) * block)
    covered: dict[int, list[Run]] = {}
    by_number: dict[Any, _Before] = {}
    latest: dict[str, _Before] = {}
    for row, blocks in zip(rows, expanded, strict=True):
        name, num_prompt = row["conversation_id"], row["input_len"]
        num_full = min(num_prompt // block, len(blocks))
        before = by_number.get(row["parent"]) if "parent" in row else latest.get(name)
        roles = row.get("append_roles", ["tool_result"])
        if before is not None and _continues(before, blocks, num_full):
            is_dropped = before.is_thinking and "tool_result" not in roles
            _cover(covered, blocks[before.num_full :], before, block, is_dropped=is_dropped)
        prompt = _runs(blocks[:num_full], covered, block)
        rest = num_prompt - num_full * block
        if rest and len(blocks) > num_full and rest <= block:
            tail = _slice(covered.get(blocks[num_full]) or [(blocks[num_full] * block, block)], 0, rest)
        else:
            tail = ids.fresh(rest)
        output = ids.fresh(row["output_len"])
        is_user = "parent" in row or before is None or "tool_result" not in roles
        turn_start = num_prompt if is_user or before is None else min(before.turn_start, num_prompt)
        is_thinking = row.get("thinking", False)
        state = _Before(blocks, num_full, tail, output, is_thinking, turn_start)
        by_number[row.get("request")] = latest[name] = state
        has_tool_call = row.get("tool_call", False)
        stable = num_prompt if is_thinking and not has_tool_call else num_prompt + row["output_len"]
        yield TraceRequest(
            name, row["turn"], row["arrival_s"], _merged(prompt + tail), output, num_prompt, row["output_len"],
            turn_start, 0, stable, has_tool_call,
        )  # fmt: skip


def _runs(blocks: list[int], covered: dict[int, list[Run]], block: int) -> list[Run]:
    """The tokens of some blocks; neighbours that follow each other are one run."""
    runs: list[Run] = []
    first = number = 0
    for name in blocks:
        if name in covered:
            runs += ((first, number), *covered[name])
            first = number = 0
        elif number and first + number == name * block:
            number += block
        else:
            runs.append((first, number))
            first, number = name * block, block
    return [*runs, (first, number)]


def _continues(before: _Before, blocks: list[int], num_full: int) -> bool:
    number = before.num_full
    return number <= num_full and before.blocks[:number] == blocks[:number]


def _cover(covered: dict[int, list[Run]], blocks: list[int], before: _Before, block: int, *, is_dropped: bool) -> None:
    stream = before.tail if is_dropped else before.tail + before.output
    total, position = _length(stream), 0
    for name in blocks:
        if position >= total or name in covered:
            break
        part = _slice(stream, position, position + block)
        have = _length(part)
        covered[name] = _merged([*part, (name * block + have, block - have)])
        position += block


# A trace of our own


def write_synthetic_trace(path: Path, seed: int = 0, num_conversations: int = 60) -> None:
    """Agents of three kinds that share a system prompt each, with tool loops and people who answer slowly."""
    chance = random.Random(seed)
    words = [f"word{index}" for index in range(400)]

    def text(number: int) -> str:
        return " ".join(chance.choice(words) for _ in range(number))

    systems = [text(chance.randrange(400, 900)) for _ in range(3)]
    rows: list[dict[str, Any]] = []
    start_s = 0.0
    for index in range(num_conversations):
        start_s += chance.expovariate(1 / 8)
        now_s = start_s
        append = [{"role": "system", "content": chance.choice(systems)}, {"role": "user", "content": text(60)}]
        for turn in range(chance.randrange(3, 16)):
            is_call = chance.random() < 0.7
            reply: dict[str, Any] = {"role": "assistant", "content": text(chance.randrange(5, 60))}
            if is_call:
                reply["tool_calls"] = [{"function": {"name": "look_up", "arguments": text(5)}}]
            rows.append(
                {
                    "conversation_id": f"c{index}", "turn": turn, "arrival_s": round(now_s, 3), "tools": None,
                    "append": append, "reply": reply,
                }
            )  # fmt: skip
            now_s += chance.lognormvariate(math.log(4 if is_call else 40), 0.6)
            size = chance.randrange(20, 400) if is_call else chance.randrange(10, 60)
            append = [{"role": "tool" if is_call else "user", "content": text(size)}]
    rows.sort(key=lambda row: (row["arrival_s"], row["conversation_id"], row["turn"]))
    with path.open("w", encoding="utf-8") as file:
        for item in [{"format": "convtrace/1", "kind": "text", "tools": {}}, *rows]:
            file.write(json.dumps(item) + "\n")
