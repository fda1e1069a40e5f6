"""Conversation traces (format convtrace/1) as requests that can be sent: messages, or token ids where there is no text.

The format: a JSON header line, then one request a line in order of arrival. Text traces hold the messages that a turn
added and the reply that was given; hash traces hold ids of blocks of tokens, an id standing for a block and all before.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = "convtrace/1"
FIRST_TOKEN_ID = 100  # below it stand control tokens


class TraceError(ValueError):
    """The file is no trace that can be replayed."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One turn. Either messages (with tools) or prompt_ids; output_tokens: how many were answered."""

    conversation_id: str
    turn: int
    arrival_s: float
    output_tokens: int
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt_ids: list[int] | None = None


def read_trace(path: Path, *, vocab_size: int = 1000, max_requests: int | None = None) -> list[TracedRequest]:
    """All requests in order of arrival. vocab_size bounds made-up ids of hash traces. Raises TraceError, OSError."""
    with path.open(encoding="utf-8") as file:
        lines = iter(file)
        try:
            header = json.loads(next(lines, ""))
            if header.get("format") != FORMAT:
                raise TraceError(f"{path.name} is not in the format {FORMAT}")
            rows = (json.loads(line) for line in lines if line.strip())
            if header["kind"] == "hash":
                requests = _hash_requests(rows, header["block"], vocab_size)
            else:
                requests = _text_requests(rows, header.get("tools") or {})
            found: list[TracedRequest] = []
            for request in requests:
                if len(found) == max_requests:
                    break
                found.append(request)
        except (json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
            raise TraceError(f"{path.name} cannot be read: {error!r}") from None
    return found


def _text_requests(rows: Iterator[dict[str, Any]], tools: dict[str, Any]) -> Iterator[TracedRequest]:
    """The recorded replies go into the history, whatever a server answers: every replay sends the same prompts."""
    histories: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        history = histories[row["conversation_id"]]
        history.extend(row["append"])
        yield TracedRequest(
            row["conversation_id"], row["turn"], row["arrival_s"], row["output_len"],
            messages=list(history), tools=tools.get(row["tools"]) if row.get("tools") else None,
        )  # fmt: skip
        history.append(row["reply"])


def _hash_requests(rows: Iterator[dict[str, Any]], block_tokens: int, vocab_size: int) -> Iterator[TracedRequest]:
    """Each block id gets its own tokens, the same every time; what follows the full blocks is the turn's own."""
    for row in rows:
        ids: list[int] = []
        for first, count in row["hash_ranges"]:
            for block in range(first, first + count):
                ids.extend(_tokens(f"block {block}", block_tokens, vocab_size))
        missing = row["input_len"] - len(ids)
        if missing > 0:
            ids.extend(_tokens(f"{row['conversation_id']} {row['turn']}", missing, vocab_size))
        yield TracedRequest(
            row["conversation_id"], row["turn"], row["arrival_s"], row["output_len"], prompt_ids=ids[: row["input_len"]]
        )


def _tokens(key: str, count: int, vocab_size: int) -> list[int]:
    return random.Random(key).choices(range(FIRST_TOKEN_ID, vocab_size), k=count)
