"""Tool calls and reasoning of every family: read as meant, the same for every split, never a broken call as one."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from text_fixtures import byte_level_json

from turnkeep.server.chat_messages import normalize_messages
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.cli import make_parser, server_config
from turnkeep.server.parsers import Answer, AnswerParser, OutputFormat, collect, select_format
from turnkeep.server.parsers.call_syntax import MAX_NAME_CHARS
from turnkeep.server.text_model import TextModel

NUM_SPLITS = int(os.environ.get("TURNKEEP_PARSER_SPLITS", "150"))
FIRST_SEED = int(os.environ.get("TURNKEEP_PARSER_SEED", "1"))

PARAMETERS = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "f": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"type": "array"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "words": {"type": ["string", "null"]},
        "level": {"enum": [1, 2]},
        "free": {},
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look", "add.all")]
NAMES = ("look", "add.all")


@dataclass(frozen=True)
class Family:
    """A family's format, the text of one call and of nothing but calls, and texts that are no calls."""

    form: OutputFormat
    prompt: str
    call: str  # look(s="x")
    other: str  # add.all(i=1, s="a}]{\"<b") and what makes it follow a call
    golden: list[tuple[str, Answer]] = field(default_factory=list)
    fragments: tuple[str, ...] = ()


LOOK = ("look", '{"s": "x"}')


def form_of(calls: str, reasoning: str = "think") -> OutputFormat:
    return select_format(None, tool_call_parser=calls, reasoning_parser=reasoning)


def answer(
    content: str | None = None, reasoning: str | None = None, calls: list[tuple[str, str]] | None = None
) -> Answer:
    return Answer(content, reasoning, calls or [])


XML_CALL = "<tool_call>\n<function=look>\n<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>"


def xml(*parameters: tuple[str, str], name: str = "look") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def xml_values(*parameters: tuple[str, str], **values: Any) -> tuple[str, Answer]:
    return xml(*parameters), answer(calls=[("look", json.dumps(values, ensure_ascii=False))])


XML_GOLDEN = [
    xml_values(("s", "12"), s="12"),
    xml_values(("i", "12"), ("f", "1.5"), ("b", "true"), i=12, f=1.5, b=True),
    xml_values(("b", "False"), ("maybe", "None"), b=False, maybe=None),
    xml_values(("words", "null"), ("free", "7"), words=None, free="7"),
    xml_values(("i", "many"), ("f", "NaN"), ("b", "1"), i="many", f="NaN", b="1"),
    xml_values(("level", "2"), ("o", '{"a": [1]}'), ("l", "[1, 2]"), level=2, o={"a": [1]}, l=[1, 2]),
    xml_values(("f", "1e999"), ("unknown", "[1]"), f="1e999", unknown="[1]"),
    xml_values(("s", "two\n\nlines\n"), s="two\n\nlines\n"),
    xml_values(("s", "</tool_call> </function> <x> mkdir {a,b"), s="</tool_call> </function> <x> mkdir {a,b"),
    xml_values(("s", ""), s=""),
    xml_values(),
    (XML_CALL.removeprefix("<tool_call>\n"), answer(calls=[LOOK])),
    (XML_CALL.removesuffix("\n</tool_call>"), answer(calls=[LOOK])),
    (XML_CALL.replace("\n</parameter>", ""), answer(calls=[LOOK])),
    (xml(("s", "x"), ("i", "1")).replace("\n</parameter>", "", 1), answer(calls=[("look", '{"s": "x", "i": 1}')])),
    ("<tool_call><function=look><parameter=s>x</parameter></function></tool_call>", answer(calls=[LOOK])),
    ("<function=look>\nwhat</function>", answer("<function=look>\nwhat</function>")),
    ("<tool_call>\n<parameter=s>x</parameter>", answer("<tool_call>\n<parameter=s>x</parameter>")),
    ("<function=>x", answer("<function=>x")),
    ("<function=" + "y" * MAX_NAME_CHARS, answer("<function=" + "y" * MAX_NAME_CHARS)),
    ("Use <function=a> or so", answer("Use <function=a> or so")),
]

