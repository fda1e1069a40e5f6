"""What a request demands of the form of its answer: a schema, a pattern, calls that must or may be made.

Pure: reads and checks the fields of a chat completion request. structured_output.py makes a grammar of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from turnkeep.server import errors
from turnkeep.server.chat_completions import ChatCompletionRequest
from turnkeep.server.chat_messages import MAX_DEPTH, depth_of

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_PATTERN_CHARS = 8192
MAX_WORDS = 4096  # of a choice

CallRule = Literal["none", "allowed", "required"]


@dataclass(frozen=True, slots=True)
class OutputRules:
    """answer: the form of the content as one of llguidance's grammars, None for free text. With `required` calls there
    is no content; otherwise an answer may come in place of calls. param: the field that says so, for refusals."""

    param: str
    answer: dict[str, Any] | None = None
    calls: CallRule = "none"
    tool_names: tuple[str, ...] = ()
    is_single_call: bool = False


def output_rules(request: ChatCompletionRequest, tools: list[dict[str, Any]] | None) -> OutputRules | None:
    """The rules, None for an answer of any form. Raises ApiError 400 naming the field."""
    names = tuple(tool["function"]["name"] for tool in tools or ())
    is_single = request.parallel_tool_calls is False
    choice = request.tool_choice
    answer, param = _answer(request)
    if choice == "required" or isinstance(choice, dict):
        rule, allowed, is_named = _tool_choice(choice, names)
        if rule == "required":
            if answer is not None:
                raise errors.bad_request(f"{param} cannot be combined with a required tool call.", param)
            return OutputRules("tool_choice", None, "required", allowed, is_single or is_named)
        return OutputRules("tool_choice", answer, "allowed", allowed, is_single)
    if choice not in (None, "auto", "none"):
        raise errors.bad_request("tool_choice must be 'none', 'auto', 'required' or an object.", "tool_choice")
    if answer is None:
        return None
    calls: CallRule = "allowed" if names and choice != "none" else "none"
    return OutputRules(param, answer, calls, names, is_single)


def callable_names(
    tools: list[dict[str, Any]] | None, tool_choice: Any, rules: OutputRules | None
) -> frozenset[str] | None:
    """The tools whose calls are looked for in the answer. With tool_choice none, too, where they stay in the prompt (so
    that its prefix stays) and the answer may call one against its will."""
    if not tools:
        return None
    if rules is not None and tool_choice != "none":
        return frozenset(rules.tool_names)
    return frozenset(tool["function"]["name"] for tool in tools)


def _tool_choice(choice: Any, names: tuple[str, ...]) -> tuple[CallRule, tuple[str, ...], bool]:
    """(rule, names that may be called, whether one function was named)."""
    if not names:
        raise errors.bad_request("tool_choice: there are no tools to choose from.", "tool_choice")
    if choice == "required":
        return "required", names, False
    kind = choice.get("type")
    if kind == "function":
        return "required", (_declared(choice, names, "tool_choice"),), True
    if kind != "allowed_tools":
        raise errors.bad_request("tool_choice.type must be 'function' or 'allowed_tools'.", "tool_choice.type")
    allowed = choice.get("allowed_tools", choice)
    mode, tools = (allowed.get("mode", "auto"), allowed.get("tools")) if isinstance(allowed, dict) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        message = "allowed_tools needs a mode, 'auto' or 'required', and a list of tools."
        raise errors.bad_request(message, "tool_choice.allowed_tools")
    found = [_declared(tool, names, f"tool_choice.allowed_tools.tools[{index}]") for index, tool in enumerate(tools)]
    return ("required" if mode == "required" else "allowed"), tuple(dict.fromkeys(found)), False


def _declared(tool: Any, names: tuple[str, ...], path: str) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise errors.bad_request(f"{path}: a function with a name is needed.", path)
    if name not in names:
        raise errors.bad_request(f"{path}: there is no tool named '{errors.shorten(name, 100)}'.", path)
    return name


def _answer(request: ChatCompletionRequest) -> tuple[dict[str, Any] | None, str]:
    """The form of the content, and the field that gives it. At most one field may."""
    given = [(param, grammar) for param, grammar in _given_answers(request) if grammar is not None]
    if len(given) > 1:
        raise errors.bad_request(f"{given[1][0]} cannot be combined with {given[0][0]}.", given[1][0])
    return (given[0][1], given[0][0]) if given else (None, "")


def _given_answers(request: ChatCompletionRequest) -> list[tuple[str, dict[str, Any] | None]]:
    given = [
        ("response_format", _response_format(request)),
        ("guided_json", _schema(request.guided_json, "guided_json")),
        ("guided_regex", _regex(request.guided_regex, "guided_regex")),
        ("guided_choice", _choice(request.guided_choice, "guided_choice")),
        ("guided_grammar", _lark(request.guided_grammar, "guided_grammar")),
    ]
    outputs = request.structured_outputs
    if outputs is not None:
        path = "structured_outputs"
        given += [
            (f"{path}.json", _schema(outputs.json, f"{path}.json")),
            (f"{path}.json_object", {"json_schema": {"type": "object"}} if outputs.json_object else None),
            (f"{path}.regex", _regex(outputs.regex, f"{path}.regex")),
            (f"{path}.choice", _choice(outputs.choice, f"{path}.choice")),
            (f"{path}.grammar", _lark(outputs.grammar, f"{path}.grammar")),
        ]
    return given


def _response_format(request: ChatCompletionRequest) -> dict[str, Any] | None:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if wanted.type != "json_schema":
        message = "response_format.type must be 'text', 'json_object' or 'json_schema'."
        raise errors.bad_request(message, "response_format.type")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        path = "response_format.json_schema" + ("" if wanted.json_schema is None else ".schema")
        raise errors.bad_request(f"{path} is needed.", path)
    return _schema(wanted.json_schema.schema, "response_format.json_schema.schema")


def _schema(schema: Any, path: str) -> dict[str, Any] | None:
    """A schema as an object or as JSON text."""
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise errors.bad_request(f"{path} is not valid JSON.", path) from None
    if not isinstance(schema, dict):
        raise errors.bad_request(f"{path} must be a JSON schema.", path)
    if depth_of(schema) > MAX_DEPTH:
        raise errors.bad_request(f"{path} is nested too deeply: at most {MAX_DEPTH} levels.", path)
    if len(msgspec.json.encode(schema)) > MAX_GRAMMAR_BYTES:
        raise errors.bad_request(f"{path} is too large: at most {MAX_GRAMMAR_BYTES} bytes.", path)
    return {"json_schema": schema}


def _regex(pattern: str | None, path: str) -> dict[str, Any] | None:
    if pattern is None:
        return None
    _check_text(pattern, path)
    return {"regex": pattern}


def _choice(words: list[str] | None, path: str) -> dict[str, Any] | None:
    if words is None:
        return None
    if not words or len(words) > MAX_WORDS or not all(words):
        raise errors.bad_request(f"{path} needs 1 to {MAX_WORDS} texts that are not empty.", path)
    _check_text("".join(words), path, MAX_GRAMMAR_BYTES)
    return {"choice": words}


def _lark(grammar: str | None, path: str) -> dict[str, Any] | None:
    if grammar is None:
        return None
    _check_text(grammar, path, MAX_GRAMMAR_BYTES)
    return {"lark_grammar": grammar}


def _check_text(text: str, path: str, limit: int = MAX_PATTERN_CHARS) -> None:
    if not 0 < len(text) <= limit:
        raise errors.bad_request(f"{path} has 1 to {limit} characters.", path)
    if "\0" in text:
        raise errors.bad_request(f"{path} must not contain the character NUL.", path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise errors.bad_request(f"{path} is not valid Unicode.", path) from None
