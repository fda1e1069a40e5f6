"""The offline API: the same walk of a turn, blocking, without HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from live_server import make_text_model, saying, user
from scripted_engine import Script, ScriptedEngine

import turnkeep
from turnkeep.engine.config import EngineConfig
from turnkeep.engine.handle import EngineStartError
from turnkeep.engine.messages import Submit
from turnkeep.server.llm import LLM

TEXT_MODEL = make_text_model()
TOOLS = [{"type": "function", "function": {"name": "get_order", "parameters": {"type": "object"}}}]
CALL = '<think>Look.</think><tool_call>{"name": "get_order", "arguments": {"order": "B47"}}</tool_call>'


class Engines:
    """Makes scripted engines and keeps them."""

    def __init__(self) -> None:
        self.made: list[ScriptedEngine] = []
        self.configs: list[EngineConfig] = []
        self.script: Script | None = None

    def __call__(self, config: EngineConfig) -> ScriptedEngine:
        def direct(submit: Submit) -> Script:
            return self.script or saying(TEXT_MODEL, TEXT_MODEL.tokenizer.decode(submit.prompt_ids[-4:], True))

        self.configs.append(config)
        self.made.append(ScriptedEngine(direct))
        return self.made[-1]


@pytest.fixture
def engines() -> Engines:
    return Engines()


@pytest.fixture
def llm(engines: Engines) -> Iterator[LLM]:
    with LLM("demo", make_engine=engines, max_running=3) as made:
        yield made


def test_it_is_the_packages_face() -> None:
    assert turnkeep.LLM is LLM


def test_options_reach_the_engine(llm: LLM, engines: Engines) -> None:
    assert engines.configs == [EngineConfig(model="demo", max_running=3)]
    with pytest.raises(TypeError, match="max_flying"):
        LLM("demo", make_engine=engines, max_flying=1)


def test_one_conversation_gives_one_answer(llm: LLM, engines: Engines) -> None:
    engines.script = saying(TEXT_MODEL, CALL, num_cached_tokens=2)
    answer = llm.chat(user("x"), tools=TOOLS, temperature=0, max_tokens=50, seed=5)
    assert answer.text == ""
    assert answer.reasoning == "Look."
    assert answer.tool_calls[0]["function"] == {"name": "get_order", "arguments": '{"order": "B47"}'}
    assert answer.finish_reason == "tool_calls"
    assert answer.usage.num_cached_tokens == 2
    assert answer.usage.num_output_tokens == len(answer.token_ids) == len(engines.script.token_ids)
    submit = engines.made[0].submitted[0]
    assert answer.prompt_ids == submit.prompt_ids
    assert (submit.sampling.max_new_tokens, submit.sampling.seed) == (50, 5)
    again = llm.chat([*user("x"), answer.message, {"role": "tool", "content": "{}"}], tools=TOOLS)
    assert again.finish_reason == "tool_calls"


def test_several_conversations_give_their_answers_in_order(llm: LLM) -> None:
    answers = llm.chat([user("one"), user("two"), user("six")])
    assert [answer.text.strip() for answer in answers] == ["one", "two", "six"]


def test_bare_texts_are_continued_without_a_template(llm: LLM, engines: Engines) -> None:
    answer = llm.generate("Mara lives in", max_tokens=5)
    prompt_ids = TEXT_MODEL.tokenizer.encode("Mara lives in")
    assert engines.made[0].submitted[0].prompt_ids == prompt_ids
    # No message ends anywhere in a bare text; asked again, it resumes before its last token.
    assert [boundary.position for boundary in engines.made[0].submitted[0].boundaries] == [len(prompt_ids) - 1]
    assert answer.text
    engines.script = saying(TEXT_MODEL, "<think>shown as it is</think>")
    several = llm.generate(["one", "two"])
    assert [answer.text for answer in several] == ["<think>shown as it is</think>"] * 2


@pytest.mark.parametrize(
    ("messages", "fields", "named"),
    [
        ([], {}, "messages"),
        (user("x"), {"temperature": -1}, "temperature"),
        (user("x"), {"temperature": "hot"}, "temperature"),
        (user("x"), {"n": 2}, "n means nothing"),
        (user("word " * 5000), {}, "maximum context length"),
    ],
)
def test_bad_input_is_a_value_error_and_the_next_call_works(
    llm: LLM, messages: Any, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        llm.chat(messages, **fields)
    assert llm.chat(user("fine")).text.strip() == "fine"


def test_an_engine_that_dies_is_a_runtime_error(llm: LLM, engines: Engines) -> None:
    engines.script = saying(TEXT_MODEL, "Hi", is_endless=True)
    engine = engines.made[0]

    async def die_at_work() -> None:
        await engine.wait_until(lambda: bool(engine.submitted))
        engine.die()

    death = asyncio.run_coroutine_threadsafe(die_at_work(), llm._loop)
    with pytest.raises(RuntimeError, match="engine stopped"):
        llm.chat(user("x"), ignore_eos=True)
    death.result(10)


def test_an_engine_that_cannot_start_leaves_nothing_behind(engines: Engines) -> None:
    def make_failing(config: EngineConfig) -> ScriptedEngine:
        engine = engines(config)
        engine.start_error = "not enough memory"
        return engine

    with pytest.raises(EngineStartError, match="not enough memory"):
        LLM("demo", make_engine=make_failing)
    assert not [thread for thread in threading.enumerate() if thread.name == "turnkeep-llm"]


def test_closing_twice_is_fine_and_ends_the_engine(engines: Engines) -> None:
    llm = LLM("demo", make_engine=engines)
    llm.close()
    llm.close()
    assert not engines.made[0].alive