MISTRAL_GOLDEN = [
    ('[TOOL_CALLS][{"name": "look", "arguments": {"s": "x"}}, {"name": "look"}]',
     answer(calls=[LOOK, ("look", "{}")])),
    ('[TOOL_CALLS]look{"s": "x"}', answer(calls=[LOOK])),
    ('[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"s": "x"}', answer(calls=[LOOK])),
    ('[TOOL_CALLS] look [ARGS] {"s": "x"} done', answer("done", calls=[LOOK])),
    ("[TOOL_CALLS]look[ARGS]{}", answer(calls=[("look", "{}")])),
    ("[TOOL_CALLS]look now!", answer("[TOOL_CALLS]look now!")),
    ("[TOOL_CALLS]look[ARGS]{x}", answer("[TOOL_CALLS]look[ARGS]{x}")),
    ("[TOOL_CALLS][1, 2]", answer("[TOOL_CALLS][1, 2]")),
    ("[TOOL_CALLS][]", answer("[TOOL_CALLS][]")),
]  # fmt: skip

GEMMA_CALL = '<|tool_call>call:look{s:<|"|>x<|"|>}<tool_call|>'
GEMMA_GOLDEN = [
    ('<|tool_call>call:look{i:1,f:-2.5e3,b:true,free:null,l:[1,<|"|>a<|"|>],o:{k:{}}}<tool_call|>',
     answer(calls=[("look", '{"i": 1, "f": -2500.0, "b": true, "free": null, "l": [1, "a"], "o": {"k": {}}}')])),
    ("<|tool_call>call:look{}<tool_call|>", answer(calls=[("look", "{}")])),
    ('<|tool_call>call: look { s : <|"|>x<|"|> }<tool_call|>', answer(calls=[LOOK])),
    ('<|tool_call>call:look{<|"|>s<|"|>:<|"|>x<|"|>}<tool_call|>', answer(calls=[LOOK])),
    ("<|tool_call>call:look{s:x}<tool_call|>", answer(calls=[LOOK])),
    ("<|tool_call>look{s:1}<tool_call|>", answer("<|tool_call>look{s:1}<tool_call|>")),
    ("<|tool_call>call:look{s}<tool_call|>", answer("<|tool_call>call:look{s}<tool_call|>")),
    ("<|tool_call>call:look{s:1]<tool_call|>", answer("<|tool_call>call:look{s:1]<tool_call|>")),
    ("<|tool_call>call:look{s:1} and", answer("<|tool_call>call:look{s:1} and")),
    ("<|channel>thought\nwhy\n<channel|>so", answer("so", "why")),
]  # fmt: skip

GLM_CALL = "<tool_call>look\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
GLM_GOLDEN = [
    ("<tool_call>look</tool_call>", answer(calls=[("look", "{}")])),
    ("<tool_call>look\n</tool_call>\n<tool_call>look\n</tool_call>", answer(calls=[("look", "{}")] * 2)),
    ("<tool_call>look<arg_key>i</arg_key><arg_value>7</arg_value><arg_key>s</arg_key><arg_value>7</arg_value></tool_call>",
     answer(calls=[("look", '{"i": 7, "s": "7"}')])),
    ("<tool_call>look\n<arg_key>s</arg_key>\n<arg_value> a\n</arg_key> </tool_call></arg_value></tool_call>",
     answer(calls=[("look", json.dumps({"s": " a\n</arg_key> </tool_call>"}))])),
    ("<tool_call>look\n<arg_key>o</arg_key>\n<arg_value>{\"a\": [1]}</arg_value>\n</tool_call>",
     answer(calls=[("look", '{"o": {"a": [1]}}')])),
    ("<tool_call>look<arg_key> s\n</arg_key><arg_value>x</arg_value></tool_call>", answer(calls=[LOOK])),
    ("<tool_call>look at this</tool_call>", answer("<tool_call>look at this</tool_call>")),
    ("<tool_call>look<arg_value>x</arg_value></tool_call>",
     answer("<tool_call>look<arg_value>x</arg_value></tool_call>")),
    ("<tool_call>look<arg_key>s</arg_key>x</tool_call>", answer("<tool_call>look<arg_key>s</arg_key>x</tool_call>")),
    ("<tool_call>" + "y" * MAX_NAME_CHARS, answer("<tool_call>" + "y" * MAX_NAME_CHARS)),
    ("<tool_call></tool_call>", answer("<tool_call></tool_call>")),
]  # fmt: skip

