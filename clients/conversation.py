"""A conversation with a model, for threads. `async_conversation.py` is its twin for asyncio."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import openai

from turnkeep.clients.conversation_state import SUMMARY_TASK, ConversationState
from turnkeep.clients.errors import TurnInterrupted
from turnkeep.clients.history import Message
from turnkeep.clients.options import TurnOptions
from turnkeep.clients.retry import TRANSPORT_ERROR, StreamBroke
from turnkeep.clients.tools import Toolish, ToolSet
from turnkeep.clients.turn import Turn, TurnEvent
from turnkeep.clients.turn_driver import PreparedRequest, WebSocketRefused
from turnkeep.clients.websocket_errors import has_websockets, is_closed, is_refused

if TYPE_CHECKING:
    from turnkeep.clients.client import Turnkeep


class TurnStream:
    """The events of one turn, as they come. `final` is the answer, once the iteration has ended.

    Leaving the `with` block, or close(), ends the request at the server; the conversation is then as before the turn.
    """

    def __init__(self, events: Generator[Any]) -> None:
        self._events = events
        self._final: Turn | None = None

    def __iter__(self) -> Iterator[TurnEvent]:
        for event in self._events:
            if isinstance(event, Turn):
                self._final = event
            else:
                yield event

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def final(self) -> Turn:
        """The complete answer; what has not been read yet is read first. Raises RuntimeError for a closed stream."""
        for _ in self:
            pass
        if self._final is None:
            raise RuntimeError("the stream was closed before the answer was complete")
        return self._final

    def close(self) -> None:
        """Stop. The connection is closed, which frees what the server uses for it."""
        self._events.close()


class Conversation(ConversationState):
    """Made by `Turnkeep.conversation()`. One turn at a time; not to be shared between threads."""

    def __init__(self, client: Turnkeep, **state: Any) -> None:
        super().__init__(**state)
        self._client = client.with_options(max_retries=0)
        self._owner = client
        self._socket: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, text: str, **options: Any) -> Turn:
        """Say something and wait for the whole answer. `options` are the fields of TurnOptions.

        Raises PrefixBroken, ContextOverflow, TurnInterrupted, openai.APIError.
        """
        return self.stream(text, **options).final

    def stream(self, text: str, **options: Any) -> TurnStream:
        """Say something and iterate over the answer's events."""
        return TurnStream(self._run(self._user_message(text), TurnOptions(**options)))

    def submit_tool_results(self, results: Mapping[str, str], **options: Any) -> Turn:
        """Answer every call of the last answer: call id -> output. Raises ValueError for missing or unknown ids."""
        return self.stream_tool_results(results, **options).final

    def stream_tool_results(self, results: Mapping[str, str], **options: Any) -> TurnStream:
        """The same, as events."""
        return TurnStream(self._run(self._result_messages(results), TurnOptions(**options)))

    def fork(self, name: str | None = None) -> Conversation:
        """An independent conversation with the same history; the server shares what it has computed for it."""
        return self._child(self._new_state(name))

    def sub_agent(
        self, name: str, *, system: str | None = None, tools: ToolSet | list[Toolish] | None = None
    ) -> Conversation:
        """A conversation of its own that the server knows as a child of this one."""
        return self._child(self._sub_agent_state(name, system, None if tools is None else ToolSet.of(tools)))

    def compact(self, max_tokens: int = 1024) -> str:
        """Put a summary, written by the model itself, in the place of all messages. Returns it.

        Raises TurnkeepError when it wrote none, besides what send() raises; all messages are then still there.
        """
        side_call = self.fork("summary")
        side_call.transport = "chat"
        summary = side_call.send(SUMMARY_TASK, max_tokens=max_tokens, tool_choice="none").text
        self._use_summary(summary)
        return summary

    def count_tokens(self, text: str | None = None) -> int:
        """Tokens of the next prompt, with `text` as its newest message if given. Needs Turnkeep's /tokenize.

        Raises openai.NotFoundError at other servers.
        """
        new = [] if text is None else [{"role": "user", "content": text}]
        body: dict[str, Any] = {"model": self.model, "messages": self._prompt_messages(new)}
        if self._history.tools:
            body["tools"] = self._history.tools
        answer = self._owner.post("/tokenize", body=body, cast_to=dict[str, Any])
        return int(answer["count"])

    def num_remaining_tokens(self) -> int | None:
        """Room left in the model's context; None where the server does not say how large it is."""
        limit = getattr(self._owner.models.retrieve(self.model), "max_model_len", None)
        return None if limit is None else int(limit) - self.count_tokens()

    def cache_report(self) -> dict[str, Any]:
        """What the server reused and lost in every turn, and why. Raises openai.NotFoundError at other servers."""
        return self._owner.get(self._cache_path, cast_to=dict[str, Any])

    def close(self) -> None:
        """The conversation will not go on: the server may let go of it first. Nothing is raised; call it twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._close_socket()
        if self._has_extensions and self._history.turns:
            with suppress(openai.APIError, TRANSPORT_ERROR):  # a hint only
                self._client.delete(self._cache_path, cast_to=object)

    def _child(self, state: dict[str, Any]) -> Conversation:
        child = Conversation(self._owner, **state)
        child._knows_server, child._has_extensions = self._knows_server, self._has_extensions
        return child

    def _look_at_server(self) -> None:
        try:
            models = self._owner.models.list().data
        except openai.APIStatusError:
            models = []
        self._note_server(models, has_websockets=has_websockets())

    def _run(self, new: list[Message], options: TurnOptions) -> Generator[Any]:
        """The events of all attempts, then the Turn."""
        if not self._knows_server:
            self._look_at_server()
        driver = self._start_turn(new, options, time.monotonic)
        try:
            while not driver.is_complete:
                try:
                    for payload in self._payloads(driver.next_request()):
                        yield from driver.feed(payload)
                    last = driver.end()
                except (openai.APIError, TRANSPORT_ERROR, OSError, StreamBroke, WebSocketRefused) as error:
                    self._close_socket()
                    if self._is_closed:  # by another thread, or between two events: nothing is to be sent again
                        raise TurnInterrupted("the conversation was closed in the middle of an answer") from error
                    time.sleep(driver.failed(error))
                else:
                    turn = self._finish_turn(driver)
                    yield from last
                    yield turn
        finally:
            self._is_busy = False
            if not driver.is_complete:
                self._close_socket()  # an answer that nobody reads any more must not be taken for the next one

    def _payloads(self, request: PreparedRequest) -> Iterator[dict[str, Any]]:
        if request.transport == "websocket":
            yield from self._socket_events(request)
            return
        create: Any = self._client.responses if request.transport == "responses" else self._client.chat.completions
        body = {**request.body, "stream": True}
        extra = {**request.extra, **{name: body.pop(name) for name in ("seed",) if name in body}}
        with create.create(**body, extra_headers=request.headers, extra_body=extra) as stream:
            for event in stream:
                yield event.to_dict()

    def _socket_events(self, request: PreparedRequest) -> Iterator[dict[str, Any]]:
        try:
            if self._socket is None:
                self._socket = self._client.responses.connect(extra_headers=request.headers).enter()
            socket = self._socket  # close() takes it away
            socket.send({"type": "response.create", **request.body, **request.extra})
            while True:
                event = socket.recv().to_dict()
                yield event
                if event["type"] in ("response.completed", "response.incomplete"):
                    return
        except GeneratorExit:
            raise
        except Exception as error:
            if is_refused(error):
                raise WebSocketRefused(str(error)) from error
            if is_closed(error):
                raise StreamBroke("the connection was closed") from error
            raise

    def _close_socket(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
