"""The scripted engine: rules, tools, faults and the cache behind it, driven by hand through the ordinary loop."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from turnkeep.cache.boundary import Boundary
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.example_arguments import example_arguments
from turnkeep.engine.loop import EngineLoop
from turnkeep.engine.messages import Admitted, EndTurn, Finished, FromEngine, Ready, Submit, Tokens
from turnkeep.engine.script import Script, ScriptError, load_script
from turnkeep.engine.scripted import build_scripted_engine, text_source
from turnkeep.engine.scripted_runner import ScriptedCrash
from turnkeep.scheduler.request import SamplingParams
from turnkeep.server.chat_completions import convert_request
from turnkeep.server.text_model import TextModel
from turnkeep.server.turn_request import SamplingDefaults, to_turn

END_ID = 2
LOOK_UP = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 2}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "forecast", "description": "d", "parameters": {**LOOK_UP, "required": ["city", "days"]}},
    },
    {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}},
]


@functools.cache
def bundled_text() -> TextModel:
    return TextModel.from_source(text_source(EngineConfig(model="demo", script="any")))


class Driven:
    """A scripted engine and the text half of a server, without either's processes."""

    def __init__(self, folder: Path, rules: list[dict[str, Any]], **options: Any) -> None:
        file = folder / "script.json"
        file.write_text(json.dumps({"rules": rules}))
        self.config = EngineConfig(model="demo", script=str(file), **{"memory_bytes": 1 << 20, **options})
        self.events: list[FromEngine] = []
        self.loop: EngineLoop
        self.ready: Ready
        self.loop, self.ready = build_scripted_engine(self.config, self.events.append)
        self.text = bundled_text()
        self.num_submitted = 0

    def submit(
        self, messages: list[dict[str, Any]], *, tools: Any = None, max_tokens: int = 200, **sampling: Any
    ) -> str:
        body = convert_request({"model": "m", "messages": messages, "tools": tools})
        turn = to_turn(body, SamplingDefaults(), self.ready.vocab_size)
        prompt = self.text.prepare(turn, now=0.0)
        self.num_submitted += 1
        params = SamplingParams(max_new_tokens=max_tokens, stop_token_ids=(END_ID,), **sampling)
        self.loop.receive(
            Submit(
                request_id=f"r{self.num_submitted}",
                prompt_ids=EncodedTokens(prompt.encoded.token_ids),
                sampling=params,
                boundaries=prompt.boundaries,
            )
        )
        return f"r{self.num_submitted}"

    def run(self) -> None:
        while self.loop.has_work:
            self.loop.step()

    def finished(self, request_id: str) -> Finished:
        return next(one for one in self.events if isinstance(one, Finished) and one.request_id == request_id)

    def ids(self, request_id: str) -> list[int]:
        found = [one.token_ids for one in self.events if isinstance(one, Tokens) and one.request_id == request_id]
        return [token_id for ids in found for token_id in ids]

    def said(self, request_id: str) -> str:
        return self.text.tokenizer.decode([one for one in self.ids(request_id) if one != END_ID])

    def ask(self, text: str, **fields: Any) -> str:
        request_id = self.submit([{"role": "user", "content": text}], **fields)
        self.run()
        return self.said(request_id)


Drive = Callable[..., Driven]


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
    return lambda rules, **options: Driven(tmp_path, rules, **options)


@pytest.mark.parametrize("text", ["Hello!", "Grüße 😀 \u2028 and <|user|> spelled", "two\nlines", "{}"])
def test_without_a_rule_the_last_message_comes_back(drive: Drive, text: str) -> None:
    driven = drive([])
    assert driven.ask(text) == text
    assert driven.finished("r1").reason == "stop"


def test_the_first_rule_that_fits_answers(drive: Drive) -> None:
    driven = drive([{"match": "^b", "answer": "one"}, {"match": "b", "answer": "two"}, {"role": "tool", "answer": "x"}])
    assert [driven.ask(text) for text in ("bee", "abe", "see")] == ["one", "two", "see"]


