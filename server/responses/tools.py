"""The tools of a request: what the model is shown as plain functions, and what a call of one is called by the client.

Namespaced functions are shown flat as `namespace__name`; free-form tools as functions with one string; tools that a
provider would run itself cannot be served and are left out, because clients send them along whatever the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from turnkeep.server import errors
from turnkeep.server.responses.shapes import check_depth

CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ToolTarget:
    """What a flat name stands for."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSet:
    """`functions` are in the form of chat completions; `shown` is what the response object repeats."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    targets: dict[str, ToolTarget] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)

    def target(self, flat_name: str) -> ToolTarget:
        """A name that was not offered is a function's."""
        return self.targets.get(flat_name) or ToolTarget("function", flat_name)


def flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def read_tools(tools: Sequence[Any] | None) -> ToolSet:
    """Raises ApiError 400 naming the tool."""
    result = ToolSet()
    for index, tool in enumerate(tools or ()):
        path = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise errors.bad_request(f"{path} must be an object with a type.", f"{path}.type")
        check_depth(tool, path)
        if kind == "namespace":
            _add_namespace(result, tool, path)
        elif kind in ("function", "custom"):
            _add(result, tool, path, None)
        shown = dict(tool)
        if kind == "function":
            shown = {"description": None, "parameters": None, "strict": False, **shown}
        result.shown.append(shown)
    return result


def _add_namespace(result: ToolSet, tool: Mapping[str, Any], path: str) -> None:
    namespace = _string(tool, "name", path)
    inner = tool.get("tools")
    if not isinstance(inner, list):
        raise errors.bad_request(f"{path}.tools must be a list.", f"{path}.tools")
    for index, one in enumerate(inner):
        inner_path = f"{path}.tools[{index}]"
        if not isinstance(one, Mapping):
            raise errors.bad_request(f"{inner_path} must be an object.", inner_path)
        if one.get("type", "function") in ("function", "custom"):
            _add(result, one, inner_path, namespace)


def _add(result: ToolSet, tool: Mapping[str, Any], path: str, namespace: str | None) -> None:
    name = _string(tool, "name", path)
    kind: Literal["function", "custom"] = "custom" if tool.get("type") == "custom" else "function"
    function: dict[str, Any] = {"name": flat_name(name, namespace)}
    description = tool.get("description")
    if description is not None:
        function["description"] = _string(tool, "description", path, may_be_empty=True)
    parameters = CUSTOM_PARAMETERS if kind == "custom" else tool.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise errors.bad_request(f"{path}.parameters must be an object.", f"{path}.parameters")
    if parameters is not None:
        function["parameters"] = dict(parameters)
    if isinstance(tool.get("strict"), bool):
        function["strict"] = tool["strict"]
    result.functions.append({"type": "function", "function": function})
    result.targets[function["name"]] = ToolTarget(kind, name, namespace)


def _string(tool: Mapping[str, Any], key: str, path: str, *, may_be_empty: bool = False) -> str:
    value = tool.get(key)
    if not isinstance(value, str) or not (value or may_be_empty):
        raise errors.bad_request(f"{path}.{key} must be a string.", f"{path}.{key}")
    return value


def chat_tool_choice(choice: str | dict[str, Any] | None, tools: ToolSet) -> str | dict[str, Any] | None:
    """The same choice as a chat completion has it. Raises ApiError 400."""
    if choice is None or isinstance(choice, str):
        if choice not in (None, "auto", "none", "required"):
            raise errors.bad_request("tool_choice must be 'none', 'auto', 'required' or an object.", "tool_choice")
        # Without a tool the model can call there is nothing to choose from.
        return choice if tools.functions or choice == "required" else None
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, tools)
    return _named(choice, "tool_choice", tools)


def _named(choice: Mapping[str, Any], path: str, tools: ToolSet) -> dict[str, Any]:
    if choice.get("type") not in ("function", "custom"):
        raise errors.unsupported(f"{path}.type: only functions and custom tools are served.", f"{path}.type")
    name, namespace = choice.get("name"), choice.get("namespace")
    flat = flat_name(name, namespace if isinstance(namespace, str) else None) if isinstance(name, str) else ""
    if flat not in tools.targets:
        raise errors.bad_request(f"{path}.name must be the name of one of the tools.", f"{path}.name")
    return {"type": "function", "function": {"name": flat}}


def _allowed_tools(choice: Mapping[str, Any], tools: ToolSet) -> dict[str, Any]:
    allowed, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(allowed, list) or not all(isinstance(one, Mapping) for one in allowed):
        raise errors.bad_request("tool_choice.tools must be a list of tools.", "tool_choice.tools")
    if mode not in ("auto", "required"):
        raise errors.bad_request("tool_choice.mode must be 'auto' or 'required'.", "tool_choice.mode")
    names = [_named(one, f"tool_choice.tools[{index}]", tools) for index, one in enumerate(allowed)]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}


def custom_input(arguments: str) -> str:
    """The free text of a custom tool's call; what the model wrote when it is not the object that was asked for."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = parsed.get("input") if isinstance(parsed, dict) else None
    return text if isinstance(text, str) else arguments


def custom_arguments(text: str) -> str:
    """The other way round, for a call that comes back."""
    return json.dumps({"input": text}, ensure_ascii=False)
