"""One turn as the server works on it, made from a chat completion request.

Pure: checks every value and converts; knows no tokenizer, no engine, no HTTP. Refusals are ApiErrors naming the field.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from turnkeep.scheduler.request import SamplingParams
from turnkeep.server import errors
from turnkeep.server.cache_hints import CacheMark, cache_marks, retention_s
from turnkeep.server.chat_completions import ChatCompletionRequest
from turnkeep.server.chat_messages import (
    TemplateError,
    check_template_kwargs,
    normalize_messages,
    normalize_tools,
)
from turnkeep.server.output_rules import OutputRules, callable_names, output_rules

MAX_CHOICES = 8
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SALT_CHARS = 256
MIN_REPETITION_PENALTY = 0.01
MIN_TEMPERATURE = 1e-4
UNBOUNDED_TOKENS = 2**31 - 1


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request that names nothing gets: the model's generation_config, else OpenAI's temperature 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """`do_sample: false` means greedy. Values that are missing or not numbers are passed over."""

        def number(key: str, default: float) -> float:
            value = config.get(key)
            usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            return float(value) if usable and value is not None else default

        greedy = config.get("do_sample") is False
        return cls(
            temperature=0.0 if greedy else number("temperature", 1.0),
            top_p=number("top_p", 1.0),
            top_k=int(number("top_k", 0)),
            min_p=number("min_p", 0.0),
            repetition_penalty=number("repetition_penalty", 1.0),
        )


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn as the walk of chat_service needs it: messages for the template, and how to sample.

    sampling.max_new_tokens is what the client asked for, unbounded when it asked for nothing; it is clamped to the
    context once the prompt is known. sampling.stop_token_ids holds the client's own ids only.
    """

    messages: list[dict[str, Any]]
    sampling: SamplingParams
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_choices: int = 1
    stop_strings: tuple[str, ...] = ()
    tool_names: frozenset[str] | None = None  # None: no calls
    hides_calls: bool = False  # calls that are made all the same are left out
    output_rules: OutputRules | None = None  # the form that the output must have
    parallel_tool_calls: bool = True
    return_token_ids: bool = False
    priority: int = 0
    cache_salt: str | None = None
    cache_marks: tuple[CacheMark, ...] = ()  # places that the client says later prompts will repeat
    retention_s: float = 0.0


def to_turn(request: ChatCompletionRequest, defaults: SamplingDefaults, vocab_size: int) -> TurnRequest:
    """Check every field and convert. Raises ApiError naming the field."""
    _refuse_unserved(request)
    if request.stream_options is not None and not request.stream:
        raise errors.bad_request("stream_options needs stream: true.", "stream_options")
    num_choices = 1 if request.n is None else request.n
    _check_range("n", num_choices, 1, MAX_CHOICES)
    try:
        messages, tools = normalize_messages(request.messages), normalize_tools(request.tools)
        template_kwargs = check_template_kwargs(request.chat_template_kwargs)
    except TemplateError as error:
        raise errors.bad_request(str(error), error.param or "messages") from None
    if request.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        template_kwargs.setdefault("enable_thinking", request.reasoning_effort != "none")
    rules = output_rules(request, tools)
    if rules is not None and request.min_tokens:
        raise errors.bad_request("min_tokens cannot be combined with a form that the output must have.", "min_tokens")
    return TurnRequest(
        messages=messages,
        sampling=_sampling(request, defaults, vocab_size),
        tools=tools,
        template_kwargs=template_kwargs,
        num_choices=num_choices,
        stop_strings=_stop_strings(request.stop),
        tool_names=callable_names(tools, request.tool_choice, rules),
        hides_calls=request.tool_choice == "none",
        output_rules=rules,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        return_token_ids=bool(request.return_token_ids),
        priority=_priority(request.priority),
        cache_salt=_cache_salt(request.cache_salt),
        cache_marks=cache_marks(request.messages),
        retention_s=retention_s(request),
    )


def _refuse_unserved(request: ChatCompletionRequest) -> None:
    """What the API defines and this server cannot do yet is said, never silently ignored."""
    if request.chat_template is not None:
        raise errors.unsupported("A chat template in the request is not accepted.", "chat_template")
    if request.add_generation_prompt is False or request.continue_final_message:
        param = "continue_final_message" if request.continue_final_message else "add_generation_prompt"
        raise errors.unsupported("Continuing the last message is not served.", param)
    if request.modalities is not None and request.modalities != ["text"]:
        raise errors.unsupported("Only the modality 'text' is served.", "modalities")
    for param in ("functions", "function_call", "audio", "web_search_options"):
        if getattr(request, param) is not None:
            raise errors.ApiError(400, f"{param} is not supported.", param=param, code="unsupported_parameter")


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > MAX_STOPS:
        raise errors.bad_request(f"stop may hold at most {MAX_STOPS} strings.", "stop")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise errors.bad_request(f"A stop string has 1 to {MAX_STOP_CHARS} characters.", "stop")
    return tuple(stops)


