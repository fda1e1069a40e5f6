"""Grammars of answers: what a matcher takes and what it refuses, for templates and tokenizers of several kinds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from live_server import make_text_model
from llguidance import LLMatcher, LLTokenizer
from text_fixtures import MARKUP, TEMPLATES, byte_level_json

from turnkeep.server.chat_completions import convert_request
from turnkeep.server.errors import ApiError
from turnkeep.server.output_rules import OutputRules, output_rules
from turnkeep.server.parsers import OutputFormat
from turnkeep.server.structured_output import CallLayout, GrammarWriter, find_call_layout
from turnkeep.server.text_model import TextModel

SCHEMA = {
    "type": "object",
    "properties": {"order": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["order"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("get", "set")]
ANSWER = OutputRules("response_format", {"json_schema": SCHEMA})
REQUIRED = OutputRules("tool_choice", None, "required", ("get", "set"))
NAMED = OutputRules("tool_choice", None, "required", ("get",), is_single_call=True)
ALLOWED = OutputRules("tool_choice", None, "allowed", ("get",))
EITHER = OutputRules("response_format", {"json_schema": SCHEMA}, "allowed", ("get", "set"))


@dataclass
class Case:
    text_model: TextModel
    tokenizer: LLTokenizer
    writer: GrammarWriter
    layout: CallLayout | None

    def takes(self, rules: OutputRules, text: str, prompt: str = "<|assistant|>") -> bool:
        """Whether a text is a whole answer."""
        matcher = LLMatcher(self.tokenizer, self.writer.write(rules, TOOLS, prompt), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.text_model.tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def calls(self, *names: str, arguments: str = '{"order": "B", "n": 1}') -> str:
        """The text of calls, as the template prints them."""
        assert self.layout is not None
        bodies = [name + self.layout.between + arguments for name in names]
        return self.layout.first + (self.layout.again or "").join(bodies) + self.layout.last

    def thought(self) -> str:
        output_format = self.text_model.format
        return f"<think>\nabc {{x}}\n</think>{output_format.content_prefix}" if output_format.has_reasoning else ""


HEADER = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.tool_calls %}"
FOOTER = (
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
JSON_CALL = "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
LISTED = "{% for call in m.tool_calls %}" + JSON_CALL + "{% if not loop.last %}, {% endif %}{% endfor %}"
# Calls as families print them.
FAMILIES = {
    "nemotron": f"<TOOLCALL>[{LISTED}]</TOOLCALL>",
    "granite": f"<|tool_call|>[{LISTED}]",
    "mistral": "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}",
    "deepseek": "<｜tool▁calls▁begin｜>{% for call in m.tool_calls %}<｜tool▁call▁begin｜>{{ call.function.name }}"
    "<｜tool▁sep｜>{{ call.function.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "llama": "{% if m.tool_calls[1:] %}{{ raise_exception('one call at a time') }}{% endif %}"
    """{{ '{"name": "' ~ m.tool_calls[0].function.name ~ '", "parameters": ' }}"""
    "{{ m.tool_calls[0].function.arguments | tojson }}}",
    "with_ids": "[TOOL_CALLS] [{% for call in m.tool_calls %}{{ {'name': call.function.name, "
    "'arguments': call.function.arguments, 'id': call.id} | tojson }}{% endfor %}]",
    "as_xml": "{% for call in m.tool_calls %}<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}",
}


@cache
def case(name: str) -> Case:
    """demo; or a template with markup as tokens (:tokens) or as text (:text)."""
    template, _, kind = name.partition(":")
    if name == "demo":
        text_model = make_text_model()
    else:
        description = json.loads(byte_level_json())
        if kind == "text":
            added = [token for token in description["added_tokens"] if token["content"] not in MARKUP]
            description["added_tokens"] = added
        if template in FAMILIES:
            text = HEADER + FAMILIES[template] + FOOTER
        else:
            text = (TEMPLATES / f"{template}.jinja").read_text()
        text_model = TextModel(json.dumps(description), text, name="x", bos_token="<|bos|>", eos_token_ids=[3])
    vocab_size = text_model.tokenizer.vocab_size
    tokenizer = LLTokenizer(text_model.tokenizer.description, n_vocab=vocab_size, eos_token=[2])
    special = frozenset(token_id for token_id in range(vocab_size) if tokenizer.is_special_token(token_id))
    writer = GrammarWriter(text_model.template, text_model.tokenizer, text_model.format, special)
    return Case(text_model, tokenizer, writer, find_call_layout(text_model.template, text_model.format))


NAMES = [
    "demo",
    *(f"{name}:{kind}" for name in ("chatml", "open_think", "thinking_stripped") for kind in ("tokens", "text")),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_binds_the_answer_and_not_the_reasoning(name: str) -> None:
    one = case(name)
    assert one.takes(ANSWER, '{"order": "B"}')
    assert one.takes(ANSWER, one.thought() + '{"order": "B", "n": 12}')
    assert one.takes(ANSWER, '{\n  "order": "B"\n}')
    assert one.takes(ANSWER, '{"order":"B","n":1}')
    for wrong in ('{"order": "B", "x": 1}', "{}", "hello", one.thought() + "hello", '{"order": "B"', one.calls("get")):
        assert not one.takes(ANSWER, wrong), wrong
    for blanks in ("  ", " " * 40, "\n\n", "\n" + " " * 40):
        assert not one.takes(ANSWER, "{" + blanks + '"order": "B"}'), "a model must not lose itself in blanks"


@pytest.mark.parametrize("name", NAMES)
def test_required_calls_are_made_in_the_models_own_form(name: str) -> None:
    one = case(name)
    for rules, texts in {
        REQUIRED: [one.calls("get"), one.thought() + one.calls("set"), one.calls("get", "set")],
        NAMED: [one.calls("get"), one.thought() + one.calls("get")],
    }.items():
        for text in texts:
            assert one.takes(rules, text), text
    for wrong in (
        "",
        "hi",
        "hi " + one.calls("get"),
        one.thought(),
        one.calls("other"),
        one.calls("get", arguments="{}"),
    ):
        assert not one.takes(REQUIRED, wrong), wrong
    for wrong in (one.calls("set"), one.calls("get", "get"), one.calls("get") * 2):
        assert not one.takes(NAMED, wrong), wrong


@pytest.mark.parametrize("name", NAMES)
def test_allowed_tools_leave_text_free_and_let_no_other_call_through(name: str) -> None:
    one = case(name)
    call = one.calls("get")
    several = one.calls("get", "get")
    for text in ("", "hi\n\nthere", one.thought() + "hi", "hi " + call, call, one.thought() + "well " + several):
        assert one.takes(ALLOWED, text), text
    for wrong in (one.calls("set"), "hi " + one.calls("set"), one.calls("get", "set")):
        assert not one.takes(ALLOWED, wrong), wrong


@pytest.mark.parametrize("name", NAMES)
def test_with_tools_a_schema_leaves_the_choice_of_calling(name: str) -> None:
    one = case(name)
    assert one.takes(EITHER, one.calls("set"))
    assert one.takes(EITHER, one.thought() + '{"order": "B"}')
    assert not one.takes(EITHER, "hi")


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_the_end_of_the_prompt_tells_whether_reasoning_is_open(kind: str) -> None:
    one = case(f"open_think:{kind}")
    assert one.takes(ANSWER, 'abc {\n</think>\n\n{"order": "B"}', "<think>\n")
    assert not one.takes(ANSWER, '{"order": "B"}', "<think>\n"), "that is reasoning still"
    assert one.takes(ANSWER, '{"order": "B"}', "<think>\n\n</think>\n\n")
    assert not one.takes(ANSWER, '<think>a</think>{"order": "B"}', "<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["nemotron", "granite", "mistral", "deepseek", "llama"])
def test_calls_of_other_families_take_their_own_form(name: str) -> None:
    one = case(name)
    assert one.takes(NAMED, one.calls("get"))
    assert not one.takes(NAMED, one.calls("set"))
    assert not one.takes(REQUIRED, "hi")
    if name == "deepseek":
        assert one.calls("get").startswith("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{")
        assert one.calls("get").endswith("}<｜tool▁call▁end｜><｜tool▁calls▁end｜>")
    if name == "llama":
        assert one.calls("get") == '{"name": "get", "parameters": {"order": "B", "n": 1}}'
        assert not one.takes(REQUIRED, one.calls("get", "set")), "it makes one call at a time"
        with pytest.raises(ApiError, match="cannot be told from text"):
            one.takes(ALLOWED, "hi")
    else:
        assert one.takes(REQUIRED, one.calls("get", "set"))
        assert one.takes(ALLOWED, "hi " + one.calls("get"))
        assert not one.takes(ALLOWED, "hi " + one.calls("set"))


@pytest.mark.parametrize("name", ["with_ids", "as_xml", "tools_last:tokens", "channels:tokens"])
def test_calls_of_a_form_that_cannot_be_kept_are_refused_not_guessed_at(name: str) -> None:
    with pytest.raises(ApiError, match="cannot be constrained"):
        case(name).takes(REQUIRED, "")
    assert case(name).takes(ANSWER, '{"order": "B"}')


def test_channels_are_refused_but_bare_texts_are_not() -> None:
    text_model = case("chatml:tokens").text_model
    channels = OutputFormat(has_reasoning=True, is_harmony=True)
    writer = GrammarWriter(text_model.template, text_model.tokenizer, channels, frozenset())
    with pytest.raises(ApiError, match="in channels"):
        writer.write(ANSWER, [], "<|start|>assistant")
    assert '"json_schema"' in writer.write(ANSWER, [], None)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ({"regex": r"[0-9]{2}/[a-z]\/x"}, ["12/a/x"], ["12/a", "1/a/x"]),
        ({"regex": "a\nb"}, ["a\nb"], ["ab"]),
        ({"choice": ["yes", 'é\n"q', "no way"]}, ["yes", 'é\n"q', "no way"], ["no", "yes "]),
        ({"lark_grammar": 'start: "a" | "b"'}, ["a", "b"], ["c"]),
        ({"json_schema": {"type": "object"}}, ['{"a": {"b": [1, null]}}'], ["[]", "1"]),
    ],
)
def test_other_forms_of_answers(answer: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    rules = OutputRules("x", answer)
    assert all(case("demo").takes(rules, text) for text in right)
    assert not any(case("demo").takes(rules, text) for text in wrong)


def rules_of(tools: list[dict[str, Any]] | None = None, **fields: Any) -> OutputRules | None:
    return output_rules(convert_request({"model": "m", "messages": [{}], "tools": tools, **fields}), tools)


def only(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_fields_of_requests_become_rules() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "o", "strict": True, "schema": SCHEMA}}
    named = {"type": "function", "function": {"name": "get"}}
    assert rules_of() is None
    assert rules_of(TOOLS, tool_choice="auto", response_format={"type": "text"}) is None
    assert rules_of(response_format=schema) == ANSWER
    assert rules_of(TOOLS, response_format=schema) == EITHER
    assert rules_of(TOOLS, tool_choice="required") == REQUIRED
    assert rules_of(TOOLS, tool_choice=named) == NAMED
    assert rules_of(TOOLS, tool_choice=only("auto", "get")) == ALLOWED
    assert rules_of(TOOLS, tool_choice=only("required", "set", "get")) == OutputRules(
        "tool_choice", None, "required", ("set", "get")
    )
    assert rules_of(guided_json=json.dumps(SCHEMA)) == OutputRules("guided_json", {"json_schema": SCHEMA})
    assert rules_of(structured_outputs={"choice": ["a"]}) == OutputRules("structured_outputs.choice", {"choice": ["a"]})
    without_calls = rules_of(TOOLS, tool_choice="none", response_format=schema)
    assert without_calls is not None
    assert without_calls.calls == "none"


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "other"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": only("auto")}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": only("never", "get")}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": only("auto", "get", "x")}, "tool_choice.allowed_tools.tools[1]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"guided_json": nested(70)}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a\0"}, "guided_regex"),
        ({"guided_regex": "a" * 9000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        rules_of(**fields)
    assert (refusal.value.status, refusal.value.param) == (400, param)
