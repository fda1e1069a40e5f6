"""A Messages request as the chat request that asks for the same. Pure; refusals name the field in Anthropic's way.

Equal conversations give equal prompts however they are written: text or blocks, with cache_control or without, and
wherever a client moves its cache marks. Reminders with the role "system" stay where they are, because hoisting them
would change the head of every prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turnkeep.server import errors
from turnkeep.server.chat_completions import ChatCompletionRequest, convert_request
from turnkeep.server.messages_api.shapes import CountTokensRequest, MessagesRequest
from turnkeep.server.messages_api.signature import read_signature

BILLING_PREFIX = "x-anthropic-billing-header"  # changes with every release of a client, and says nothing to a model
MIN_THINKING_BUDGET = 1024
MAX_STOP_SEQUENCES = 4

# What hosted tools of Anthropic leave in a history: they mean nothing to a model here, and go the same way each turn.
PASSED_OVER = frozenset(
    "redacted_thinking server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result "
    "bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result mcp_tool_use "
    "mcp_tool_result container_upload compaction tool_addition tool_removal fallback".split()
)


def to_chat_request(body: CountTokensRequest) -> ChatCompletionRequest:
    """Raises ApiError 400."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": [*_system(body.system), *_marked(_messages(body.messages), body.cache_control)],
        "tools": _tools(body.tools),
        "metadata": body.metadata,
        "cache_salt": body.cache_salt,
        "conversation_id": body.conversation_id,
        "session_id": body.session_id,
    }
    if not body.messages:
        raise errors.bad_request("messages: at least one message is required", "messages")
    fields.update(_tool_choice(body.tool_choice, has_tools=fields["tools"] is not None))
    max_tokens = body.max_tokens if isinstance(body, MessagesRequest) else None
    fields.update(_thinking(body.thinking, body.output_config, max_tokens))
    fields["response_format"] = _output_format(body)
    if isinstance(body, MessagesRequest):
        stops = body.stop_sequences or []
        if len(stops) > MAX_STOP_SEQUENCES:
            raise errors.bad_request(f"stop_sequences: at most {MAX_STOP_SEQUENCES} are allowed", "stop_sequences")
        fields.update(
            max_tokens=body.max_tokens,
            stop=stops,
            stream=body.stream,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
        )
    return convert_request(fields)


def omits_thinking(body: CountTokensRequest) -> bool:
    """The client wants thinking blocks without their text."""
    return body.thinking is not None and body.thinking.get("display") == "omitted"


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if system is None:
        return []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    texts = [_text(block, f"system.{index}") for index, block in enumerate(blocks)]
    kept = [(t, b) for t, b in zip(texts, blocks, strict=True) if t and not t.startswith(BILLING_PREFIX)]
    return [{"role": "system", "content": _joined(kept, "\n\n")}] if kept else []