def test_offered_tools_are_called_with_arguments_that_fit_until_a_result_is_there(drive: Drive) -> None:
    driven = drive([])
    called = driven.ask("Weather?", tools=TOOLS)
    assert called == '<tool_call>{"name": "forecast", "arguments": {"city": "text", "days": 2}}</tool_call>'
    call = {"id": "c", "type": "function", "function": {"name": "forecast", "arguments": "{}"}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "rain"},
    ]
    request_id = driven.submit(history, tools=TOOLS)
    driven.run()
    assert driven.said(request_id) == "rain"
    request_id = driven.submit(
        [*history, {"role": "assistant", "content": "rain"}, {"role": "user", "content": "And?"}]
    )
    driven.run()
    assert driven.said(request_id) == "And?"


def test_a_rule_writes_reasoning_and_several_calls(drive: Drive) -> None:
    calls = [{"name": "other", "arguments": {"a": [1]}}, {"name": "x", "arguments": "{not json"}, {"name": "forecast"}]
    driven = drive([{"reasoning": "Hm.", "answer": "Wait.", "tool_calls": calls}])
    assert driven.ask("go", tools=TOOLS) == (
        '<think>Hm.</think>Wait.<tool_call>{"name": "other", "arguments": {"a": [1]}}</tool_call>'
        '<tool_call>{"name": "x", "arguments": {not json}</tool_call>'
        '<tool_call>{"name": "forecast", "arguments": {"city": "text", "days": 2}}</tool_call>'
    )


def test_token_scripts_and_ends_by_length(drive: Drive) -> None:
    driven = drive([{"match": "ids", "token_ids": [50, 60]}, {"match": "long", "answer": "ab", "finish": "length"}])
    driven.ask("ids")
    assert driven.ids("r1") == [50, 60, END_ID]
    driven.ask("long", max_tokens=9)
    assert driven.finished("r2").reason == "length"
    assert len(driven.ids("r2")) == 9


def test_logprobs_are_given_when_asked_for(drive: Drive) -> None:
    driven = drive([])
    driven.ask("Hi", num_logprobs=3)
    tokens = [one for one in driven.events if isinstance(one, Tokens)]
    for one in tokens:
        assert one.logprobs is not None
        assert one.logprobs[0].top[0] == (one.token_ids[0], one.logprobs[0].logprob)
        assert len({token for token, _ in one.logprobs[0].top}) == 3


def test_a_second_turn_reuses_the_first_as_with_a_model(drive: Drive) -> None:
    driven = drive([])
    first: list[dict[str, Any]] = [{"role": "user", "content": "Tell me a long story about " + "ships " * 40}]
    request_id = driven.submit(first)
    driven.run()
    num_first = driven.finished(request_id).num_prompt_tokens + driven.finished(request_id).num_output_tokens - 1
    driven.loop.receive(EndTurn(request_id, num_first))
    second = [*first, {"role": "assistant", "content": driven.said(request_id)}, {"role": "user", "content": "More."}]
    request_id = driven.submit(second)
    driven.run()
    assert driven.said(request_id) == "More."
    assert driven.finished(request_id).num_cached_tokens == num_first


def test_scarce_rows_and_pages_suspend_and_still_answer_all(drive: Drive) -> None:
    driven = drive(
        [{"match": "long", "answer": "word " * 60}], num_pages=30, num_state_rows=8, max_running=4, max_model_len=256
    )
    ids = [driven.submit([{"role": "user", "content": f"long {number} " + "pad " * 10}]) for number in range(8)]
    driven.run()
    assert {driven.said(request_id) for request_id in ids} == {"word " * 60}
    assert sum(driven.finished(request_id).num_suspensions for request_id in ids) > 0