DEEPSEEK_BEGIN, DEEPSEEK_SEP, DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_CALL = f'<｜tool▁calls▁begin｜>{DEEPSEEK_BEGIN}look{DEEPSEEK_SEP}{{"s": "x"}}{DEEPSEEK_END}'
DEEPSEEK_FENCED = f'{DEEPSEEK_BEGIN}function{DEEPSEEK_SEP}look\n```json\n{{"s": "x"}}\n```{DEEPSEEK_END}'
DEEPSEEK_GOLDEN = [
    (f"<｜tool▁calls▁begin｜>{DEEPSEEK_FENCED}\n{DEEPSEEK_FENCED}<｜tool▁calls▁end｜>", answer(calls=[LOOK] * 2)),
    (f"So:\n\n<｜tool▁calls▁begin｜>{DEEPSEEK_FENCED}<｜tool▁calls▁end｜>", answer("So:", calls=[LOOK])),
    (f"{DEEPSEEK_CALL}\n{DEEPSEEK_BEGIN}look{DEEPSEEK_SEP}{{}}{DEEPSEEK_END}<｜tool▁calls▁end｜>",
     answer(calls=[LOOK, ("look", "{}")])),
    (f"{DEEPSEEK_BEGIN}function{DEEPSEEK_SEP}{{}}{DEEPSEEK_END}", answer(calls=[("function", "{}")])),
    (f"{DEEPSEEK_BEGIN}look{DEEPSEEK_SEP}[1]", answer(f"{DEEPSEEK_BEGIN}look{DEEPSEEK_SEP}[1]")),
    ("```json\n{}\n```", answer("```json\n{}\n```")),
]  # fmt: skip

KIMI_CALL = '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"s": "x"}<|tool_call_end|>'
KIMI_GOLDEN = [
    (f"<|tool_calls_section_begin|>{KIMI_CALL}{KIMI_CALL}<|tool_calls_section_end|>", answer(calls=[LOOK] * 2)),
    ("<|tool_call_begin|>look<|tool_call_argument_begin|>{}<|tool_call_end|>", answer(calls=[("look", "{}")])),
    ("<|tool_call_begin|>functions.look:0{}", answer("<|tool_call_begin|>functions.look:0{}")),
]

MINIMAX_CALL = '<minimax:tool_call>\n<invoke name="look">\n<parameter name="s">x</parameter>\n</invoke>'
MINIMAX_GOLDEN = [
    (MINIMAX_CALL + "\n</minimax:tool_call>", answer(calls=[LOOK])),
    (MINIMAX_CALL + '\n<invoke name="look">\n</invoke>\n</minimax:tool_call>', answer(calls=[LOOK, ("look", "{}")])),
    ('<invoke name="look"><parameter name="i">7</parameter><parameter name="s">\n7\n</parameter></invoke>',
     answer(calls=[("look", '{"i": 7, "s": "\\n7\\n"}')])),
    ('<invoke name="look" x>', answer('<invoke name="look" x>')),
    ("<minimax:tool_call>\n</minimax:tool_call>", answer("<minimax:tool_call>\n</minimax:tool_call>")),
]  # fmt: skip

