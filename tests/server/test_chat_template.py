"""Chat templates render as transformers renders them, inside limits."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
from text_fixtures import NOW, TEMPLATE_NAMES, TOOLS, RandomConversation, TextCase, text_case

from turnkeep.server.chat_template import ChatTemplate, RenderLimits, TemplateError, check_template_kwargs
from turnkeep.server.prompt_memory import MemoryKey
from turnkeep.server.prompts import PromptEncoder

MESSAGES = [{"role": "user", "content": "Hello"}]


def reference_tokenizer(case: TextCase) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        names = {key: case.template.special_tokens[key] for key in ("bos_token", "eos_token")}
        backend = Tokenizer.from_str(case.tokenizer_json)
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=case.template.source, **names)


def plain_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages without text that spells control tokens: there the reference makes control tokens of it."""

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("|>", "").replace("<", "(").replace("[INST]", "")
        if isinstance(value, list):
            return [clean(item) for item in value]
        return {key: clean(item) for key, item in value.items()} if isinstance(value, dict) else value

    return [clean(message) for message in messages]


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_text_and_tokens_equal_those_of_transformers(name: str) -> None:
    case = text_case(name)
    reference = reference_tokenizer(case)
    encoder = PromptEncoder(case.template, case.tokenizer)
    for seed in range(20):
        source = RandomConversation(seed, takes_tools=case.takes_tools)
        messages = plain_text(source.history(seed % 4, in_loop=case.takes_tools and seed % 2 == 1))
        tools = plain_text(TOOLS) if case.takes_tools and seed % 3 else None
        kwargs: dict[str, Any] = {"enable_thinking": False, "keep_thinking": True} if seed % 5 == 0 else {}
        for generation in (True, False):
            expected = reference.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generation, tokenize=False, **kwargs
            )
            now = time.time()  # the reference shows today's date
            text = case.template.render(
                messages, tools=tools, add_generation_prompt=generation, template_kwargs=kwargs, now=now
            )
            assert text == expected
            prompt = encoder.encode(
                messages, tools=tools, template_kwargs=kwargs, now=now, add_generation_prompt=generation,
                key=MemoryKey("", str(seed)),
            )  # fmt: skip
            ids = reference(expected, add_special_tokens=False)["input_ids"]
            assert prompt.text == expected
            assert prompt.token_ids == ids


def test_the_clock_of_a_template_can_be_pinned() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", clock=lambda: NOW + 86400 * 400)
    assert template.render(MESSAGES, now=NOW).startswith("2025-10-")
    assert template.render(MESSAGES).startswith("2026-")


def test_json_is_written_without_escapes() -> None:
    template = ChatTemplate("{{ {'a': 'é<&>'} | tojson }}{{ [1] | tojson(indent=2) }}")
    assert template.render(MESSAGES) == '{"a": "é<&>"}[\n  1\n]'


def test_loop_controls_and_generation_marks_are_understood() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert template.render(MESSAGES * 3) == "Hello"


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ 9 ** 999999999 }}",
        "{{ '%999999999d' % 1 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(__class__=1) }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ undefined_thing.x }}",
        "{% include 'x' %}",
    ],
)
def test_a_template_that_fails_or_escapes_is_an_error_in_bounded_time(source: str) -> None:
    template = ChatTemplate(source, limits=RenderLimits(max_s=0.2, max_chars=100_000))
    start = time.thread_time()
    with pytest.raises(TemplateError) as caught:
        template.render(MESSAGES)
    assert time.thread_time() - start < 5
    assert len(str(caught.value)) < 500


def test_a_long_history_renders_in_linear_time() -> None:
    template = text_case("demo").template
    source = RandomConversation(1)
    few = [message for _ in range(100) for message in source.turn()]

    def seconds(messages: list[dict[str, Any]]) -> float:
        start = time.thread_time()
        template.render(messages)
        return time.thread_time() - start

    seconds(few)
    once = min(seconds(few) for _ in range(5))
    assert min(seconds(few * 10) for _ in range(3)) < 40 * once


def test_a_syntax_error_is_reported_when_the_template_is_made() -> None:
    with pytest.raises(TemplateError, match="syntax error at line 2"):
        ChatTemplate("ok\n{% if %}")


def test_reasoning_reaches_a_template_under_the_name_it_reads() -> None:
    message = {"role": "assistant", "content": "", "reasoning_content": "R"}
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert ChatTemplate("{{ messages[0]." + name + " }}").render([message]) == "R"


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "add_generation_prompt", "_x"])
def test_template_arguments_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(TemplateError) as caught:
        check_template_kwargs({name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_template_arguments_are_an_object() -> None:
    assert check_template_kwargs(None) == {}
    assert check_template_kwargs({"enable_thinking": False}) == {"enable_thinking": False}
    with pytest.raises(TemplateError):
        check_template_kwargs([1])
