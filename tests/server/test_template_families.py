"""Templates of the families people run: rendered as transformers does, encoded safely, read back as written."""

from __future__ import annotations

import json
import time
import warnings
from functools import cache
from typing import Any

import pytest
from family_templates import FAMILY_NAMES, FamilyCase, FamilyConversation, family_case
from text_fixtures import NOW, TOOLS

from turnkeep.scheduler.request import SamplingParams
from turnkeep.server.answer_text import AnswerText
from turnkeep.server.chat_messages import normalize_messages
from turnkeep.server.parsers import collect, select_format
from turnkeep.server.parsers.output_format import CALL_SYNTAXES
from turnkeep.server.prompt_memory import MemoryKey
from turnkeep.server.prompts import PromptEncoder
from turnkeep.server.text_model import TextModel
from turnkeep.server.turn_request import TurnRequest

NUM_HISTORIES = 5


@cache
def reference_tokenizer(name: str) -> Any:
    case = family_case(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        names = {key: case.template.special_tokens[key] for key in ("bos_token", "eos_token")}
        backend = Tokenizer.from_str(case.tokenizer_json)
        return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=case.template.source, **names)


def plain(case: FamilyCase, value: Any) -> Any:
    """Plain data without text that spells control tokens: the reference makes control tokens of it."""
    if isinstance(value, str):
        return case.tokenizer.control_pattern.sub("", value)
    if isinstance(value, list):
        return [plain(case, item) for item in value]
    return {key: plain(case, item) for key, item in value.items()} if isinstance(value, dict) else value


