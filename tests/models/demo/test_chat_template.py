"""The chat template: what it strips, what it keeps, and the forms of messages it takes."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.order_desk import TOOLS
from turnkeep.models.demo.rendering import DIRECTORY, END, USER, render_message, render_system

Message = dict[str, Any]

LOOP: list[Message] = [
    {"role": "user", "content": "Show order B47."},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I look up the order.",
        "tool_calls": [{"id": "1", "function": {"name": "get_order", "arguments": '{"order": "B47"}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": '{"status": "open"}'},
]
CALL_TEXT = '<tool_call>{"name": "get_order", "arguments": {"order": "B47"}}</tool_call>'


def render(messages: list[Message], **variables: Any) -> str:
    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = fail
    template = environment.from_string((DIRECTORY / "chat_template.jinja").read_text(encoding="utf-8"))
    return template.render(messages=messages, **variables)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_the_python_rendering_of_training_equals_the_template(seed: int, keep: bool) -> None:
    script = conversation(seed, 15, with_tools=seed != 3)
    expected = render_system(script.system, script.tools)
    for turn in script.turns:
        current = keep or turn is script.turns[-1]
        expected += f"{USER}{turn.user}{END}"
        expected += "".join(render_message(m, with_reasoning=current) for m in turn.messages)
    assert render(script.messages(), tools=script.tools, keep_thinking=keep) == expected


def test_reasoning_stays_inside_a_tool_loop() -> None:
    text = render(LOOP, add_generation_prompt=True)
    assert text == (
        f"<|user|>Show order B47.<|end|><|assistant|><think>I look up the order.</think>{CALL_TEXT}<|end|>"
        '<|tool|>{"status": "open"}<|end|><|assistant|>'
    )


def test_reasoning_of_closed_turns_is_stripped() -> None:
    text = render([*LOOP, {"role": "user", "content": "Thanks!"}])
    assert "think" not in text
    assert f"<|assistant|>{CALL_TEXT}<|end|>" in text


def test_the_switch_keeps_all_reasoning() -> None:
    text = render([*LOOP, {"role": "user", "content": "Thanks!"}], keep_thinking=True)
    assert "<think>I look up the order.</think>" in text


def test_both_names_of_the_reasoning_field_are_read() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!", "reasoning": "A greeting."},
    ]
    assert render(messages).endswith("<|assistant|><think>A greeting.</think>Hello!<|end|>")


@pytest.mark.parametrize("arguments", [{"order": "B47"}, '{"order": "B47"}'])
def test_arguments_may_be_an_object_or_its_text(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "get_order", "arguments": arguments}}
    text = render([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [call]}])
    assert text == f"<|user|>x<|end|><|assistant|>y{CALL_TEXT}<|end|>"


def test_the_text_of_arguments_is_not_rewritten() -> None:
    call = {"function": {"name": "get_order", "arguments": '{ "order" :"B47"}'}}
    text = render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert '"arguments": { "order" :"B47"}}' in text


@pytest.mark.parametrize(
    ("content", "rendered"),
    [
        ('{"stock": 3}', '{"stock": 3}'),
        ({"stock": 3}, '{"stock": 3}'),
        ([{"type": "text", "text": "three"}, {"type": "text", "text": " left"}], "three left"),
        ("", ""),
        (None, ""),
    ],
)
def test_forms_of_a_tool_result(content: Any, rendered: str) -> None:
    assert render([{"role": "tool", "content": content}]) == f"<|tool|>{rendered}<|end|>"


def test_tools_stand_in_the_system_block_with_and_without_system_text() -> None:
    user = {"role": "user", "content": "Hi"}
    with_text = render([{"role": "system", "content": "Be brief."}, user], tools=TOOLS[:1])
    assert with_text == "<|system|>Be brief.\nTools:\nget_order(order): look up an order<|end|><|user|>Hi<|end|>"
    assert render([user], tools=TOOLS[:1]).startswith("<|system|>\nTools:\nget_order(order)")
    assert render([user]) == "<|user|>Hi<|end|>"


def test_what_it_cannot_render_is_an_error() -> None:
    with pytest.raises(jinja2.TemplateError, match="only text content"):
        render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    with pytest.raises(jinja2.TemplateError, match="unknown message role"):
        render([{"role": "critic", "content": "x"}])
