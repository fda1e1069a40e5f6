"""The `messages` and `tools` of a request in one canonical form: what a chat template gets to see.

Equal conversations give equal canonical messages, however a client writes them (parts or string, null or absent,
reasoning under either name). Pure; knows no template and no tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnkeep.server.tokenizer import replace_lone_surrogates

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
RESERVED_KWARGS = frozenset({"messages", "tools", "chat_template", "add_generation_prompt", "documents"})
MAX_DEPTH = 64
RELAXED_ID_CHARS = 9

Message = dict[str, Any]


class TemplateError(ValueError):
    """The request cannot be rendered; the message is fit for a 400. param names the field at fault, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MessageError(TemplateError):
    """A message or tool has the wrong shape."""


def normalize_messages(messages: object) -> list[Message]:
    """Canonical messages: role, content (always a string), and where present reasoning_content, tool_calls (arguments
    as a dict when they are a JSON object, else as the string they are), tool_call_id and a tool's name.

    Unknown keys are dropped. Raises MessageError with the field's path for anything a model cannot be shown.
    """
    if not isinstance(messages, list):
        raise MessageError("messages must be a list", "messages")
    if not messages:
        raise MessageError("messages must not be empty", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, path: str) -> Message:
    if not isinstance(message, Mapping):
        raise MessageError(f"{path} must be an object", path)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise MessageError(f"{path}.role must be one of {', '.join(ROLES)}", f"{path}.role")
    role = ROLES[role]
    result: Message = {"role": role, "content": _content(message.get("content"), f"{path}.content")}
    if role == "assistant":
        _add_assistant_fields(message, result, path)
    elif message.get("content") is None:
        raise MessageError(f"{path}.content must be a string or a list of text parts", f"{path}.content")
    if role == "tool":
        for key in ("tool_call_id", "name"):
            value = message.get(key)
            if value is not None:
                result[key] = _string(value, f"{path}.{key}")
    return result


