"""`turnkeep.LLM`: the same engine and the same walk of a turn without HTTP, for scripts and notebooks.

An event loop in a thread of its own does the work; the calls here are plain and blocking. torch is imported by the
engine's thread only.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar, overload

from turnkeep.engine.config import EngineConfig
from turnkeep.engine.handle import EngineHandle, InProcessEngine
from turnkeep.engine.messages import Ready
from turnkeep.models.catalog import find_model
from turnkeep.server import errors
from turnkeep.server.chat_answers import AnswerCollector
from turnkeep.server.chat_completions import ChatCompletionRequest, convert_request
from turnkeep.server.chat_service import ChatService
from turnkeep.server.engine_supervisor import EngineSupervisor
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.text_model import TextModel
from turnkeep.server.turn import Turn
from turnkeep.server.turn_events import Usage

T = TypeVar("T")
Messages = Sequence[dict[str, Any]]

CLOSE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `message` can be appended to the messages as it is; `text` is its visible content."""

    message: dict[str, Any]
    finish_reason: str
    usage: Usage
    prompt_ids: list[int] = field(repr=False)
    token_ids: list[int] = field(repr=False)

    @property
    def text(self) -> str:
        return self.message["content"] or ""

    @property
    def reasoning(self) -> str:
        reasoning: str = self.message.get("reasoning_content", "")
        return reasoning

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = self.message.get("tool_calls", [])
        return calls


class LLM:
    """A model in this process. Close it, or use it in a `with` block.

    `options` are fields of EngineConfig: dtype, max_running, max_model_len, memory_bytes, ... The keyword arguments of
    chat() and generate() are fields of a chat completion request: temperature, top_p, seed, max_tokens, stop, ...
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        make_engine: Callable[[EngineConfig], EngineHandle] = InProcessEngine,
        **options: Any,
    ) -> None:
        """Raises ModelNotFound, ModelFilesError, EngineStartError, TypeError for an unknown option."""
        config = EngineConfig(model=model, **options)
        self._text_model = TextModel.from_source(find_model(model))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turnkeep-llm", daemon=True)
        self._thread.start()
        self._is_closed = False
        metrics = ServerMetrics()
        self._supervisor = EngineSupervisor(lambda: make_engine(config), metrics)
        self._service = ChatService(self._text_model, self._supervisor, metrics, max_waiting=2**31)
        try:
            self.ready: Ready = self._run(self._supervisor.start())
        except BaseException:
            self.close()
            raise

    @overload
    def chat(self, messages: Messages, *, tools: list[dict[str, Any]] | None = ..., **sampling: Any) -> Answer: ...
    @overload
    def chat(
        self, messages: Sequence[Messages], *, tools: list[dict[str, Any]] | None = ..., **sampling: Any
    ) -> list[Answer]: ...
    def chat(
        self, messages: Messages | Sequence[Messages], *, tools: list[dict[str, Any]] | None = None, **sampling: Any
    ) -> Answer | list[Answer]:
        """Answer one conversation, or several at once (one answer each).

        Raises ValueError naming a bad field, RuntimeError when the engine failed.
        """
        if messages and not isinstance(messages[0], dict):
            return self._run(self._gather([self._chat(one, tools, sampling) for one in messages]))
        return self._run(self._chat(messages, tools, sampling))

    @overload
    def generate(self, prompts: str, **sampling: Any) -> Answer: ...
    @overload
    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[Answer]: ...
    def generate(self, prompts: str | Sequence[str], **sampling: Any) -> Answer | list[Answer]:
        """Continue one text, or several at once, without a chat template. Raises as chat() does."""
        if isinstance(prompts, str):
            return self._run(self._continue(prompts, sampling))
        return self._run(self._gather([self._continue(one, sampling) for one in prompts]))

    def close(self) -> None:
        """End the engine and free its memory. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        try:
            closing.result(CLOSE_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _close(self) -> None:
        await self._supervisor.close()
        await self._service.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the loop's thread and wait. An interrupt cancels the work, which aborts its requests."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except errors.ApiError as error:
            raise (ValueError if error.status < 500 else RuntimeError)(error.message) from None
        except BaseException:
            future.cancel()
            raise

    async def _gather(self, work: list[Coroutine[Any, Any, Answer]]) -> list[Answer]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
        return [task.result() for task in tasks]

    async def _chat(self, messages: Any, tools: Any, sampling: dict[str, Any]) -> Answer:
        body = self._request(list(messages), {"tools": tools, **sampling})
        return await _collect(await self._service.start_turn(body, {}, "", time.monotonic()))

    async def _continue(self, prompt: str, sampling: dict[str, Any]) -> Answer:
        body = self._request([{"role": "user", "content": prompt}], sampling)
        return await _collect(await self._service.start_text(body, prompt, time.monotonic()))

    def _request(self, messages: list[Any], fields: dict[str, Any]) -> ChatCompletionRequest:
        for name in ("n", "stream"):
            if name in fields:
                raise errors.bad_request(f"{name} means nothing here: one call gives one whole answer.", name)
        return convert_request({"model": self._text_model.name, "messages": messages, **fields})


async def _collect(turn: Turn) -> Answer:
    async with turn:
        collector = AnswerCollector(turn.num_choices)
        while not turn.is_complete:
            for event in await turn.next_events(None):
                collector.add(event)
    choice = collector.choices[0]
    assert choice.reason is not None
    return Answer(choice.message(), choice.reason, collector.usage, collector.prompt_ids, choice.token_ids)
