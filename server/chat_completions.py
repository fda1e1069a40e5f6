"""POST /v1/chat/completions: the body as clients send it, typed.

Shapes and parsing only: turn_request.py checks the values and converts them, chat_answers.py builds the answers.
Every refusal is an ApiError whose `param` is the dotted path of the field. Unknown fields are ignored.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from turnkeep.server import errors

T = TypeVar("T")

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    """strict is not asked for: a schema is always kept."""

    schema: Any = None
    name: str | None = None


class ResponseFormat(msgspec.Struct):
    type: str = "text"
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct):
    """vLLM's field; one of them may be set."""

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # in Lark notation, as llguidance has it


class SamplingFields(msgspec.Struct, kw_only=True):
    """What every shape of OpenAI's says of one answer under the same names, vLLM's among them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None


class CompletionFields(SamplingFields, kw_only=True):
    """What chat completions share with completions besides."""

    model: str
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None


class ChatCompletionRequest(CompletionFields, kw_only=True):
    """The body. None and absent mean the same everywhere. Messages and tools are checked by chat_template.py."""

    messages: list[dict[str, Any]]
    tools: Any = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: Any = None
    # Where a conversation id may stand: read by conversations.py, in the order of the design.
    # An id that cannot be used is passed over, so anything may stand there.
    conversation: Any = None
    conversation_id: Any = None
    session_id: Any = None
    conversation_params: Any = None
    vllm_xargs: Any = None
    prompt_cache_key: Any = None
    metadata: Any = None
    # How long to keep what the request leaves in the cache: read by cache_hints.py, bounded, and never refused.
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    # Known, and refused when they ask for something that is not served.
    chat_template: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


_decoder = msgspec.json.Decoder(ChatCompletionRequest)
# msgspec takes an escape that stands for no character for the end of the data.
_HALF_PAIR = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_PATH = re.compile(r" - at `(?:key in )?\$?\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


def parse_request(body: bytes) -> ChatCompletionRequest:
    """The typed request. Raises ApiError 400 for what is not JSON, too deep, or of a wrong type."""
    return decode_request(_decoder, body)


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as any shape's struct. Raises ApiError 400 for what is not JSON, too deep, or of a wrong type."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = "a string holds half a surrogate pair" if _HALF_PAIR.search(body) else str(error)
        raise errors.bad_request(f"The body is not valid JSON: {reason}.") from None
    except RecursionError:
        raise errors.bad_request("The body is nested too deeply.") from None


def convert_request(body: Any) -> ChatCompletionRequest:
    """The same from Python values (the offline API)."""
    try:
        return msgspec.convert(body, ChatCompletionRequest)
    except msgspec.ValidationError as error:
        raise validation_error(error) from None


def validation_error(error: msgspec.ValidationError) -> errors.ApiError:
    """msgspec's message, with its path turned into OpenAI's `param`."""
    text = str(error)
    found = _PATH.search(text)
    path = found.group(1) if found else ""
    missing = _MISSING.search(text)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
    reason = text[: found.start()] if found else text
    return errors.bad_request(f"Invalid request: {reason}" + (f" (at {path})" if path else ""), path or None)