def test_a_row_of_another_position_is_noticed(drive: Drive) -> None:
    driven = drive([{"answer": "one two three"}])
    request_id = driven.submit([{"role": "user", "content": "x"}])
    driven.loop.step()
    runner: Any = driven.loop._runner
    runner._rows = [(position + 1, checksum) for position, checksum in runner._rows]
    driven.loop.step()
    assert "holds position" in str(driven.finished(request_id).message)


def test_a_page_with_other_tokens_is_noticed(drive: Drive) -> None:
    driven = drive([], max_step_tokens=512)
    prompt = [100 + number % 7 for number in range(40)]
    sampling = SamplingParams(max_new_tokens=1)
    boundary = (Boundary(32, "trunk"),)
    driven.loop.receive(
        Submit(request_id="a", prompt_ids=EncodedTokens(prompt), sampling=sampling, boundaries=boundary)
    )
    driven.run()
    runner: Any = driven.loop._runner
    runner._pages = np.where(runner._pages == 103, 104, runner._pages)
    driven.loop.receive(Submit(request_id="b", prompt_ids=EncodedTokens([*prompt[:36], 99, 98]), sampling=sampling))
    driven.run()
    assert "do not hold" in str(driven.finished("b").message)


def test_faults_happen_as_often_as_the_script_says(drive: Drive) -> None:
    fault = {"kind": "error", "after_tokens": 2, "times": 1}
    driven = drive([{"match": "bad", "answer": "some more words", "fault": fault}])
    driven.ask("bad")
    driven.ask("bad")
    assert (driven.finished("r1").reason, len(driven.ids("r1"))) == ("error", 2)
    assert driven.finished("r2").reason == "stop"


def test_a_failed_step_takes_all_its_requests(drive: Drive) -> None:
    driven = drive([{"match": "bad", "answer": "more words", "fault": {"kind": "step"}}])
    ids = [driven.submit([{"role": "user", "content": text}]) for text in ("bad", "good")]
    driven.run()
    assert [driven.finished(request_id).reason for request_id in ids] == ["error", "error"]
    assert driven.ask("good") == "good"


@pytest.mark.parametrize(("start_number", "crashes"), [(0, True), (1, False)])
def test_a_crash_happens_in_the_first_engines_only(drive: Drive, start_number: int, crashes: bool) -> None:
    driven = drive([{"answer": "x", "fault": {"kind": "crash"}}], start_number=start_number)
    driven.submit([{"role": "user", "content": "x"}])
    if crashes:
        with pytest.raises(ScriptedCrash):
            driven.run()
    else:
        driven.run()
        assert driven.said("r1") == "x"


def test_delays_are_kept(drive: Drive) -> None:
    driven = drive([{"token_ids": [50, 60], "first_delay_ms": 30, "delay_ms": 10}])
    started_s = time.monotonic()
    driven.ask("x")
    assert time.monotonic() - started_s >= 0.05


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("a.json", "{", "cannot be used"),
        ("a.toml", "[[rules]]\nanswr = 'x'", "answr"),
        ("a.json", '{"rules": [{"match": "("}]}', r"rules\[0\].match"),
        ("a.json", '{"rules": [{"delay_ms": -1}]}', "delay"),
        ("a.json", '{"rules": [{"fault": {"kind": "flood"}}]}', "flood"),
        ("a.json", '{"rules": [{"token_ids": [1], "answer": "x"}]}', "token_ids and a text"),
        ("a.json", '{"max_model_len": 0}', "max_model_len"),
        ("missing.json", None, "cannot be read"),
    ],
)
def test_a_script_with_a_mistake_is_refused_with_its_place(
    tmp_path: Path, file: str, content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ScriptError, match=complaint):
        load_script(tmp_path / file)


def test_token_ids_outside_the_vocabulary_are_refused(drive: Drive) -> None:
    with pytest.raises(ScriptError, match=r"rules\[0\].token_ids"):
        drive([{"token_ids": [10**6]}])


