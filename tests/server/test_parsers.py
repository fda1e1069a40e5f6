"""Output parsers: the same answer for every split of the text, and no broken call ever handed out as one."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_fixtures import text_case

from turnkeep.server.chat_messages import normalize_messages
from turnkeep.server.parsers import Answer, Delta, OutputFormat, OutputParser, collect, select_format
from turnkeep.server.prompts import PromptEncoder

DEMO = OutputFormat(True, "", "", "", "")
QWEN = OutputFormat(True, "\n", "\n", "\n\n", "\n")
PLAIN = OutputFormat()
TOOL_NAMES = ("find_order", "add")

CALL = '<tool_call>{"name": "find_order", "arguments": {"order": "7"}}</tool_call>'
OTHER = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [{"x": "}"}]}}\n</tool_call>'


def parse(text: str, form: OutputFormat = DEMO, *, tools: object = TOOL_NAMES, prompt: str = "", reason: str = "stop",
          cuts: list[int] | None = None) -> tuple[Answer, OutputParser, list[Delta]]:  # fmt: skip
    parser = form.new_parser(prompt, tool_names=tools)  # type: ignore[arg-type]
    deltas: list[Delta] = []
    positions = [0, *sorted(cuts or []), len(text)]
    for start, end in pairwise(positions):
        deltas += parser.push(text[start:end])
    deltas += parser.finish(reason)
    return collect(deltas), parser, deltas


GOLDEN: list[tuple[str, OutputFormat, str, Answer]] = [
    ("", DEMO, "", Answer("", None, [])),
    ("Hello\n", DEMO, "", Answer("Hello\n", None, [])),
    ("<think>why</think>so", DEMO, "", Answer("so", "why", [])),
    ("<think>\nwhy\n</think>\n\nso", QWEN, "", Answer("so", "why", [])),
    ("<think>\n\n</think>\n\nso", QWEN, "", Answer("so", None, [])),
    ("\nwhy\n</think>\n\nso", QWEN, "...<think>", Answer("so", "why", [])),
    ("why\n</think>\n\nso", QWEN, "...<think>\n", Answer("so", "why", [])),
    ("so", QWEN, "...<think>\n\n</think>\n\n", Answer("so", None, [])),
    ("why", QWEN, "<think>\n", Answer("", "why", [])),
    ("<think>why", DEMO, "", Answer("", "why", [])),
    ("<think>a</think><think>b</think>c", DEMO, "", Answer("c", "ab", [])),
    ("so</think> then", DEMO, "", Answer("so then", None, [])),
    (CALL, DEMO, "", Answer(None, None, [("find_order", '{"order": "7"}')])),
    ("<think>look</think>" + CALL, DEMO, "", Answer(None, "look", [("find_order", '{"order": "7"}')])),
    (f"<think>\nlook\n</think>\n\n{CALL}", QWEN, "", Answer(None, "look", [("find_order", '{"order": "7"}')])),
    ("Let me look." + CALL, DEMO, "", Answer("Let me look.", None, [("find_order", '{"order": "7"}')])),
    ("Let me look.\n" + CALL, DEMO, "", Answer("Let me look.\n", None, [("find_order", '{"order": "7"}')])),
    ("Let me look.\n" + CALL, QWEN, "", Answer("Let me look.", None, [("find_order", '{"order": "7"}')])),
    ("Let me look.\n\n" + CALL, QWEN, "", Answer("Let me look.\n", None, [("find_order", '{"order": "7"}')])),
    ("Let me look.\n\n" + CALL, PLAIN, "", Answer("Let me look.", None, [("find_order", '{"order": "7"}')])),
    ("\n" + CALL, DEMO, "", Answer(None, None, [("find_order", '{"order": "7"}')])),
    (
        f"{CALL}\n{OTHER}\n",
        QWEN,
        "",
        Answer(None, None, [("find_order", '{"order": "7"}'), ("add", '{"a": 1, "b": [{"x": "}"}]}')]),
    ),
    (f"{CALL} done", DEMO, "", Answer("done", None, [("find_order", '{"order": "7"}')])),
    (f"Well. {CALL} done", DEMO, "", Answer("Well.  done", None, [("find_order", '{"order": "7"}')])),
    # No arguments, under another name, as a string, in another order, with raw line breaks.
    ('<tool_call>{"name": "add"}</tool_call>', DEMO, "", Answer(None, None, [("add", "{}")])),
    ('<tool_call>{"name": "add", "arguments": null}</tool_call>', DEMO, "", Answer(None, None, [("add", "{}")])),
    ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', DEMO, "", Answer(None, None, [("add", "{}")])),
    ('<tool_call>{"name":"add","parameters":{"a":1}}</tool_call>', DEMO, "", Answer(None, None, [("add", '{"a":1}')])),
    ('<tool_call>{"arguments": {"a": 1.50}, "name": "add"}</tool_call>', DEMO, "",
     Answer(None, None, [("add", '{"a": 1.50}')])),
    ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', DEMO, "",
     Answer(None, None, [("add", '{"a": 1}')])),
    ('<tool_call>{"name": "add", "arguments": {"t": "a\nb"}}</tool_call>', DEMO, "",
     Answer(None, None, [("add", '{"t": "a\\nb"}')])),
    # Markup and braces inside a value.
    ('<tool_call>{"name": "add", "arguments": {"t": "</tool_call> {\\"<tool_call>"}}</tool_call>', DEMO, "",
     Answer(None, None, [("add", '{"t": "</tool_call> {\\"<tool_call>"}')])),
    # The end tag is missing: before the next call, or at the end.
    (CALL.removesuffix("</tool_call>"), DEMO, "", Answer(None, None, [("find_order", '{"order": "7"}')])),
    (CALL.removesuffix("</tool_call>") + CALL, DEMO, "", Answer(None, None, [("find_order", '{"order": "7"}')] * 2)),
    # What is no call stays text, and the next one is still seen.
    ("<tool_call>nonsense</tool_call>", DEMO, "", Answer("<tool_call>nonsense</tool_call>", None, [])),
    ('<tool_call>{"name": "add"</tool_call>ok', DEMO, "", Answer('<tool_call>{"name": "add"</tool_call>ok', None, [])),
    ('<tool_call>{"name": 5}</tool_call>', DEMO, "", Answer('<tool_call>{"name": 5}</tool_call>', None, [])),
    ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', DEMO, "",
     Answer('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', None, [])),
    ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', DEMO, "",
     Answer('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', None, [])),
    ('<tool_call>{"name": "add"}}</tool_call>', DEMO, "", Answer('<tool_call>{"name": "add"}}</tool_call>', None, [])),
    ('<tool_call>{"name": "add}</tool_call>' + CALL, DEMO, "",
     Answer('<tool_call>{"name": "add}</tool_call>', None, [("find_order", '{"order": "7"}')])),
    # Inside unclosed reasoning: a call of a declared tool is one, talk about calls is not.
    ("<think>I call" + CALL, DEMO, "", Answer(None, "I call", [("find_order", '{"order": "7"}')])),
    ("<think>I could write <tool_call> or not</think>x", DEMO, "",
     Answer("x", "I could write <tool_call> or not", [])),
    ('<think>like <tool_call>{"name": "f"}</tool_call>?</think>x', DEMO, "",
     Answer("x", 'like <tool_call>{"name": "f"}</tool_call>?', [])),
    # A template without reasoning shows the tags as they are.
    ("<think>x</think>y", PLAIN, "", Answer("<think>x</think>y", None, [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "form", "prompt", "expected"), GOLDEN)
def test_answers_are_read_as_meant(text: str, form: OutputFormat, prompt: str, expected: Answer) -> None:
    answer, parser, _ = parse(text, form, prompt=prompt)
    assert answer == expected
    assert parser.finish_reason == ("tool_calls" if expected.tool_calls else "stop")
    for _, arguments in answer.tool_calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("tools", [TOOL_NAMES, None], ids=["tools", "no tools"])
@pytest.mark.parametrize(("text", "form", "prompt", "expected"), GOLDEN)
def test_every_split_in_two_and_every_single_character_give_the_same(
    text: str, form: OutputFormat, prompt: str, expected: Answer, tools: object
) -> None:
    whole = parse(text, form, tools=tools, prompt=prompt)[0]
    for cut in range(len(text) + 1):
        assert parse(text, form, tools=tools, prompt=prompt, cuts=[cut])[0] == whole
    assert parse(text, form, tools=tools, prompt=prompt, cuts=list(range(len(text))))[0] == whole
    assert tools is None or whole == expected


FRAGMENTS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", CALL, OTHER, '{"name": "add", "arguments": {', "}", '"'),
    *("\n", "\n\n", " ", "text", "<", "<tool", "_call>", "</", "\\", "{", "[", "é", '{"name": "add"}', "true", ":"),
]


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join),
    st.sampled_from([DEMO, QWEN, PLAIN]),
    st.sampled_from(["", "<think>", "<think>\n"]),
    st.booleans(),
    st.sampled_from(["stop", "length"]),
    st.randoms(use_true_random=False),
)
def test_streamed_equals_whole_for_random_text_and_splits(
    text: str, form: OutputFormat, prompt: str, tools: bool, reason: str, choice: random.Random
) -> None:
    names = TOOL_NAMES if tools else None
    whole, parser, _ = parse(text, form, tools=names, prompt=prompt, reason=reason)
    cuts = [choice.randint(0, len(text)) for _ in range(choice.randint(1, 8))]
    streamed, other, deltas = parse(text, form, tools=names, prompt=prompt, reason=reason, cuts=cuts)
    assert streamed == whole
    assert (other.finish_reason, other.truncated_call) == (parser.finish_reason, parser.truncated_call)
    for _, arguments in whole.tool_calls:
        assert isinstance(json.loads(arguments), dict)
    indices = [delta.index for delta in deltas if delta.kind == "tool_call"]
    assert indices == list(range(len(indices)))
    if not tools:
        assert not whole.tool_calls


@pytest.mark.parametrize("form", [DEMO, QWEN, PLAIN])
def test_a_call_cut_anywhere_by_the_length_limit_is_reported_as_cut_and_stays_replayable(form: OutputFormat) -> None:
    text = "Now. " + OTHER
    end_of_object = text.rindex("}") + 1
    for cut in range(len("Now. <tool_call>"), len(text)):
        answer, parser, _ = parse(text[:cut], form, reason="length")
        assert parser.finish_reason == "length"
        if cut < end_of_object:
            assert parser.truncated_call
            assert answer.tool_calls == []
            assert (answer.content or "").rstrip() == "Now."
            normalize_messages([answer.message()])
        else:
            assert not parser.truncated_call or answer.tool_calls == []


def test_markup_never_shows_when_calls_are_not_allowed() -> None:
    answer, parser, _ = parse("a" + CALL + "b", tools=None)
    assert answer.content == 'a{"name": "find_order", "arguments": {"order": "7"}}b'
    assert answer.tool_calls == []
    assert parser.finish_reason == "stop"


def test_a_call_of_an_unknown_tool_is_handed_over_and_counted() -> None:
    answer, parser, _ = parse('<tool_call>{"name": "invented"}</tool_call>' + CALL)
    assert [name for name, _ in answer.tool_calls] == ["invented", "find_order"]
    assert parser.num_unknown_tools == 1


def test_text_is_delivered_at_once_except_what_may_be_markup() -> None:
    parser = DEMO.new_parser("", tool_names=TOOL_NAMES)
    assert parser.push("Hello") == [Delta("content", "Hello")]
    assert parser.push(" the") == [Delta("content", " the")]
    assert parser.push("re <") == [Delta("content", "re")]
    assert parser.push("tool_box") == [Delta("content", " <tool_box")]


def test_a_very_long_call_is_read_in_linear_time() -> None:
    def seconds(size: int) -> float:
        body = json.dumps({"name": "add", "arguments": {"text": 'line {"}\n' * size}})
        text = f"<tool_call>{body}</tool_call>"
        parser = DEMO.new_parser("", tool_names=TOOL_NAMES)
        start = time.thread_time()
        deltas = [delta for i in range(0, len(text), 4) for delta in parser.push(text[i : i + 4])]
        deltas += parser.finish("stop")
        assert [delta.kind for delta in deltas] == ["tool_call", "arguments"]
        return time.thread_time() - start

    seconds(1000)
    small = min(seconds(1500) for _ in range(3))
    assert min(seconds(15000) for _ in range(3)) < 40 * small


def test_many_unfinished_calls_do_not_cost_quadratic_time() -> None:
    def seconds(count: int) -> float:
        start = time.thread_time()
        for text in ('<tool_call>{"', "<tool_call>{", '<tool_call>{"a": "'):
            parse(text * count)
        return time.thread_time() - start

    small = min(seconds(300) for _ in range(3))
    assert min(seconds(3000) for _ in range(2)) < 40 * small


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo", OutputFormat(True, "", "", "", "")),
        ("thinking_stripped", OutputFormat(True, "\n", "\n", "\n\n", "\n")),
        ("open_think", OutputFormat(True, "\n", "\n", "\n\n", "\n\n")),
        ("chatml", OutputFormat(False, call_separator="\n")),
        ("plain_text", OutputFormat(False)),
    ],
)
def test_the_format_is_read_off_the_template(name: str, expected: OutputFormat) -> None:
    assert select_format(text_case(name).template) == expected


def test_without_a_template_calls_are_still_read() -> None:
    assert select_format(None) == OutputFormat()


@pytest.mark.parametrize("name", ["demo", "thinking_stripped", "open_think", "chatml"])
@pytest.mark.parametrize("content", ["", "Fine.", "Fine.\nNext"])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_an_echoed_answer_renders_to_the_text_that_was_generated(name: str, content: str, calls: int) -> None:
    """Render an answer, read it as if it had been generated, send it back: the same prompt text."""
    case = text_case(name)
    form = select_format(case.template)
    encoder = PromptEncoder(case.template, case.tokenizer)
    tools = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    asked = [{"role": "user", "content": "Go"}]
    function = {"name": "add", "arguments": {"a": 1}}
    answer = {"role": "assistant", "content": content, "reasoning_content": "because\nof"}
    if calls:
        answer["tool_calls"] = [{"id": f"c{i}", "type": "function", "function": function} for i in range(calls)]
    prompt = encoder.encode(asked, tools=tools).text
    text = encoder.encode([*asked, answer], tools=tools, add_generation_prompt=False).text
    assert text.startswith(prompt)
    generated = text[len(prompt) :].removesuffix("\n").removesuffix("<|im_end|>").removesuffix("<|end|>")
    read = parse(generated, form, prompt=prompt, tools=("add",))[0]
    echoed = normalize_messages([read.message([f"c{i}" for i in range(calls)])])
    assert encoder.encode([*asked, *echoed], tools=tools, add_generation_prompt=False).text == text
    assert len(read.tool_calls) == calls
