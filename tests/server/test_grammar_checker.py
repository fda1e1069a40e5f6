"""Grammars are compiled beside the server, within a deadline, once each; what cannot be used is a 400."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from typing import Any

import pytest
from live_server import live_server, saying

from turnkeep.server.errors import ApiError
from turnkeep.server.grammar_checker import GrammarChecker
from turnkeep.server.output_rules import OutputRules
from turnkeep.server.text_model import TextModel

VOCAB_SIZE = 1280
FINE = {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": {"name": "get_order", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def checker(text_model: TextModel) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(text_model)
    yield checker
    await checker.close()


def grammar(checker: GrammarChecker, answer: dict[str, Any], param: str = "response_format") -> Any:
    return checker.grammar(OutputRules(param, answer), [], "", VOCAB_SIZE)


async def test_one_worker_compiles_each_grammar_once(checker: GrammarChecker) -> None:
    first = await grammar(checker, FINE)
    assert await grammar(checker, FINE) == first
    assert checker.num_started == 1
    process = checker._process
    assert process is not None
    process.kill()  # it is not asked again for what is known
    assert await grammar(checker, FINE) == first
    assert checker.num_started == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"json_schema": {"type": "nothing"}},
        {"json_schema": {"$ref": "https://example.com/schema.json"}},
        {"json_schema": {"$ref": "#/$defs/missing"}},
        {"regex": "(unclosed"},
        {"regex": "back\\"},
        {"lark_grammar": "start: missing"},
    ],
)
async def test_what_cannot_be_compiled_is_refused_and_the_worker_lives_on(
    checker: GrammarChecker, answer: dict[str, Any]
) -> None:
    for _ in range(2):
        with pytest.raises(ApiError) as refusal:
            await grammar(checker, answer, "guided")
        assert (refusal.value.status, refusal.value.param) == (400, "guided")
        assert len(refusal.value.message) < 600
    await grammar(checker, FINE)


async def test_a_worker_beyond_its_deadline_is_killed_and_replaced(text_model: TextModel) -> None:
    checker = GrammarChecker(text_model, deadline_s=0.0)
    try:
        with pytest.raises(ApiError, match="takes more than 0 s"):
            await grammar(checker, FINE)
        assert checker._process is None
        checker._deadline_s = 60.0
        await grammar(checker, {"regex": "a"})
        assert checker.num_started == 2
    finally:
        await checker.close()


async def test_a_worker_that_dies_refuses_its_grammar_only(checker: GrammarChecker) -> None:
    await grammar(checker, FINE)
    assert checker._process is not None
    checker._process.kill()
    await checker._process.wait()
    with pytest.raises(ApiError, match="too complex"):
        await grammar(checker, {"regex": "a"})
    await grammar(checker, {"regex": "b"})


async def test_a_client_that_leaves_does_not_mix_up_the_answers(checker: GrammarChecker) -> None:
    await grammar(checker, FINE)
    leaving = asyncio.create_task(grammar(checker, {"regex": "(bad"}))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await grammar(checker, {"regex": "good"})


async def test_without_llguidance_the_server_says_so(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ApiError, match="llguidance") as refusal:
        await grammar(checker, FINE)
    assert refusal.value.status == 501


async def test_the_grammar_goes_to_the_engine_with_the_end_tokens(text_model: TextModel) -> None:
    async with live_server(saying(text_model, '{"a": 1}'), text_model=text_model) as server:
        status, answer = await server.chat(response_format={"type": "json_object"}, ignore_eos=True)
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == '{"a": 1}'
        sampling = server.engine.submitted[-1].sampling
        assert sampling.grammar is not None
        assert '"json_schema"' in sampling.grammar
        assert sampling.stop_token_ids
        assert not sampling.ignore_eos
        await server.chat()
        assert server.engine.submitted[-1].sampling.grammar is None
        status, answer = await server.chat(response_format={"type": "json_object"}, min_tokens=5)
        assert (status, answer["error"]["param"]) == (400, "min_tokens")
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
        status, answer = await server.chat(response_format=schema)
        assert (status, answer["error"]["param"]) == (400, "response_format")


async def test_a_bare_text_is_continued_in_the_form_asked_for(text_model: TextModel) -> None:
    async with live_server(saying(text_model, "yes"), text_model=text_model) as server:
        body = {"model": "demo", "prompt": "Well?", "structured_outputs": {"choice": ["yes", "no"]}}
        status, answer = await server.post(body, "/v1/completions")
        assert (status, answer["choices"][0]["text"]) == (200, "yes"), answer
        grammar = server.engine.submitted[-1].sampling.grammar
        assert grammar is not None
        assert "thought" not in grammar


async def test_messages_ask_for_calls_in_their_own_words(text_model: TextModel) -> None:
    tool = {"name": "get_order", "input_schema": {"type": "object", "properties": {}}}
    call = '<tool_call>{"name": "get_order", "arguments": {}}</tool_call>'
    async with live_server(saying(text_model, call), text_model=text_model) as server:
        body = {
            "model": "demo",
            "max_tokens": 50,
            "messages": [{"role": "user", "content": "x"}],
            "tools": [tool],
            "tool_choice": {"type": "any"},
        }
        status, answer = await server.post(body, "/v1/messages")
        assert (status, answer["stop_reason"]) == (200, "tool_use"), answer
        assert server.engine.submitted[-1].sampling.grammar is not None
