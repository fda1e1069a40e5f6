"""POST /v1/chat/completions over HTTP: plain and streamed answers, and the rendered prompt of the same body."""

from __future__ import annotations

import time

from aiohttp import web

from turnkeep.server import errors, event_stream
from turnkeep.server.chat_answers import AnswerCollector, AnswerFrame, ChunkBuilder
from turnkeep.server.chat_completions import ChatCompletionRequest, parse_request
from turnkeep.server.chat_service import ChatService
from turnkeep.server.config import ServerConfig
from turnkeep.server.http_guard import TENANT, json_response
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.request_body import read_body
from turnkeep.server.turn_events import TurnDelta, TurnEvent, TurnStarted, Usage
from turnkeep.server.turn_stream import TurnStream


class ChatEndpoint:
    """The handler; one instance serves all requests."""

    def __init__(self, service: ChatService, config: ServerConfig, metrics: ServerMetrics) -> None:
        self._service = service
        self._stream = TurnStream(config, metrics)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer one turn. A client that goes away cancels this handler, and leaving the turn aborts it."""
        arrival_s = time.monotonic()
        self._service.check_open()
        body = await self._read(request)
        turn = await self._service.start_turn(body, request.headers, request[TENANT], arrival_s)
        async with turn:
            frame = AnswerFrame(model=body.model, fingerprint=self._service.fingerprint)
            if body.stream:
                return await self._stream.write(request, turn, ChatStream(body, frame, turn.num_choices))
            collector = AnswerCollector(turn.num_choices)
            while not turn.is_complete:
                for event in await turn.next_events(None):
                    collector.add(event)
            return json_response(
                collector.body(frame, logprobs=bool(body.logprobs), token_ids=bool(body.return_token_ids))
            )

    async def render(self, request: web.Request) -> web.Response:
        """What the same body would be as a prompt: text, token ids and boundaries. Computes nothing."""
        body = await self._read(request)
        _, prompt, _, _ = await self._service.prepare(body, request.headers, request[TENANT])
        return json_response(
            {
                "prompt": prompt.encoded.text,
                "prompt_token_ids": prompt.encoded.token_ids,
                "boundaries": [{"position": one.position, "kind": one.kind} for one in prompt.boundaries],
            }
        )

    async def _read(self, request: web.Request) -> ChatCompletionRequest:
        body = await read_body(request, parse_request)
        if not self._service.serves(body.model):
            raise errors.model_not_found(body.model)
        return body


class ChatStream:
    """StreamShape of chat completion chunks."""

    def __init__(self, body: ChatCompletionRequest, frame: AnswerFrame, num_choices: int) -> None:
        options = body.stream_options
        self._usage = Usage()
        # What a chunk of plain text is besides its text: (before, after), by choice.
        self._plain_frames: dict[int, tuple[bytes, bytes]] = {}
        self._encode = event_stream.encode_event
        if options is not None and options.include_obfuscation:
            self._encode = event_stream.encode_padded_event
        self._may_be_plain = not (
            body.return_token_ids
            or (options is not None and (options.continuous_usage_stats or options.include_obfuscation))
        )
        self._builder = ChunkBuilder(
            frame,
            num_choices=num_choices,
            with_usage=options is not None and bool(options.include_usage),
            usage_on_every_chunk=options is not None and bool(options.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
        )

    def encode(self, events: list[TurnEvent]) -> bytes:
        if len(events) == 1 and self._may_be_plain:
            event = events[0]
            if isinstance(event, TurnDelta) and not (event.reasoning or event.tool_calls or event.logprobs):
                return self._plain_frame(event)
        chunks = []
        for event in events:
            if isinstance(event, TurnStarted):
                chunks += self._builder.first(event)
            elif isinstance(event, TurnDelta):
                chunk = self._builder.delta(event)
                if chunk is not None:
                    chunks.append(chunk)
            else:
                self._usage.add(event, is_first_of_prompt=event.index == 0)
                chunks.append(self._builder.ended(event))
        return b"".join(map(self._encode, chunks))

    def _plain_frame(self, delta: TurnDelta) -> bytes:
        """The frame of a piece of content, byte for byte as through the builder, for what almost every event is."""
        if not delta.content:
            return b""
        frame = self._plain_frames.get(delta.index)
        if frame is None:
            chunk = self._builder.delta(TurnDelta(delta.index, content="x"))
            # No name that a client gives can look like this: quotes inside a text are escaped.
            before, _, after = event_stream.encode_event(chunk).partition(b'"content":"x"')
            frame = self._plain_frames[delta.index] = (before + b'"content":', after)
        return frame[0] + event_stream.encode_value(delta.content) + frame[1]

    def end(self) -> bytes:
        last = [event_stream.encode_event(chunk) for chunk in self._builder.last(self._usage)]
        return b"".join([*last, event_stream.DONE])

    def broken(self, error: errors.ApiError) -> bytes:
        return event_stream.encode_event(error.envelope())