SEED_CALL = "<seed:tool_call>\n<function=look>\n<parameter=s>x</parameter>\n</function>\n</seed:tool_call>"
SEED_GOLDEN = [
    (SEED_CALL.replace(">x<", ">\n x\n<"), answer(calls=[("look", '{"s": "\\n x\\n"}')])),
    ("<seed:think>\nwhy\n</seed:think>\n\nso", answer("so", "why")),
    ("<tool_call>x</tool_call>", answer("<tool_call>x</tool_call>")),
]

LLAMA_GOLDEN = [
    ('{"name": "look", "parameters": {"s": "x"}}', answer(calls=[LOOK])),
    ('\n{"name": "look", "parameters": {"s": "x"}}; {"name": "look"}\n', answer(calls=[LOOK, ("look", "{}")])),
    ('{"name": "look"}{"name": "look"}', answer(calls=[("look", "{}")] * 2)),
    ('{"name": "look"} fine', answer("fine", calls=[("look", "{}")])),
    ('<|python_tag|>{"name": "invented"}', answer(calls=[("invented", "{}")])),
    ('{"name": "invented"}', answer('{"name": "invented"}')),
    ('{"answer": 7}', answer('{"answer": 7}')),
    ('{"name": "look"', answer('{"name": "look"')),
    ('So: {"name": "look"}', answer('So: {"name": "look"}')),
    ("{x", answer("{x")),
    ("<|python_tag|>print(1)", answer("<|python_tag|>print(1)")),
]

PYTHON_GOLDEN = [
    (f"<|tool_call_start|>[{calls}]<|tool_call_end|>", expected)
    for calls, expected in [
        ("look(s='x'), look()", answer(calls=[LOOK, ("look", "{}")])),
        ("look(i=-1, f=1.5, b=True, free=None, l=[1, {'a': false}])", answer(calls=[
            ("look", '{"i": -1, "f": 1.5, "b": true, "free": null, "l": [1, {"a": false}]}')])),
        (r"look(s='it\'s ])')", answer(calls=[("look", '{"s": "it\'s ])"}')])),
        *((text, answer(f"<|tool_call_start|>[{text}]<|tool_call_end|>")) for text in (
            "", "1", "look(1)", "look(**{})", "look(s=open('x'))", "look(s=1e999)", "look(s={1: 2})", "look(s=b'')",
            "look(s=[)]", "(lambda: 1)()", "look(s=f'{x}')", "look(s=1,,)")),
    ]
]  # fmt: skip

HARMONY_PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
HARMONY_CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"s": "x"}'
HARMONY_GOLDEN = [
    ("<|channel|>final<|message|>so", answer("so")),
    ("<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>so", answer("so", "why")),
    ("<|channel|>analysis<|message|>why<|end|><|start|>assistant" + HARMONY_CALL + "<|call|>",
     answer(reasoning="why", calls=[LOOK])),
    ("<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant" + HARMONY_CALL,
     answer("Let me look.", calls=[LOOK])),
    (" to=functions.look<|channel|>commentary json<|message|>{}", answer(calls=[("look", "{}")])),
    ("<|channel|>commentary to=functions.look<|message|>", answer(calls=[("look", "{}")])),
    ("<|channel|>commentary to=functions.new<|message|>{}", answer(calls=[("new", "{}")])),
    ("<|channel|>commentary to=browser.open<|message|>{}", answer("{}")),
    ("<|channel|>commentary to=functions.look<|message|>nonsense<|call|>", answer("nonsense")),
    ("Hello there", answer("Hello there")),
    ("Hello " * 200, answer("Hello " * 200)),
    ("", answer("")),
    ("<|channel|>analysis<|message|>a <b> <|x", answer("", "a <b> <|x")),
]  # fmt: skip

