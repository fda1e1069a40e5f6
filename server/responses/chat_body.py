"""A response as the chat completion that it is for the model, and that one's refusals in the fields of a response."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from turnkeep.server import errors
from turnkeep.server.chat_completions import ChatCompletionRequest, SamplingFields, convert_request
from turnkeep.server.responses.item_messages import Message
from turnkeep.server.responses.shapes import ResponsesRequest, TextFormat
from turnkeep.server.responses.tools import ToolSet, chat_tool_choice

LOGPROBS = "message.output_text.logprobs"

SAME_FIELDS = (
    *SamplingFields.__struct_fields__, "model", "parallel_tool_calls", "chat_template_kwargs", "chat_template",
    "conversation_id", "session_id", "conversation_params", "vllm_xargs", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "metadata",
)  # fmt: skip

# Field of a chat completion -> the same thing in a response.
PARAMS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}


def chat_body(
    request: ResponsesRequest, messages: list[Message], tools: ToolSet, tag: str | None
) -> ChatCompletionRequest:
    """tag: the conversation that the turn belongs to, when the request's own fields and headers are not to decide.

    Raises ApiError 400.
    """
    body: dict[str, Any] = {name: getattr(request, name) for name in SAME_FIELDS}
    body |= {
        "messages": messages,
        "tools": tools.functions or None,
        "tool_choice": chat_tool_choice(request.tool_choice, tools),
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "conversation": tag,
    }
    if request.includes(LOGPROBS) or request.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": request.top_logprobs}
    if request.text is not None and request.text.format is not None:
        body["response_format"] = _response_format(request.text.format)
    with response_params():
        return convert_request(body)


def _response_format(text_format: TextFormat) -> dict[str, Any]:
    if text_format.type not in ("text", "json_object", "json_schema"):
        raise errors.bad_request("text.format.type must be 'text', 'json_object' or 'json_schema'.", "text.format.type")
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    if text_format.schema is None:
        raise errors.bad_request("text.format.schema is missing.", "text.format.schema")
    schema = {"name": text_format.name or "answer", "schema": text_format.schema, "strict": text_format.strict}
    if text_format.description is not None:
        schema["description"] = text_format.description
    return {"type": "json_schema", "json_schema": schema}


@contextmanager
def response_params() -> Iterator[None]:
    """Refusals raised inside name the field of the response that is meant."""
    try:
        yield
    except errors.ApiError as error:
        theirs, error.param = error.param, response_param(error.param)
        if theirs is not None and error.message.startswith(f"{theirs} "):
            error.message = f"{error.param}{error.message.removeprefix(theirs)}"
        raise


def response_param(param: str | None) -> str | None:
    for theirs, ours in PARAMS.items():
        if param is not None and (param == theirs or param.startswith((f"{theirs}.", f"{theirs}["))):
            # Which message is at fault says nothing about the item it was made of.
            return ours if theirs == "messages" else ours + param[len(theirs) :]
    return param
