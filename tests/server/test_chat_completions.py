"""The request of a chat completion: what is taken, what is refused, and which field the refusal names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from turnkeep.server.chat_completions import ChatCompletionRequest, parse_request
from turnkeep.server.errors import ApiError
from turnkeep.server.turn_request import SamplingDefaults, TurnRequest, to_turn

USER = [{"role": "user", "content": "hi"}]
GREEDY = SamplingDefaults(temperature=0.0)


def parse(**fields: Any) -> ChatCompletionRequest:
    return parse_request(json.dumps({"model": "m", "messages": USER, **fields}).encode())


def convert(defaults: SamplingDefaults = GREEDY, **fields: Any) -> TurnRequest:
    return to_turn(parse(**fields), defaults, vocab_size=1000)


def body_with(text: str) -> bytes:
    return f'{{"model": "m", "messages": [{{"role": "user", "content": "hi"}}]{text}}}'.encode()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b"\xff\xfe", None),
        (b"\xef\xbb\xbf{}", None),
        (b"{}", "model"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": 1, "messages": []}', "model"),
        (b'{"model": "m", "messages": "hi"}', "messages"),
        (b'{"model": "m", "messages": ["hi"]}', "messages[0]"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}', None),
        (body_with(', "temperature": NaN'), None),
        (body_with(', "temperature": Infinity'), None),
        (body_with(', "temperature": 1e999'), "temperature"),
        (body_with(', "temperature": "0.5"'), "temperature"),
        (body_with(', "n": 1.5'), "n"),
        (body_with(', "stream": "yes"'), "stream"),
        (body_with(', "stream_options": {"include_usage": 1}'), "stream_options.include_usage"),
        (body_with(', "stop": {}'), "stop"),
        (body_with(', "stop": [1]'), "stop[0]"),
        (body_with(', "logit_bias": []'), "logit_bias"),
        (body_with(', "reasoning_effort": "enormous"'), "reasoning_effort"),
        (body_with(', "extra": ' + "[" * 100_000 + "]" * 100_000), None),
        (body_with(', "metadata": ' + '{"a":' * 100_000 + "1" + "}" * 100_000), None),
        (body_with("} trailing"), None),
    ],
)
def test_a_body_of_the_wrong_shape_is_refused_naming_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_request(body)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert len(json.dumps(caught.value.envelope())) < 2000


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_completion_tokens": -1, "max_tokens": 5}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 10_000}, "stop"),
        ({"stop_token_ids": [1000]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"stop_token_ids": list(range(200))}, "stop_token_ids"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": []}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": 2**40}, "priority"),
    ],
)
def test_a_value_that_cannot_be_served_is_refused_naming_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        convert(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_unknown_fields_and_nulls_are_ignored() -> None:
    everything = dict.fromkeys(
        ["n", "stop", "tools", "tool_choice", "seed", "logprobs", "top_logprobs", "logit_bias", "stream_options"]
    )
    turn = convert(**everything, no_such_field={"deep": [1, 2]}, store=False, user="someone", metadata={"a": "b"})
    assert turn.num_choices == 1
    assert turn.stop_strings == ()


def test_sampling_fields_reach_the_engine() -> None:
    turn = convert(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, frequency_penalty=0.5, presence_penalty=-0.5,
        repetition_penalty=1.1, logit_bias={"5": -100}, max_tokens=9, min_tokens=2, stop_token_ids=[4], ignore_eos=True,
        logprobs=True, top_logprobs=2, stop="END",
    )  # fmt: skip
    sampling = turn.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.seed) == (9, 2, 3)
    assert (sampling.logit_bias, sampling.stop_token_ids, sampling.ignore_eos) == ({5: -100.0}, (4,), True)
    assert sampling.num_logprobs == 2
    assert turn.stop_strings == ("END",)


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert convert(max_tokens=5, max_completion_tokens=7).sampling.max_new_tokens == 7


def test_a_negative_seed_is_folded_into_64_bits_and_no_seed_is_a_random_one() -> None:
    assert convert(seed=-1).sampling.seed == 2**64 - 1
    assert convert().sampling.seed != convert().sampling.seed


def test_logprobs_without_top_asks_for_the_chosen_token_only() -> None:
    assert convert(logprobs=True).sampling.num_logprobs == 0
    assert convert(logprobs=False).sampling.num_logprobs is None


def test_defaults_come_from_the_models_generation_config() -> None:
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    sampling = convert(SamplingDefaults.from_generation_config(config)).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
    assert sampling.repetition_penalty == 1.05
    assert SamplingDefaults.from_generation_config({"do_sample": False, "temperature": 0.6}).temperature == 0.0
    assert SamplingDefaults.from_generation_config({}).temperature == 1.0
    assert SamplingDefaults.from_generation_config({"temperature": None, "top_p": "x"}) == SamplingDefaults()


def test_without_tools_or_with_tool_choice_none_nothing_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    assert convert().tool_names is None
    unwanted = convert(tools=tools, tool_choice="none")
    assert (unwanted.tool_names, unwanted.hides_calls) == ({"look_up"}, True)
    assert convert(tools=tools).tool_names == {"look_up"}
    assert convert(tools=tools, tool_choice="none").tools is not None, "the prompt, and so its prefix, stays"


def test_reasoning_effort_reaches_the_template() -> None:
    assert convert(reasoning_effort="none").template_kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    kwargs = convert(reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}).template_kwargs
    assert kwargs == {"reasoning_effort": "high", "enable_thinking": False}


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert convert(temperature=1e-300).sampling.temperature == 0.0
