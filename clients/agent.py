"""The loop of an agent: let the model call tools until it answers. For threads and for asyncio.

What a tool raises, and what does not fit its schema, is told to the model as the call's result; the call stays in the
history exactly as the model wrote it, so the turn can be replayed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from turnkeep.clients.errors import InvalidTool, StepLimitReached
from turnkeep.clients.tools import InvalidArguments, Tool, ToolSet, output_text
from turnkeep.clients.turn import ToolCall, Turn

if TYPE_CHECKING:
    from turnkeep.clients.async_conversation import AsyncConversation
    from turnkeep.clients.conversation import Conversation

TOOL_TIMEOUT_S = 60.0
MAX_STEPS = 16


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One call and what came of it. is_error: the tool failed, timed out, is unknown, or was called wrongly."""

    call: ToolCall
    output: str
    is_error: bool
    duration_s: float


@dataclass(slots=True)
class AgentResult:
    """`text` is the final answer; `turns` are the model's answers of this run, with what each has cost."""

    text: str = ""
    turns: list[Turn] = field(default_factory=list)
    tool_runs: list[ToolRun] = field(default_factory=list)


OnStep = Callable[[Turn | ToolRun], None]


def run_agent(
    conversation: Conversation,
    text: str,
    *,
    max_steps: int = MAX_STEPS,
    tool_timeout_s: float = TOOL_TIMEOUT_S,
    parallel: bool = True,
    on_step: OnStep | None = None,
    **options: Any,
) -> AgentResult:
    """Say `text` and answer the model's tool calls until it has none. The tools are the conversation's.

    A tool that takes longer than tool_timeout_s is told as failed; its thread cannot be stopped and runs to its end.
    Raises StepLimitReached after max_steps answers, InvalidTool for tools that are no plain functions, and what
    Conversation.send raises.
    """
    tools = conversation.tools
    _require_functions(tools, allow_async=False)
    result, note = AgentResult(), on_step or _ignore
    turn = conversation.send(text, **options)
    while True:
        result.turns.append(turn)
        note(turn)
        if not turn.tool_calls:
            result.text = turn.text
            return result
        if len(result.turns) >= max_steps:
            raise StepLimitReached(f"the agent still called tools after {max_steps} answers")
        runs = _run_in_threads(tools, turn.tool_calls, tool_timeout_s, parallel=parallel)
        for run in runs:
            note(run)
        result.tool_runs.extend(runs)
        turn = conversation.submit_tool_results({run.call.id: run.output for run in runs}, **options)


async def run_agent_async(
    conversation: AsyncConversation,
    text: str,
    *,
    max_steps: int = MAX_STEPS,
    tool_timeout_s: float = TOOL_TIMEOUT_S,
    parallel: bool = True,
    on_step: OnStep | None = None,
    **options: Any,
) -> AgentResult:
    """`run_agent` for asyncio. Plain functions run in threads; coroutines that take too long are cancelled."""
    tools = conversation.tools
    _require_functions(tools, allow_async=True)
    result, note = AgentResult(), on_step or _ignore
    turn = await conversation.send(text, **options)
    while True:
        result.turns.append(turn)
        note(turn)
        if not turn.tool_calls:
            result.text = turn.text
            return result
        if len(result.turns) >= max_steps:
            raise StepLimitReached(f"the agent still called tools after {max_steps} answers")
        calls = [_run_awaited(tools, call, tool_timeout_s) for call in turn.tool_calls]
        runs = list(await asyncio.gather(*calls)) if parallel else [await call for call in calls]
        for run in runs:
            note(run)
        result.tool_runs.extend(runs)
        turn = await conversation.submit_tool_results({run.call.id: run.output for run in runs}, **options)


def _run_in_threads(tools: ToolSet, calls: tuple[ToolCall, ...], timeout_s: float, *, parallel: bool) -> list[ToolRun]:
    pool = concurrent.futures.ThreadPoolExecutor(len(calls), thread_name_prefix="tool")
    try:
        if not parallel:
            return [_wait(call, pool.submit(_call, tools, call), time.monotonic(), timeout_s) for call in calls]
        started_s = time.monotonic()
        running = [(call, pool.submit(_call, tools, call)) for call in calls]
        return [_wait(call, future, started_s, timeout_s) for call, future in running]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _wait(call: ToolCall, future: concurrent.futures.Future[ToolRun], started_s: float, timeout_s: float) -> ToolRun:
    try:
        return future.result(max(0.0, started_s + timeout_s - time.monotonic()))
    except concurrent.futures.TimeoutError:
        return _timed_out(call, timeout_s)


async def _run_awaited(tools: ToolSet, call: ToolCall, timeout_s: float) -> ToolRun:
    tool = tools.find(call.name)
    try:
        async with asyncio.timeout(timeout_s):
            if tool is None or not tool.is_async:
                return await asyncio.to_thread(_call, tools, call)
            return await _call_async(tool, call)
    except TimeoutError:
        return _timed_out(call, timeout_s)


def _call(tools: ToolSet, call: ToolCall) -> ToolRun:
    started_s = time.monotonic()
    tool = tools.find(call.name)
    if tool is None or tool.function is None:
        message = f"there is no tool {call.name!r}; the tools are {', '.join(tools.names)}"
        return _failed(call, message, started_s)
    try:
        output = output_text(tool.function(**tool.bound(call.arguments)))
    except InvalidArguments as error:
        return _failed(call, str(error), started_s)
    except Exception as error:  # whatever a tool raises is the model's to know
        return _failed(call, f"{type(error).__name__}: {error}", started_s)
    return ToolRun(call, output, False, time.monotonic() - started_s)


async def _call_async(tool: Tool, call: ToolCall) -> ToolRun:
    started_s = time.monotonic()
    assert tool.function is not None
    try:
        output = output_text(await tool.function(**tool.bound(call.arguments)))
    except InvalidArguments as error:
        return _failed(call, str(error), started_s)
    except Exception as error:  # whatever a tool raises is the model's to know
        return _failed(call, f"{type(error).__name__}: {error}", started_s)
    return ToolRun(call, output, False, time.monotonic() - started_s)


def _failed(call: ToolCall, message: str, started_s: float) -> ToolRun:
    return ToolRun(call, output_text({"error": message}), True, time.monotonic() - started_s)


def _timed_out(call: ToolCall, timeout_s: float) -> ToolRun:
    return ToolRun(call, output_text({"error": f"{call.name} took longer than {timeout_s:g} s"}), True, timeout_s)


def _require_functions(tools: ToolSet, *, allow_async: bool) -> None:
    for name in tools.names:
        tool = tools.find(name)
        assert tool is not None
        if tool.function is None:
            raise InvalidTool(f"{name} is a specification only: the agent loop needs its function")
        if tool.is_async and not allow_async:
            raise InvalidTool(f"{name} is a coroutine function: use the async client")


def _ignore(_: Turn | ToolRun) -> None:
    pass