def _marked(messages: list[dict[str, Any]], mark: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A mark on the request itself stands behind its last message."""
    return messages if mark is None or not messages else [*messages[:-1], {**messages[-1], "cache_control": mark}]


def _joined(texts: Sequence[tuple[str, Mapping[str, Any]]], separator: str) -> str | list[dict[str, Any]]:
    """Texts with the blocks that they come from as one content: one string, or parts where a block is marked."""
    if not any(_mark(block) for _, block in texts):
        return separator.join(text for text, _ in texts)
    return [
        {"type": "text", "text": (separator if number else "") + text, **_mark(block)}
        for number, (text, block) in enumerate(texts)
    ]


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        path, role = f"messages.{index}", message.get("role")
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise errors.bad_request(f"{path}.content: a string or a list of blocks is required", f"{path}.content")
        if role == "user":
            result += _user(content, path)
        elif role == "assistant":
            result.append(_assistant(content, path))
        elif role == "system":
            texts = [(_text(block, f"{path}.content.{number}"), block) for number, block in enumerate(content)]
            result.append({"role": "system", "content": _joined(texts, "\n\n")})
        else:
            raise errors.bad_request(f"{path}.role: must be 'user', 'assistant' or 'system'", f"{path}.role")
    return result


def _user(content: Sequence[Any], path: str) -> list[dict[str, Any]]:
    """A user message is what the user says and the results of tools, in the order in which they stand."""
    result: list[dict[str, Any]] = []
    texts: list[tuple[str, Mapping[str, Any]]] = []

    def say() -> None:
        if texts:
            result.append({"role": "user", "content": _joined(texts, "\n")})
            texts.clear()

    for number, block in enumerate(content):
        block_path = f"{path}.content.{number}"
        if _kind(block, block_path) == "tool_result":
            say()
            result.append(_tool_result(block, block_path))
        elif block["type"] not in PASSED_OVER:
            texts.append((_text(block, block_path), block))
    say()
    return result or [{"role": "user", "content": ""}]


def _assistant(content: Sequence[Any], path: str) -> dict[str, Any]:
    """Texts are joined as they are: they are the pieces of one answer."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        block_path = f"{path}.content.{number}"
        kind = _kind(block, block_path)
        if kind == "thinking":
            reasoning.append(_reasoning(block, block_path))
        elif kind == "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, Mapping):
                raise errors.bad_request(f"{block_path}.input: an object is required", f"{block_path}.input")
            function = {"name": _string(block, "name", block_path), "arguments": arguments}
            calls.append({"id": _string(block, "id", block_path), "type": "function", "function": function})
        elif kind not in PASSED_OVER:
            texts.append(_text(block, block_path))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return {**message, **_mark(next((block for block in content if _mark(block)), {}))}


def _mark(block: Mapping[str, Any]) -> dict[str, Any]:
    """The cache mark of a block, as a field of its message or tool."""
    return {"cache_control": block["cache_control"]} if isinstance(block.get("cache_control"), Mapping) else {}


def _reasoning(block: Mapping[str, Any], path: str) -> str:
    """What was really thought: from the signature, unless the text of the block says something else."""
    shown = _string(block, "thinking", path)
    exact = read_signature(block.get("signature"))
    return exact if exact is not None and shown.strip() in ("", exact.strip()) else shown


def _tool_result(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    content = block.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "\n".join(_result_part(part, f"{path}.content.{index}") for index, part in enumerate(content))
    else:
        raise errors.bad_request(f"{path}.content: a string or a list of blocks is required", f"{path}.content")
    if block.get("is_error") is True and not text.lower().lstrip("<").startswith(("error", "tool_use_error")):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": _string(block, "tool_use_id", path), "content": text, **_mark(block)}


def _result_part(part: Any, path: str) -> str:
    """An image in a result must not end the conversation: the model is told that there was one."""
    kind = _kind(part, path)
    if kind == "image":
        return "[an image, which this model cannot see]"
    if kind == "tool_reference":
        return f"[tool: {part.get('tool_name')}]"
    return _text(part, path)


def _text(block: Any, path: str) -> str:
    kind = _kind(block, path)
    if kind == "text":
        return _string(block, "text", path)
    if kind == "document":
        source = block.get("source")
        if isinstance(source, Mapping) and source.get("type") == "text":
            return _string(source, "data", f"{path}.source")
    if kind == "search_result" and isinstance(block.get("content"), list):
        return "\n".join(_text(part, f"{path}.content.{index}") for index, part in enumerate(block["content"]))
    raise errors.unsupported(f"{path}.type: blocks of type {kind!r} are not supported here", f"{path}.type")


def _kind(block: Any, path: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str):
        raise errors.bad_request(f"{path}.type: a block with a type is required", f"{path}.type")
    return kind


def _string(values: Mapping[str, Any], key: str, path: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        raise errors.bad_request(f"{path}.{key}: a string is required", f"{path}.{key}")
    return value


def _tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """The client's own tools. Those that Anthropic would run itself cannot be offered here, and are left out."""
    result: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        path = f"tools.{index}"
        if tool.get("type") not in (None, "custom") and "input_schema" not in tool:
            continue
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise errors.bad_request(f"{path}.input_schema: an object is required", f"{path}.input_schema")
        function: dict[str, Any] = {"name": _string(tool, "name", path), "parameters": schema}
        if tool.get("description") is not None:
            function["description"] = _string(tool, "description", path)
        result.append({"type": "function", "function": function, **_mark(tool)})
    return result or None


def _tool_choice(choice: Mapping[str, Any] | None, *, has_tools: bool) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise errors.bad_request("tool_choice.type: must be 'auto', 'any', 'tool' or 'none'", "tool_choice.type")
    if kind in ("any", "tool") and not has_tools:
        raise errors.bad_request("tool_choice: there are no tools to choose from", "tool_choice")
    chosen: Any = {"any": "required", "auto": "auto", "none": "none"}.get(kind)
    if kind == "tool":
        chosen = {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
    return {"tool_choice": chosen, "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True}


def _output_format(body: CountTokensRequest) -> dict[str, Any] | None:
    """The schema of the answer, as chat completions have it."""
    wanted, path = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.get("format") is not None:
        wanted, path = body.output_config["format"], "output_config.format"
    if wanted is None:
        return None
    if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
        raise errors.bad_request(f"{path}.type: must be 'json_schema'", f"{path}.type")
    if not isinstance(wanted.get("schema"), Mapping):
        raise errors.bad_request(f"{path}.schema: an object is required", f"{path}.schema")
    return {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}


def _thinking(
    thinking: Mapping[str, Any] | None, output_config: Mapping[str, Any] | None, max_tokens: int | None
) -> dict[str, Any]:
    """How much to think, as templates know it. Without a word of the client the template decides."""
    effort = None if output_config is None else output_config.get("effort")
    kind = None if thinking is None else thinking.get("type")
    if thinking is None:
        return {} if effort is None else {"reasoning_effort": effort}
    if kind == "disabled":
        return {"chat_template_kwargs": {"enable_thinking": False}}
    if kind not in ("enabled", "adaptive"):
        raise errors.bad_request("thinking.type: must be 'enabled', 'adaptive' or 'disabled'", "thinking.type")
    budget = thinking.get("budget_tokens")
    if kind == "enabled":
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < MIN_THINKING_BUDGET:
            message = f"thinking.enabled.budget_tokens: must be at least {MIN_THINKING_BUDGET}"
            raise errors.bad_request(message, "thinking.budget_tokens")
        if max_tokens is not None and budget >= max_tokens:
            raise errors.bad_request("max_tokens must be greater than thinking.budget_tokens", "max_tokens")
    return {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": effort}