FAMILIES: dict[str, Family] = {
    "hermes": Family(
        form_of("hermes"), "", '<tool_call>\n{"name": "look", "arguments": {"s": "x"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "add.all", "arguments": {"i": 1, "s": "a}]{\\"<b"}}\n</tool_call>',
        fragments=("<tool_call>", "</tool_call>", '{"name": "look"', "}"),
    ),
    "qwen3_coder": Family(
        form_of("qwen3_coder"), "", XML_CALL, "\n" + xml(("i", "1"), ("s", 'a}]{"<b'), name="add.all"), XML_GOLDEN,
        ("<tool_call>", "</tool_call>", "<function=look>", "</function>", "<parameter=s>", "</parameter>", "\n", "<"),
    ),
    "nemotron": Family(
        form_of("nemotron", "nemotron"), "", '<TOOLCALL>[{"name": "look", "arguments": {"s": "x"}}]</TOOLCALL>',
        '<TOOLCALL>[{"name": "add.all", "arguments": {"i": 1, "s": "a}]{\\"<b"}}]</TOOLCALL>',
        [('<TOOLCALL>[{"name": "look", "arguments": {"s": "x"}}, {"name": "look"}]</TOOLCALL>',
          answer(calls=[LOOK, ("look", "{}")])),
         ('<TOOLCALL>{"name": "look"}</TOOLCALL>', answer(calls=[("look", "{}")])),
         ("<TOOLCALL>[]</TOOLCALL>", answer("<TOOLCALL>[]</TOOLCALL>"))],
        ("<TOOLCALL>", "</TOOLCALL>", '[{"name": "look"}]', "[", "]"),
    ),
    "granite": Family(
        form_of("granite"), "", '<|tool_call|>[{"name": "look", "arguments": {"s": "x"}}]',
        '<|tool_call|>[{"name": "add.all", "arguments": "{\\"i\\": 1, \\"s\\": \\"a}]{\\\\\\"<b\\"}"}]',
        [('<tool_call>{"name": "look"}</tool_call>', answer(calls=[("look", "{}")])),
         ('<|tool_call|>[{"name": "look"}, 1]', answer('<|tool_call|>[{"name": "look"}, 1]')),
         ('<|tool_call|>[{"name": "look"},]', answer('<|tool_call|>[{"name": "look"},]'))],
        ("<|tool_call|>", "<tool_call>", '[{"name": "look"}]', "[", "]", "</tool_call>"),
    ),
    "llama3_json": Family(
        form_of("llama3_json", "none"), "", '<|python_tag|>{"name": "look", "parameters": {"s": "x"}}',
        '; {"name": "add.all", "parameters": {"i": 1, "s": "a}]{\\"<b"}}', LLAMA_GOLDEN,
        ("<|python_tag|>", '{"name": "look"}', ";", "{", "}"),
    ),
    "mistral": Family(
        form_of("mistral", "mistral"), "", '[TOOL_CALLS]look[ARGS]{"s": "x"}',
        '[TOOL_CALLS]add.all[ARGS]{"i": 1, "s": "a}]{\\"<b"}',
        [*MISTRAL_GOLDEN, ("[THINK]\nwhy\n[/THINK]\n\nso", answer("so", "why"))],
        ("[TOOL_CALLS]", "[ARGS]", "look", '{"s": 1}', '[{"name": "look"}]', "[THINK]", "[/THINK]", "["),
    ),
    "gemma": Family(
        form_of("gemma", "gemma"), "", GEMMA_CALL,
        '<|tool_call>call:add.all{i:1,s:<|"|>a}]{"<b<|"|>}<tool_call|>', GEMMA_GOLDEN,
        ("<|tool_call>", "<tool_call|>", "call:look{", '<|"|>', "}", "s:", "1", "<|channel>thought", "<channel|>"),
    ),
    "function_gemma": Family(
        form_of("function_gemma", "none"), "",
        "<start_function_call>call:look{s:<escape>x<escape>}<end_function_call>",
        '<start_function_call>call:add.all{i:1,s:<escape>a}]{"<b<escape>}<end_function_call>',
        fragments=("<start_function_call>", "<end_function_call>", "call:look{", "<escape>", "}", "s:1"),
    ),
    "json": Family(
        form_of("json", "none"), "", '{"name": "look", "arguments": {"s": "x"}}',
        ', {"name": "add.all", "arguments": {"i": 1, "s": "a}]{\\"<b"}}',
        [('[{"name": "look", "arguments": {"s": "x"}}, {"name": "look"}]', answer(calls=[LOOK, ("look", "{}")])),
         ('[{"name": "invented"}]', answer('[{"name": "invented"}]')),
         ("[1, 2]", answer("[1, 2]"))],
        ('{"name": "look"}', "[", "]", ",", ";", "{", "}"),
    ),
    "pythonic": Family(
        form_of("pythonic"), "", '<|tool_call_start|>[look(s="x")]<|tool_call_end|>',
        """<|tool_call_start|>[add.all(i=1, s='a}]{"<b')]<|tool_call_end|>""", PYTHON_GOLDEN,
        ("<|tool_call_start|>", "<|tool_call_end|>", "[look(", "s=1", ")", "'", ")]", "\\"),
    ),
    "glm": Family(
        form_of("glm"), "", GLM_CALL,
        '\n<tool_call>add.all\n<arg_key>i</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n'
        '<arg_value>a}]{"<b</arg_value>\n</tool_call>', GLM_GOLDEN,
        ("<tool_call>", "</tool_call>", "look", "<arg_key>", "s", "</arg_key>", "<arg_value>", "</arg_value>", "\n"),
    ),
    "deepseek": Family(
        form_of("deepseek"), "", DEEPSEEK_CALL,
        f'{DEEPSEEK_BEGIN}function{DEEPSEEK_SEP}add.all\n```json\n{{"i": 1, "s": "a}}]{{\\"<b"}}\n```{DEEPSEEK_END}',
        DEEPSEEK_GOLDEN,
        ("<｜tool▁calls▁begin｜>", DEEPSEEK_BEGIN, "look", DEEPSEEK_SEP, '{"s": 1}', "```", DEEPSEEK_END, "function",
         "<｜tool▁calls▁end｜>", "<｜"),
    ),
    "kimi_k2": Family(
        form_of("kimi_k2"), "", KIMI_CALL,
        '<|tool_call_begin|>functions.add.all:1<|tool_call_argument_begin|>{"i": 1, "s": "a}]{\\"<b"}<|tool_call_end|>',
        KIMI_GOLDEN,
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.look:3", "<|tool_call_argument_begin|>",
         '{"s": 1}', "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|"),
    ),
    "minimax": Family(
        form_of("minimax"), "", MINIMAX_CALL,
        '\n<invoke name="add.all">\n<parameter name="i">1</parameter>\n<parameter name="s">a}]{"<b</parameter>\n'
        "</invoke>\n</minimax:tool_call>", MINIMAX_GOLDEN,
        ("<minimax:tool_call>", '<invoke name="look">', '<parameter name="s">', "</parameter>", "</invoke>", "\n", '">',
         "</minimax:tool_call>"),
    ),
    "seed_oss": Family(
        form_of("seed_oss", "seed_oss"), "", SEED_CALL,
        "\n<seed:tool_call>\n<function=add.all>\n<parameter=i>1</parameter>\n"
        '<parameter=s>a}]{"<b</parameter>\n</function>\n</seed:tool_call>', SEED_GOLDEN,
        ("<seed:tool_call>", "</seed:tool_call>", "<function=look>", "</function>", "<parameter=s>", "</parameter>",
         "<seed:think>", "</seed:think>", "\n"),
    ),
    "harmony": Family(
        form_of("harmony", "harmony"), HARMONY_PROMPT, HARMONY_CALL,
        '<|call|><|start|>assistant<|channel|>commentary to=functions.add.all<|message|>{"i": 1, "s": "a}]{\\"<b"}',
        HARMONY_GOLDEN,
        ("<|start|>", "assistant", "<|channel|>", "analysis", "final", "commentary to=functions.look", "<|message|>",
         "<|end|>", "<|call|>", '{"s": 1}', "<|constrain|>", "<|"),
    ),
}  # fmt: skip
COMMON = (*("text", " ", "\n", "é", "<think>", "</think>", '"', "\\", "<", "Hello there ", "[", "{"),)


