"""The items of a conversation as clients send them, checked and brought into the form in which they are stored.

Equal items give equal stored forms, whether content is a string or parts. Refusals name the item's field.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from turnkeep.server import errors
from turnkeep.server.responses.shapes import check_depth
from turnkeep.server.stores import Item

MAX_ITEMS = 20_000
MAX_ID_CHARS = 128
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {
    "input_text": "text", "output_text": "text", "text": "text", "summary_text": "text", "reasoning_text": "text",
    "refusal": "refusal",
}  # fmt: skip
# What a provider's own tools leave behind. It is kept and listed, and the model is not shown it.
HOSTED = frozenset(
    "additional_tools apply_patch_call apply_patch_call_output code_interpreter_call compaction_trigger computer_call "
    "computer_call_output configuration_update file_search_call image_generation_call local_shell_call "
    "local_shell_call_output mcp_approval_request mcp_approval_response mcp_call mcp_list_tools program program_output "
    "shell_call shell_call_output tool_search_call tool_search_output web_search_call".split()
)
ID_PREFIXES = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco", "compaction": "cmp",
}  # fmt: skip


def read_items(given: str | Sequence[Any], path: str = "input") -> list[Item]:
    """Checked items in stored form; ids only where the client gave usable ones. A string is a user message.

    Raises ApiError 400. An item_reference stays one: who has the items resolves it.
    """
    if isinstance(given, str):
        return [message_item("user", given)]
    if len(given) > MAX_ITEMS:
        raise errors.bad_request(f"{path} holds at most {MAX_ITEMS} items.", path)
    return [_read_item(item, f"{path}[{index}]") for index, item in enumerate(given)]


def message_item(role: str, text: str) -> Item:
    """A message of one text."""
    return {"type": "message", "role": role, "status": "completed", "content": [_text_part(text, role)]}


def with_ids(items: Sequence[Item], make_id: Callable[[Item, int], str], taken: Collection[str] = ()) -> list[Item]:
    """The same items, each with an id of its own; make_id(item, number) names those that have none."""
    seen = set(taken)
    named = []
    for number, item in enumerate(items):
        id = item.get("id")
        if id is None or id in seen:
            id = make_id(item, number)
        seen.add(id)
        named.append({"id": id, **{key: value for key, value in item.items() if key != "id"}})
    return named


def id_prefix(item: Mapping[str, Any]) -> str:
    return ID_PREFIXES.get(item["type"], "item")


def _read_item(item: Any, path: str) -> Item:
    if not isinstance(item, Mapping):
        raise errors.bad_request(f"{path} must be an object.", path)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    if not isinstance(kind, str):
        raise errors.bad_request(f"{path}.type must be a string.", f"{path}.type")
    if kind in HOSTED:
        check_depth(item, path)
        return {**{key: value for key, value in item.items() if key != "id"}, "type": kind, **_given_id(item)}
    read = _READERS.get(kind)
    if read is None:
        raise errors.unsupported(
            f"{path}.type: items of type {errors.shorten(kind, 40)!r} are not known.", f"{path}.type"
        )
    return {"type": kind, **_given_id(item), **read(item, path)}


def _given_id(item: Mapping[str, Any]) -> Item:
    id = item.get("id")
    usable = isinstance(id, str) and 0 < len(id) <= MAX_ID_CHARS and id.isascii() and id.isprintable() and "/" not in id
    return {"id": id} if usable else {}


def _message(item: Mapping[str, Any], path: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise errors.bad_request(f"{path}.role must be one of {', '.join(ROLES)}.", f"{path}.role")
    parts = [_text_part(text, role) for text in _texts(content, f"{path}.content")]
    if isinstance(content, list):
        parts = [{**part, **_cache_mark(given)} for part, given in zip(parts, content, strict=True)]
    return {"role": role, "status": "completed", "content": parts}


def _cache_mark(part: Mapping[str, Any]) -> Item:
    """The client's word that later prompts will repeat everything up to the end of this part; it stays with the item,
    since it is as true in the turns that follow."""
    mark = part.get("prompt_cache_breakpoint")
    if not isinstance(mark, Mapping):
        return {}
    known = {key: mark[key] for key in ("mode", "ttl") if isinstance(mark.get(key), str)}
    return {"prompt_cache_breakpoint": {key: errors.shorten(value, MAX_ID_CHARS) for key, value in known.items()}}


def _text_part(text: str, role: str) -> Item:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _texts(content: Any, path: str) -> list[str]:
    """The texts of a content field: a string, or a list of text parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise errors.bad_request(f"{path} must be a string or a list of parts.", path)
    texts = []
    for index, part in enumerate(content):
        part_path = f"{path}[{index}]"
        kind = part.get("type", "input_text") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise errors.bad_request(f"{part_path} must be an object with a type.", part_path)
        if kind not in TEXT_PARTS:
            raise errors.unsupported(f"{part_path}.type: only text parts are served.", f"{part_path}.type")
        texts.append(_string(part, TEXT_PARTS[kind], part_path))
    return texts


def _call(item: Mapping[str, Any], path: str) -> Item:
    call = {
        "call_id": _string(item, "call_id", path),
        "name": _string(item, "name", path),
        # Whatever stands in the arguments is shown to the model as it is: a call that failed must not end a session.
        "arguments": "" if item.get("arguments") is None else _string(item, "arguments", path),
        "status": "completed",
    }
    if isinstance(item.get("namespace"), str):
        call["namespace"] = item["namespace"]
    return call


def _custom_call(item: Mapping[str, Any], path: str) -> Item:
    call = {
        "call_id": _string(item, "call_id", path),
        "name": _string(item, "name", path),
        "input": _string(item, "input", path),
        "status": "completed",
    }
    if isinstance(item.get("namespace"), str):
        call["namespace"] = item["namespace"]
    return call


def _call_output(item: Mapping[str, Any], path: str) -> Item:
    output = item.get("output")
    text = output if isinstance(output, str) else "".join(_texts(output, f"{path}.output"))
    return {"call_id": _string(item, "call_id", path), "output": text, "status": "completed"}


def _reasoning(item: Mapping[str, Any], path: str) -> Item:
    def texts(key: str) -> list[str]:
        return [] if item.get(key) is None else _texts(item[key], f"{path}.{key}")

    reasoning: Item = {"summary": [{"type": "summary_text", "text": text} for text in texts("summary")]}
    content = texts("content")
    if content:
        reasoning["content"] = [{"type": "reasoning_text", "text": text} for text in content]
    if item.get("encrypted_content") is not None:
        reasoning["encrypted_content"] = _string(item, "encrypted_content", path)
    return reasoning


def _compaction(item: Mapping[str, Any], path: str) -> Item:
    return {"encrypted_content": _string(item, "encrypted_content", path)}


def _reference(item: Mapping[str, Any], path: str) -> Item:
    return {"id": _string(item, "id", path)}


def _string(item: Mapping[str, Any], key: str, path: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise errors.bad_request(f"{path}.{key} must be a string.", f"{path}.{key}")
    return value


_READERS: dict[str, Callable[[Mapping[str, Any], str], Item]] = {
    "message": _message,
    "function_call": _call,
    "function_call_output": _call_output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _call_output,
    "reasoning": _reasoning,
    "compaction": _compaction,
    "item_reference": _reference,
}
