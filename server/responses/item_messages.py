"""From the items of a conversation to the messages that a chat template is shown.

An answer's reasoning, text and calls are items of their own; together they are one assistant message, so that a turn
that comes back reads exactly as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from turnkeep.server.messages_api.signature import make_signature, read_signature
from turnkeep.server.responses.tools import custom_arguments, flat_name
from turnkeep.server.stores import Item

Message = dict[str, Any]


def to_messages(items: Iterable[Item], instructions: str | None = None) -> list[Message]:
    """Messages in the form of chat completions. Items that mean nothing to the model leave nothing."""
    messages: list[Message] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    answer: Message | None = None  # the assistant message that is being put together
    last_kind = ""
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            answer = None
            messages.append({"role": item["role"], "content": _content(item["content"])})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            answer = None
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        elif kind == "compaction":
            summary = read_encrypted(item)
            if summary is None:  # another server's
                continue
            answer = None
            messages.append({"role": "user", "content": summary})
        elif kind == "reasoning" and not reasoning_of(item):
            continue
        elif kind in ("message", "reasoning", "function_call", "custom_tool_call"):
            # Two texts in a row are two messages; everything else that follows belongs to the same one.
            begins = answer is None or (last_kind == "message" and kind in ("message", "reasoning"))
            if answer is None or begins:
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            _add_to_answer(answer, item)
        else:
            continue
        last_kind = kind
    return messages


def _add_to_answer(answer: Message, item: Item) -> None:
    kind = item["type"]
    if kind == "message":
        answer["content"] += text_of(item["content"])
    elif kind == "reasoning":
        answer["reasoning_content"] = answer.get("reasoning_content", "") + reasoning_of(item)
    else:
        arguments = item["arguments"] if kind == "function_call" else custom_arguments(item["input"])
        function = {"name": flat_name(item["name"], item.get("namespace")), "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)


def _content(parts: list[Item]) -> str | list[Item]:
    """One text, or where a part is marked the parts."""
    return parts if any("prompt_cache_breakpoint" in part for part in parts) else text_of(parts)


def text_of(parts: Iterable[Item]) -> str:
    return "".join(part["text"] for part in parts)


def reasoning_of(item: Item) -> str:
    """The exact text where it came along sealed, else the content, else the summary (some clients return only that)."""
    sealed = read_encrypted(item)
    if sealed is not None:
        return sealed
    return text_of(item.get("content") or item.get("summary") or ())


def make_encrypted(text: str) -> str:
    """What stands in `encrypted_content`: the text itself, sealed against the trimming that clients do."""
    return make_signature(text)


def read_encrypted(item: Item) -> str | None:
    """None where there is none of ours."""
    return read_signature(item.get("encrypted_content"))