def parse(
    family: Family, text: str, cuts: list[int] | None = None, *, reason: str = "stop", tools: bool = True
) -> tuple[Answer, AnswerParser]:
    parser = family.form.new_parser(family.prompt, tool_names=NAMES if tools else None, tools=TOOLS)
    deltas = []
    for start, end in pairwise([0, *sorted(cuts or []), len(text)]):
        deltas += parser.push(text[start:end])
    return collect([*deltas, *parser.finish(reason)]), parser


def outcome(family: Family, text: str, cuts: list[int] | None = None, **options: Any) -> tuple[Any, ...]:
    read, parser = parse(family, text, cuts, **options)
    return read, parser.finish_reason, parser.truncated_call, parser.num_calls, parser.num_unknown_tools


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_alone_several_and_between_text_are_read(name: str) -> None:
    family = FAMILIES[name]
    other = ("add.all", {"i": 1, "s": 'a}]{"<b'})
    assert parse(family, family.call)[0] == answer(calls=[LOOK])
    both, parser = parse(family, family.call + family.other)
    assert [(call, json.loads(arguments)) for call, arguments in both.tool_calls] == [("look", {"s": "x"}), other]
    assert both.content is None
    assert (parser.finish_reason, parser.num_calls, parser.num_unknown_tools) == ("tool_calls", 2, 0)
    if name not in ("harmony", "json"):
        assert parse(family, "Well. " + family.call)[0] == answer("Well.", calls=[LOOK])
    normalize_messages([both.message(["a", "b"])])