def _cache_salt(salt: str | None) -> str | None:
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
        raise errors.bad_request(f"cache_salt has 1 to {MAX_SALT_CHARS} characters.", "cache_salt")
    return salt


def _priority(value: int | None) -> int:
    if value is None:
        return 0
    _check_range("priority", value, -(2**31), 2**31 - 1)
    return value


def _check_range(param: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Raises unless low <= value <= high (low < value with `above`). NaN is never in a range."""
    if not (value > low if above else value >= low) or not value <= high:
        start = f"greater than {low}" if above else f"at least {low}"
        raise errors.bad_request(f"{param} must be {start} and at most {high}.", param)


def _sampling(request: ChatCompletionRequest, defaults: SamplingDefaults, vocab_size: int) -> SamplingParams:
    def pick(name: str, low: float, high: float, default: float, *, above: bool = False) -> float:
        value = getattr(request, name)
        if value is None:
            return default
        _check_range(name, value, low, high, above=above)
        return float(value)

    max_field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_new_tokens = int(min(pick(max_field, 1, 2**53, UNBOUNDED_TOKENS), UNBOUNDED_TOKENS))
    min_new_tokens = int(pick("min_tokens", 0, max_new_tokens, 0))
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=_temperature(pick("temperature", 0, 2, defaults.temperature)),
        top_p=pick("top_p", 0, 1, defaults.top_p, above=True),
        top_k=_top_k(request.top_k, defaults.top_k),
        min_p=pick("min_p", 0, 1, defaults.min_p),
        seed=_seed(request.seed),
        stop_token_ids=_stop_token_ids(request.stop_token_ids, vocab_size),
        ignore_eos=bool(request.ignore_eos),
        frequency_penalty=pick("frequency_penalty", -2, 2, 0.0),
        presence_penalty=pick("presence_penalty", -2, 2, 0.0),
        # Logits are divided by it: what is tiny makes them infinite, and the model's word is lost.
        repetition_penalty=pick("repetition_penalty", MIN_REPETITION_PENALTY, 10, defaults.repetition_penalty),
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        num_logprobs=_num_logprobs(request),
    )


def _temperature(value: float) -> float:
    """Greedy where noise could not change a choice, and dividing by the temperature could overflow."""
    return value if value >= MIN_TEMPERATURE else 0.0


def _top_k(value: int | None, default: int) -> int:
    """-1 and 0 both mean all tokens."""
    if value is None:
        return default
    _check_range("top_k", value, -1, 2**31 - 1)
    return max(value, 0)


def _seed(value: int | None) -> int:
    """64 bits, non-negative. A request without a seed gets a random one."""
    if value is None:
        return secrets.randbits(63)
    _check_range("seed", value, -(2**63), 2**64 - 1)
    return value % 2**64


def _num_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.top_logprobs:
        if not request.logprobs:
            raise errors.bad_request("top_logprobs needs logprobs: true.", "top_logprobs")
        _check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    return (request.top_logprobs or 0) if request.logprobs else None


def _stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if ids is None:
        return ()
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise errors.bad_request(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids.", "stop_token_ids")
    for index, token_id in enumerate(ids):
        _check_token_id(f"stop_token_ids[{index}]", token_id, vocab_size)
    return tuple(ids)


def _logit_bias(biases: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    if biases is None:
        return {}
    if len(biases) > MAX_LOGIT_BIAS:
        raise errors.bad_request(f"logit_bias may hold at most {MAX_LOGIT_BIAS} entries.", "logit_bias")
    result: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise errors.bad_request("The keys of logit_bias are token ids.", "logit_bias")
        _check_token_id("logit_bias", int(key), vocab_size)
        if not -100 <= bias <= 100:
            raise errors.bad_request("The values of logit_bias lie between -100 and 100.", "logit_bias")
        result[int(key)] = bias
    return result


def _check_token_id(param: str, token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise errors.bad_request(f"A token id is at least 0 and less than {vocab_size}.", param)