def test_the_example_script_is_valid() -> None:
    script = load_script(Path(__file__).parents[2] / "examples" / "scripted.toml")
    assert isinstance(script, Script)
    assert script.rule_for("user", "What is the weather in Oslo?")[1].tool_calls[0].name == "get_weather"


@pytest.mark.parametrize(
    ("schema", "example"),
    [
        (None, {}),
        ({"type": "object"}, {}),
        ({"properties": {"a": {"enum": ["x", "y"]}, "b": {}}, "required": ["a"]}, {"a": "x"}),
        ({"properties": {"a": {"type": ["null", "boolean"]}}, "required": ["a"]}, {"a": True}),
        ({"properties": {"a": {"type": "array", "minItems": 1, "items": {"const": 7}}}, "required": ["a"]}, {"a": [7]}),
        ({"properties": {"a": {"type": "number", "exclusiveMinimum": 2}}, "required": ["a"]}, {"a": 3}),
        ({"properties": {"a": {"type": "integer", "maximum": -4}}, "required": ["a"]}, {"a": -5}),
        ({"properties": {"a": {"type": "integer", "multipleOf": 5}}, "required": ["a"]}, {"a": 5}),
        ({"properties": {"a": {"type": "string", "minLength": 6, "maxLength": 7}}, "required": ["a"]}, {"a": "textxx"}),
        (
            {"properties": {"a": {"anyOf": [{"$ref": "#/$defs/n"}]}}, "required": ["a"], "$defs": {"n": {"const": 1}}},
            {"a": 1},
        ),
        ({"allOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"required": ["a"]}]}, {"a": 1}),
        ({"$ref": "#/$defs/s", "$defs": {"s": {"properties": {"s": {"$ref": "#/$defs/s"}}}}}, {}),
        ({"type": "array"}, {}),
    ],
)  # fmt: skip
def test_example_arguments_fit_the_schema(schema: object, example: dict[str, Any]) -> None:
    assert example_arguments(schema) == example


def test_a_schema_that_contains_itself_ends(drive: Drive) -> None:
    schema = {"$ref": "#/$defs/s", "$defs": {"s": {"properties": {"s": {"$ref": "#/$defs/s"}}, "required": ["s"]}}}
    assert "s" in example_arguments(schema)


@pytest.mark.parametrize(
    ("added", "text"),
    [
        (
            ["<|im_start|>", "<|im_end|>"],
            '<|im_start|>system\nS\n<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools><|im_end|>\n'
            "<|im_start|>user\nlast words<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
            '<|start_header_id|>system<|end_header_id|>\n\n{"name": "f"}<|eot_id|>'
            "<|start_header_id|>user<|end_header_id|>\n\nlast words<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n<think>",
        ),
    ],
)  # fmt: skip
def test_prompts_of_other_families_are_read(added: list[str], text: str) -> None:
    from tokenizers import Tokenizer

    from turnkeep.engine.scripted_prompt import PromptReader

    tokenizer = Tokenizer.from_str(text_source(EngineConfig(model="demo", script="x")).tokenizer_json())
    tokenizer.add_special_tokens(added)
    plain = json.loads(tokenizer.to_str())
    own = ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")
    plain["added_tokens"] = [one for one in plain["added_tokens"] if one["content"] not in own]
    tokenizer = Tokenizer.from_str(json.dumps(plain))
    view = PromptReader(tokenizer).read(np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32))
    assert (view.role, view.text, [tool.name for tool in view.tools]) == ("user", "last words", ["f"])
    assert view.opens_reasoning


def test_admission_tells_of_reuse(drive: Drive) -> None:
    driven = drive([])
    for _ in range(2):
        driven.ask("the same words " * 20)
    admitted = [one for one in driven.events if isinstance(one, Admitted)]
    assert admitted[0].num_cached_tokens == 0
    assert admitted[1].num_cached_tokens > 0
    assert msgspec.msgpack.encode(driven.ready)