@pytest.mark.parametrize(
    ("name", "text", "expected"), [(name, *case) for name, family in FAMILIES.items() for case in family.golden]
)
def test_what_a_family_writes_is_read_as_meant_for_every_split(name: str, text: str, expected: Answer) -> None:
    family = FAMILIES[name]
    assert parse(family, text)[0] == expected
    assert parse(family, text, list(range(len(text))))[0] == expected
    for cut in range(0, len(text) + 1, max(1, len(text) // 200)):
        assert parse(family, text, [cut])[0] == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_random_text_gives_the_same_answer_for_random_splits(name: str) -> None:
    family = FAMILIES[name]
    pieces = [*COMMON, *family.fragments, family.call, family.call + family.other, *(text for text, _ in family.golden)]
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SPLITS):
        choice = random.Random(seed)
        text = "".join(choice.choices(pieces, k=choice.randint(1, 9)))
        options = {"reason": choice.choice(["stop", "length"]), "tools": choice.random() < 0.8}
        cuts = [choice.randint(0, len(text)) for _ in range(choice.choice([1, 3, 9, len(text)]))]
        whole = outcome(family, text, **options)
        assert outcome(family, text, cuts, **options) == whole, (seed, text)
        for _, arguments in whole[0].tool_calls:
            assert isinstance(json.loads(arguments), dict)
        normalize_messages([whole[0].message([str(index) for index in range(whole[3])])])
        assert options["tools"] or not whole[0].tool_calls


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_cut_anywhere_by_the_length_limit_is_never_a_broken_call(name: str) -> None:
    family = FAMILIES[name]
    whole = json.loads(LOOK[1])
    num_cut = 0
    is_bare = name in ("json", "llama3_json")
    for end in range(len(family.call) + 1):
        read, parser = parse(family, family.call[:end], reason="length")
        assert parser.finish_reason == "length"
        assert all(json.loads(arguments) == whole for _, arguments in read.tool_calls)
        assert not (parser.truncated_call and read.tool_calls)
        num_cut += parser.truncated_call
        if parser.truncated_call and not (is_bare and '"look"' not in family.call[:end]):
            assert not (read.content or "").strip(), family.call[:end]  # nor text of which half is markup
        normalize_messages([read.message(["c"] * len(read.tool_calls))])
    assert num_cut > 5


@pytest.mark.parametrize("name", FAMILIES)
def test_no_call_is_made_where_none_is_allowed(name: str) -> None:
    family = FAMILIES[name]
    read, parser = parse(family, "Well. " + family.call + family.other, tools=False)
    assert read.tool_calls == []
    assert parser.finish_reason == "stop"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_made_although_none_is_allowed_is_left_out(name: str) -> None:
    """API-TOOL-2, PARSE-12: tool_choice none; the tools stay in the prompt, and the model may call one all the same."""
    family = FAMILIES[name]
    for text in (family.call, family.call + family.other):
        parser = family.form.new_parser(family.prompt, tool_names=NAMES, tools=TOOLS, hides_calls=True)
        read = collect([*parser.push(text), *parser.finish("stop")])
        assert read.tool_calls == []
        assert not (read.content or "").strip(), (name, read)
        assert (parser.finish_reason, parser.num_calls) == ("stop", 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_full_of_unfinished_calls_cost_linear_work(name: str) -> None:
    family = FAMILIES[name]

    def seconds(count: int) -> float:
        start = time.thread_time()
        for fragment in (family.call[:-1], family.call[: len(family.call) // 2], "".join(family.fragments[:-1])):
            parse(family, fragment * count)
        return time.thread_time() - start

    seconds(20)
    small = min(seconds(80) for _ in range(3))
    assert min(seconds(800) for _ in range(2)) < 40 * small


def test_ids_have_the_form_that_the_family_takes() -> None:
    assert len(FAMILIES["mistral"].form.new_call_id()) == 9
    assert FAMILIES["mistral"].form.new_call_id().isalnum()
    assert FAMILIES["hermes"].form.new_call_id().startswith("call_")


def test_the_id_that_a_model_gives_its_call_is_kept() -> None:
    parser = FAMILIES["kimi_k2"].form.new_parser("", tool_names=NAMES)
    deltas = [*parser.push(KIMI_CALL + KIMI_CALL.replace(":0", ":1")), *parser.finish("stop")]
    assert [delta.call_id for delta in deltas if delta.kind == "tool_call"] == ["functions.look:0", "functions.look:1"]


@pytest.mark.parametrize("tail", ["<|start|>assistant<|channel|>final<|message|>", "<|start|>assistant<|channel|>"])
def test_harmony_goes_on_where_the_prompt_ends(tail: str) -> None:
    parser = FAMILIES["harmony"].form.new_parser("<|message|>x<|end|>" + tail, tool_names=None)
    text = "so" if tail.endswith("<|message|>") else "final<|message|>so"
    assert collect([*parser.push(text), *parser.finish("stop")]) == answer("so")


def test_tools_that_a_template_prints_on_the_same_line_are_not_taken_for_the_form_of_calls() -> None:
    source = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
        " %s{{ call.function | tojson }}{% endfor %}{% endfor %}"
    )
    assert select_format(ChatTemplate(source.replace("%s", "calls "))).syntax == FAMILIES["hermes"].form.syntax
    assert select_format(ChatTemplate(source.replace(" %s", "{{ '\\n' }}"))).syntax == FAMILIES["json"].form.syntax


def test_the_command_line_names_parsers_in_place_of_the_templates() -> None:
    given = ["serve", "--tool-call-parser", "mistral", "--reasoning-parser", "none", "--state-dir", "x"]
    config = server_config(make_parser().parse_args(given))
    parsers = {"tool_call_parser": config.tool_call_parser, "reasoning_parser": config.reasoning_parser}
    form = TextModel(byte_level_json(), "{{ messages[0].content }}<think>", name="x", **parsers).format
    assert (form.syntax, form.has_reasoning) == (FAMILIES["mistral"].form.syntax, False)
    assert TextModel(byte_level_json(), "{{ messages[0].content }}<think>", name="x").format.has_reasoning
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--tool-call-parser", "unheard-of"])