def _add_assistant_fields(message: Mapping[str, Any], result: Message, path: str) -> None:
    for key in ("reasoning_content", "reasoning"):
        value = message.get(key)
        if value is not None:
            reasoning = _content(value, f"{path}.{key}")
            if reasoning:
                result["reasoning_content"] = reasoning
            break
    calls = message.get("tool_calls")
    legacy = message.get("function_call")
    if calls is None and legacy is not None:
        calls = [{"function": legacy}]
    if not calls:
        return
    if not isinstance(calls, list):
        raise MessageError(f"{path}.tool_calls must be a list", f"{path}.tool_calls")
    result["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise MessageError(f"{path} must be an object with a function", path)
    result: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        result["id"] = _string(call["id"], f"{path}.id")
    result["function"] = {
        "name": _string(function.get("name"), f"{path}.function.name"),
        "arguments": parse_arguments(function.get("arguments"), f"{path}.function.arguments"),
    }
    return result


def parse_arguments(arguments: object, path: str = "arguments") -> dict[str, Any] | str:
    """A call's arguments as a dict when they are a JSON object (nothing counts as an empty one), else the raw string:
    clients send back what a model wrote, valid or not."""
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return {str(key): value for key, value in arguments.items()}
    if not isinstance(arguments, str):
        raise MessageError(f"{path} must be a string", path)
    if not arguments.strip():
        return {}
    try:
        parsed = json.loads(arguments, parse_constant=_refuse_constant)
        if isinstance(parsed, dict) and depth_of(parsed) <= MAX_DEPTH:
            return parsed
    except (ValueError, RecursionError):
        pass
    return replace_lone_surrogates(arguments)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def depth_of(value: object, limit: int = MAX_DEPTH + 1) -> int:
    """Nesting depth of plain data, counted up to `limit`."""
    if limit <= 0 or not isinstance(value, dict | list):
        return 0
    children = value.values() if isinstance(value, dict) else value
    return 1 + max((depth_of(child, limit - 1) for child in children), default=0)


def _content(content: object, path: str) -> str:
    """Text of a content field: a string, or the joined text of its parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return replace_lone_surrogates(content)
    if not isinstance(content, list):
        raise MessageError(f"{path} must be a string or a list of text parts", path)
    return replace_lone_surrogates("".join(part_text(part, f"{path}[{i}]") for i, part in enumerate(content)))


def part_text(part: object, path: str) -> str:
    """Text of one part of a content list. Raises MessageError for what is no text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise MessageError(f"{path} must be a text part", path)
    kind = part.get("type", "text")
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise MessageError(f"{path}.type: only text parts are supported", f"{path}.type")
    return _string(part.get(key), f"{path}.{key}")


def _string(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise MessageError(f"{path} must be a string", path)
    return replace_lone_surrogates(value)


def normalize_tools(tools: object) -> list[dict[str, Any]] | None:
    """Tools as templates want them: {"type": "function", "function": {name, description?, parameters}}.

    None for none. A tool without parameters takes none. Raises MessageError, for an empty list too.
    """
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise MessageError("tools must be a non-empty list", "tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]


def _tool(tool: object, path: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise MessageError(f"{path}: only tools of type function are supported", f"{path}.type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise MessageError(f"{path}.function must be an object", f"{path}.function")
    result: dict[str, Any] = {"name": _string(function.get("name"), f"{path}.function.name")}
    if not result["name"]:
        raise MessageError(f"{path}.function.name must not be empty", f"{path}.function.name")
    if function.get("description") is not None:
        result["description"] = _string(function["description"], f"{path}.function.description")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise MessageError(f"{path}.function.parameters must be an object", f"{path}.function.parameters")
    if depth_of(parameters) > MAX_DEPTH:
        raise MessageError(f"{path}.function.parameters is nested too deeply", f"{path}.function.parameters")
    result["parameters"] = dict(parameters)
    return {"type": "function", "function": result}


def check_template_kwargs(kwargs: object) -> dict[str, Any]:
    """The request's chat_template_kwargs. Raises TemplateError for names that would replace the server's own values."""
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise TemplateError("chat_template_kwargs must be an object", "chat_template_kwargs")
    for key in kwargs:
        if key in RESERVED_KWARGS or key.startswith("_"):
            raise TemplateError(f"chat_template_kwargs must not set {key!r}", f"chat_template_kwargs.{key}")
    if depth_of(dict(kwargs)) > MAX_DEPTH:
        raise TemplateError("chat_template_kwargs is nested too deeply", "chat_template_kwargs")
    return dict(kwargs)


def relaxed_messages(messages: Sequence[Message]) -> list[Message]:
    """The same conversation for a template that knows only alternating user and assistant messages: system text joins
    the user message after it, neighbours of one role become one message, arguments that are no object get a key, and
    ids of calls get nine letters and digits.
    """
    merged: list[Message] = []
    for message in messages:
        role = "user" if message["role"] == "system" else message["role"]
        message = {**message, "role": role}
        if "tool_calls" in message:
            message["tool_calls"] = [_relaxed_call(call) for call in message["tool_calls"]]
        if "tool_call_id" in message:
            message["tool_call_id"] = _relaxed_id(message["tool_call_id"])
        last = merged[-1] if merged else None
        plain = "tool_calls" not in message
        if last is not None and last["role"] == role and role != "tool" and plain and "tool_calls" not in last:
            merged[-1] = {**last, "content": _joined(last["content"], message["content"])}
        else:
            merged.append(message)
    return merged


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second


def _relaxed_id(call_id: str) -> str:
    if len(call_id) == RELAXED_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:RELAXED_ID_CHARS]


def _relaxed_call(call: dict[str, Any]) -> dict[str, Any]:
    if "id" in call:
        call = {**call, "id": _relaxed_id(call["id"])}
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}