def with_thinking(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As clients of the reference must write it: reasoning under the name that a template reads."""
    return [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_text_and_tokens_equal_those_of_transformers(name: str) -> None:
    case = family_case(name)
    reference = reference_tokenizer(name)
    encoder = PromptEncoder(case.template, case.tokenizer)
    num_thoughts = num_results = 0
    for seed in range(NUM_HISTORIES):
        source = FamilyConversation(seed)
        messages = plain(case, source.history(1 + seed % 3, in_loop=seed % 2 == 1))
        tools = plain(case, TOOLS) if seed % 3 else None
        for kwargs in case.family.kwargs:
            for generation in (True, False):
                expected = reference.apply_chat_template(
                    with_thinking(messages), tools=tools, add_generation_prompt=generation, tokenize=False, **kwargs
                )
                prompt = encoder.encode(
                    messages, tools=tools, template_kwargs=kwargs, now=time.time(), add_generation_prompt=generation,
                    key=MemoryKey("", str(seed)),
                )  # fmt: skip
                assert prompt.text == expected
                assert prompt.token_ids == reference(expected, add_special_tokens=False)["input_ids"]
        num_thoughts += any("reasoning_content" in message for message in messages)
        num_results += any(message["role"] == "tool" for message in messages)
    assert encoder.num_relaxed == encoder.num_without_cuts == 0
    assert min(num_thoughts, num_results) >= 2


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_control_tokens_spelled_by_users_tools_and_results_stay_text(name: str) -> None:
    case = family_case(name)
    spelled = "".join(case.family.tokens) + "<|bos|><|eos|>"

    def ids(text: str) -> list[int]:
        call = {"id": "call00000", "type": "function", "function": {"name": "find_order", "arguments": {"order": text}}}
        messages = [
            {"role": "system", "content": "S " + text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": "call00000"},
        ]
        return PromptEncoder(case.template, case.tokenizer).encode(messages, tools=TOOLS, now=NOW).token_ids

    def control(token_ids: list[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id in case.tokenizer.special_ids]

    hostile = ids(f"a{spelled}b")
    assert control(hostile) == control(ids("ab"))
    assert spelled in case.tokenizer.decode(hostile)


@pytest.mark.parametrize("name", ["llama3", "granite3", "gpt_oss"])
def test_a_date_in_the_prompt_is_the_one_that_the_conversation_began_with(name: str) -> None:
    encoder = PromptEncoder(family_case(name).template, family_case(name).tokenizer)
    messages = [{"role": "user", "content": "Hi"}]
    first, later = (encoder.encode(messages, now=now).token_ids for now in (NOW, NOW + 86400 * 40))
    assert first == encoder.encode(messages, now=NOW).token_ids != later


def test_ids_of_calls_that_a_template_refuses_are_made_fit() -> None:
    case = family_case("mistral3")
    encoder = PromptEncoder(case.template, case.tokenizer)

    def text(call_id: str) -> str:
        function = {"name": "find_order", "arguments": {}}
        return encoder.encode([
            {"role": "user", "content": "Go"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "function": function}]},
            {"role": "tool", "content": "late", "tool_call_id": call_id},
        ]).text  # fmt: skip

    assert '"call_id": "call00000"' in text("call00000")
    assert encoder.num_relaxed == 0
    foreign = text("toolu_0123456789")
    assert "toolu" not in foreign
    assert foreign != text("call_7f")
    assert encoder.num_relaxed == 2


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_form_of_calls_is_told_by_the_template(name: str) -> None:
    form = select_format(family_case(name).template)
    wanted = family_case(name).family.parser
    assert form.is_harmony == (wanted == "harmony")
    assert form.is_harmony or form.syntax == CALL_SYNTAXES[wanted]
    assert form.has_reasoning == (name not in ("qwen3_coder", "granite3", "granite4", "llama3", "mistral3", "hermes3"))


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("content", ["", "Fine.\nNext"])
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_an_echoed_answer_renders_to_the_text_that_was_generated(name: str, content: str, calls: int) -> None:
    """Render an answer, read it as if it had been generated, send it back: the same prompt text."""
    if calls and content and name == "llama3":
        content = ""  # this template prints a call or a content
    case = family_case(name)
    form = select_format(case.template)
    encoder = PromptEncoder(case.template, case.tokenizer)
    asked = [{"role": "user", "content": "Go"}]
    function = {"name": "find_order", "arguments": {"order": "a\n{7}", "n": 1}}
    answer: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": "because\nof"}
    if calls:
        answer["tool_calls"] = [{"id": f"call0000{i}", "type": "function", "function": function} for i in range(calls)]
    tools = [{"type": "function", "function": {
        "name": "find_order", "parameters": {"properties": {"order": {"type": "string"}, "n": {"type": "integer"}}},
    }}]  # fmt: skip
    prompt = encoder.encode(asked, tools=tools, now=NOW).text
    text = encoder.encode([*asked, answer], tools=tools, now=NOW, add_generation_prompt=False).text
    shared = prompt if text.startswith(prompt) else prompt[: prompt.rindex("Go") + 2]
    generated = text[len(shared) :]
    end = case.family.calls_end if calls and case.family.calls_end else case.family.end
    generated = generated[: generated.rindex(end)] if end in generated else generated
    parser = form.new_parser(shared, tool_names=("find_order",), tools=tools)
    read = collect([*parser.push(generated), *parser.finish("stop")])
    assert len(read.tool_calls) == calls
    message = read.message([f"call0000{i}" for i in range(calls)])
    if shared != prompt:  # text of the header was read as content
        message["content"] = content
    echoed = normalize_messages([message])
    assert encoder.encode([*asked, *echoed], tools=tools, now=NOW, add_generation_prompt=False).text == text


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_calls_are_found_in_a_models_tokens_whatever_of_their_markup_is_special(name: str) -> None:
    case = family_case(name)
    end_id = case.tokenizer.token_id(case.family.calls_end or case.family.end)
    assert end_id is not None
    texts = TextModel(
        case.tokenizer_json, case.template.source, name=name, bos_token="<|bos|>", eos_token="<|eos|>",
        eos_token_ids=[end_id],
    )  # fmt: skip
    function = {"name": "find_order", "arguments": {"order": "a {7}"}}
    calls = [{"id": "call00000", "type": "function", "function": function}]
    request = TurnRequest(
        messages=[{"role": "user", "content": "Go"}],
        sampling=SamplingParams(max_new_tokens=100),
        tools=TOOLS,
        tool_names=frozenset({"find_order"}),
    )
    prompt = texts.prepare(request, now=NOW)
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    whole = texts.encoder.encode([*request.messages, answer], tools=TOOLS, now=NOW, add_generation_prompt=False).text
    # Where history prints another header than the generation prompt, the call's own tag comes first.
    start = whole.rindex("<", 0, whole.rindex("find_order"))
    body = prompt.encoded.text if whole.startswith(prompt.encoded.text) else whole[:start]
    output = AnswerText(texts, request, prompt, (end_id,), 0)
    for token_id in case.tokenizer.encode(whole[len(body) :].removesuffix("\n")):
        output.push([token_id], None)
    output.finish("stop")
    message = output.collected.message()
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"order": "a {7}"}]
    assert output.end_reason == "tool_calls"
