"""POST /v1/responses: the body as clients send it, typed, and what can be checked without looking anything up.

Unknown fields are ignored. Every refusal is an ApiError whose `param` is the dotted path of the field.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from turnkeep.server import errors
from turnkeep.server.chat_completions import ReasoningEffort, SamplingFields, decode_request
from turnkeep.server.chat_messages import MAX_DEPTH, depth_of

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # the older name

    @property
    def wants_summary(self) -> bool:
        return (self.summary or self.generate_summary) is not None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body. None and absent mean the same everywhere. Items and tools are checked elsewhere."""

    model: str
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None
    chat_template_kwargs: Any = None
    # Where a conversation id may stand besides; read by conversations.py.
    conversation_id: Any = None
    session_id: Any = None
    conversation_params: Any = None
    vllm_xargs: Any = None
    # Known, and refused when they ask for something that is not served.
    prompt: Any = None
    context_management: Any = None
    chat_template: Any = None

    @property
    def conversation_given(self) -> str | None:
        """The id of `conversation`, given plainly or as an object."""
        given = self.conversation
        return given["id"] if isinstance(given, dict) else given

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_summary(self) -> bool:
        return self.reasoning is not None and self.reasoning.wants_summary

    def includes(self, name: str) -> bool:
        return name in (self.include or ())


class CompactRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/responses/compact."""

    model: str
    input: str | list[Any] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None


_decoder = msgspec.json.Decoder(ResponsesRequest)
_compact_decoder = msgspec.json.Decoder(CompactRequest)


def parse_responses_request(body: bytes) -> ResponsesRequest:
    """The typed request, checked as far as that needs nothing else. Raises ApiError 400."""
    request = decode_request(_decoder, body)
    check_request(request)
    return request


def parse_compact_request(body: bytes) -> CompactRequest:
    """Raises ApiError 400."""
    return decode_request(_compact_decoder, body)


def check_request(request: ResponsesRequest) -> None:
    """Fields against each other. Raises ApiError 400."""
    given = request.conversation
    if isinstance(given, dict) and not isinstance(given.get("id"), str):
        raise errors.bad_request("conversation must be an id or an object with an id.", "conversation.id")
    if given is not None and request.previous_response_id is not None:
        message = "previous_response_id and conversation both say what went before; send one of them."
        raise errors.bad_request(message, "previous_response_id")
    if request.background and not request.is_stored:
        raise errors.bad_request("A response in the background must be stored.", "background")
    if request.max_tool_calls is not None and request.max_tool_calls < 1:
        raise errors.bad_request("max_tool_calls must be at least 1.", "max_tool_calls")
    check_depth(request.tool_choice, "tool_choice")
    for param in ("prompt", "context_management"):
        if getattr(request, param):
            raise errors.ApiError(400, f"{param} is not supported.", param=param, code="unsupported_parameter")
    check_metadata(request.metadata)


def check_depth(value: Any, path: str) -> None:
    """What is kept and repeated as it came may not be nested without end. Raises ApiError 400."""
    if depth_of(value) > MAX_DEPTH:
        raise errors.bad_request(f"{path} is nested too deeply.", path)


def check_metadata(metadata: dict[str, str] | None) -> dict[str, str]:
    """Raises ApiError 400 beyond OpenAI's limits."""
    metadata = metadata or {}
    if len(metadata) > MAX_METADATA:
        raise errors.bad_request(f"metadata holds at most {MAX_METADATA} entries.", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            raise errors.bad_request(
                f"The keys of metadata have at most {MAX_METADATA_KEY_CHARS} characters, its values at most "
                f"{MAX_METADATA_VALUE_CHARS}.",
                "metadata",
            )
    return metadata
