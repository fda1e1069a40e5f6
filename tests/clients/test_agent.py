"""The agent loop: tools as typed functions, run at once, their failures told to the model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from live_server import live_server, saying
from scripted_engine import Director
from sdk_twins import Twin

from turnkeep.clients.errors import InvalidTool, StepLimitReached
from turnkeep.clients.tools import InvalidArguments, Tool, ToolSet, output_text
from turnkeep.server.text_model import TextModel


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def in_turn(text_model: TextModel, *texts: str) -> Director:
    left = [saying(text_model, text) for text in texts]
    return lambda _: left.pop(0)


def get_price(item: Annotated[str, "its name"], count: int = 1) -> dict[str, Any]:
    """What something costs.

    Not for the model.
    """
    return {"item": item, "price": 3 * count}


def get_stock(item: str) -> str:
    """How much there is."""
    raise LookupError(f"no {item}")


async def test_an_agent_calls_tools_until_it_answers(text_model: TextModel, twin: Twin) -> None:
    texts = [
        "<think>Both.</think>" + call("get_price", item="lamps", count=2) + call("get_stock", item="lamps"),
        call("get_price", item=7) + call("get_nothing"),
        "<think>Now.</think>They cost 6.",
    ]
    async with live_server(in_turn(text_model, *texts), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, tools=[get_price, get_stock])
        steps: list[Any] = []
        result = await twin.run_agent(conversation, "What do two lamps cost?", on_step=steps.append)
        assert result.text == "They cost 6."
        assert len(result.turns) == 3
        outputs = [(run.call.name, run.is_error, json.loads(run.output)) for run in result.tool_runs]
        assert outputs[:2] == [
            ("get_price", False, {"item": "lamps", "price": 6}),
            ("get_stock", True, {"error": "LookupError: no lamps"}),
        ]
        assert outputs[2][1]
        assert "invalid arguments for get_price: item" in outputs[2][2]["error"]
        assert outputs[3][1]
        assert "there is no tool 'get_nothing'" in outputs[3][2]["error"]
        # The wrong call is in the history as it was made.
        assert conversation.messages[4]["tool_calls"][0]["function"]["arguments"] == '{"item": 7}'
        assert [type(step).__name__ for step in steps] == ["Turn", *["ToolRun"] * 2, "Turn", *["ToolRun"] * 2, "Turn"]


async def test_an_agent_that_does_not_stop_is_stopped(text_model: TextModel, twin: Twin) -> None:
    async with live_server(lambda _: saying(text_model, call("get_price", item="x")), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, tools=[get_price])
        with pytest.raises(StepLimitReached, match="after 3 answers"):
            await twin.run_agent(conversation, "Go", max_steps=3)
        assert conversation.num_turns == 3


@pytest.mark.parametrize("parallel", [True, False])
async def test_tools_run_at_once_or_one_after_another(text_model: TextModel, twin: Twin, parallel: bool) -> None:
    running, most, lock = 0, 0, threading.Lock()
    both = threading.Barrier(2)

    def wait(name: str) -> str:
        """Wait for the other one."""
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if parallel:
            both.wait(timeout=10)
        with lock:
            running -= 1
        return name

    texts = [call("wait", name="a") + call("wait", name="b"), "Done."]
    async with live_server(in_turn(text_model, *texts), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, tools=[wait])
        result = await twin.run_agent(conversation, "Go", parallel=parallel)
        assert [run.output for run in result.tool_runs] == ["a", "b"]
        assert not any(r.is_error for r in result.tool_runs)
        assert most == (2 if parallel else 1)


async def test_a_tool_that_takes_too_long_is_told_as_failed(text_model: TextModel, twin: Twin) -> None:
    release = threading.Event()

    def hang() -> str:
        """Never ends by itself."""
        release.wait(30)
        return "late"

    async with live_server(in_turn(text_model, call("hang"), "Done."), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, tools=[hang])
        try:
            result = await twin.run_agent(conversation, "Go", tool_timeout_s=0.05)
        finally:
            release.set()
        assert result.tool_runs[0].is_error
        assert "took longer than 0.05 s" in result.tool_runs[0].output


async def test_coroutines_are_tools_of_the_async_client_only(text_model: TextModel, twin: Twin) -> None:
    async def look_up(item: str) -> str:
        """Look something up."""
        await asyncio.sleep(0)
        return item.upper()

    async with live_server(in_turn(text_model, call("look_up", item="a"), "Done."), text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, tools=[look_up])
        if twin.is_async:
            assert (await twin.run_agent(conversation, "Go")).tool_runs[0].output == "A"
        else:
            with pytest.raises(InvalidTool, match="async client"):
                await twin.run_agent(conversation, "Go")


def test_the_schema_comes_from_the_annotations() -> None:
    def order(
        kind: Literal["buy", "sell"], items: list[str], note: str | None = None, *, count: Annotated[int, "pieces"] = 1
    ) -> None:
        """Order things,
        many at once.

        Details.
        """

    function = Tool.of(order).specification["function"]
    assert function["description"] == "Order things, many at once."
    assert function["parameters"] == {
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "items"],
        "properties": {
            "kind": {"enum": ["buy", "sell"], "type": "string"},
            "items": {"type": "array", "items": {"type": "string"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "count": {"type": "integer", "default": 1, "description": "pieces"},
        },
    }


def test_a_parameter_called_title_stays() -> None:
    def rename(title: str) -> str:
        """Rename."""
        return title

    parameters = Tool.of(rename).specification["function"]["parameters"]
    assert parameters["properties"] == {"title": {"type": "string"}}


@pytest.mark.parametrize(
    "arguments", ['{"item": 7}', "{", '{"item": "a", "more": 1}', "{}", "[]", '{"item": "a", "count": "many"}']
)
def test_arguments_that_do_not_fit_are_refused(arguments: str) -> None:
    with pytest.raises(InvalidArguments, match="get_price"):
        Tool.of(get_price).bound(arguments)


def test_a_given_schema_passes_the_arguments_on() -> None:
    specification = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    tool = Tool.wrapping(specification, lambda **values: values)
    assert tool.bound('{"a": 1}') == {"a": 1}
    assert ToolSet.of([tool]).specifications() == [specification]
    for arguments in ("[1]", "{"):
        with pytest.raises(InvalidArguments, match="add"):
            tool.bound(arguments)


def test_a_tool_without_parameters_takes_no_text_at_all() -> None:
    def now() -> str:
        """The time."""
        return "noon"

    assert Tool.of(now).bound("") == {}


def _no_annotation(item):  # type: ignore[no-untyped-def]
    """Bad."""


def _positional(item: int, /) -> None:
    """Bad."""


def _many(*items: int) -> None:
    """Bad."""


@pytest.mark.parametrize("function", [_no_annotation, _positional, _many, lambda item: item, {"type": "web"}, 3])
def test_what_cannot_be_a_tool_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidTool):
        Tool.of(function)


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidTool, match="get_price"):
        ToolSet.of([get_price, get_price])


def test_outputs_become_text() -> None:
    @dataclass
    class Price:
        amount: int

    assert [output_text(value) for value in ("text", 3, None, {"a": [1]}, Price(4))] == [
        "text", "3", "null", '{"a":[1]}', '{"amount":4}',
    ]  # fmt: skip
    assert "object at" in output_text(object())


def test_parameters_may_be_called_like_attributes_of_a_model_or_begin_with_an_underscore() -> None:
    def found(_after: int, copy: bool, model_config: str = "", schema: int = 1, model_dump: str = "") -> str:
        return f"{_after} {copy} {model_config} {schema} {model_dump}"

    tool = Tool.of(found)
    parameters = tool.specification["function"]["parameters"]
    assert list(parameters["properties"]) == ["_after", "copy", "model_config", "schema", "model_dump"]
    assert parameters["required"] == ["_after", "copy"]
    arguments = {"_after": 1, "copy": True, "model_config": "a", "schema": 2, "model_dump": "b"}
    assert tool.bound(json.dumps(arguments)) == arguments
    with pytest.raises(InvalidArguments, match="_after: Input should be a valid integer"):
        tool.bound('{"_after": "x", "copy": true}')
    with pytest.raises(InvalidArguments, match="argument__after: Extra inputs"):
        tool.bound('{"argument__after": 1, "_after": 1, "copy": true}')


async def test_what_utf8_cannot_hold_does_not_end_an_agent(text_model: TextModel, twin: Twin) -> None:
    def list_files() -> str:
        return "caf\udce9.txt"

    def fail() -> str:
        raise ValueError("caf\udce9.txt")

    director = in_turn(text_model, call("list_files") + call("fail"), "One file.")
    async with live_server(director, text_model=text_model) as server:
        client = twin.client(server.url)
        conversation = await twin.call(client.conversation, system="Be \ud83d.", tools=[list_files, fail])
        result = await twin.run_agent(conversation, "Which files \ud83d are there?")
        assert result.text == "One file."
        question, _, listed, failed, _ = conversation.messages
        assert question["content"] == "Which files \ufffd are there?"
        assert listed["content"] == "caf\ufffd.txt"
        assert "ValueError" in failed["content"]
        assert len(server.engine.submitted) == 2
