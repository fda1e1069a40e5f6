"""An engine that plays scripts instead of computing: tokens, pauses, refusals and deaths as a test wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from turnkeep.cache.loss_reason import LossReason
from turnkeep.engine.local_handle import EngineStartError, LocalHandle
from turnkeep.engine.messages import (
    Abort,
    Admitted,
    CloseConversation,
    EndTurn,
    Expect,
    Finished,
    FromEngine,
    Prepare,
    ReadStats,
    Ready,
    Stats,
    Stop,
    Submit,
    ToEngine,
    TokenLogprobs,
    Tokens,
)
from turnkeep.scheduler.request import FinishReason


@dataclass
class Script:
    """What the engine does with one request."""

    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    admit: asyncio.Event | None = None  # wait for it before Admitted
    pause_after: int | None = None  # wait for `resume` after so many tokens
    resume: asyncio.Event | None = None
    refuse: str | None = None  # end at once with this message
    is_endless: bool = False  # repeat the tokens until aborted or stopped
    tokens_per_event: int = 1
    num_lost_tokens: int = 0
    loss_reason: LossReason = "none"
    num_draft_nodes: int = 0
    accepted_by_depth: tuple[int, ...] = ()


Director = Callable[[Submit], Script]


class ScriptedEngine(LocalHandle):
    """Behaves as an engine does at its handle, and keeps what it was told."""

    def __init__(self, director: Director, *, max_model_len: int = 4096, vocab_size: int = 1280) -> None:
        super().__init__(None)
        self.director = director
        self.submitted: list[Submit] = []
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self.num_repeated: list[int | None] = []  # as the stops say
        self.ended_turns: dict[str, int] = {}
        self.closed_conversations: list[str] = []
        self.prepared: list[Prepare] = []
        self.expected_conversations: list[str] = []
        self.start_error: str | None = None
        self.silent_s = 0.0  # how long it seems not to have been heard of
        self.counters: dict[str, float] = {"snapshots_created": 0.0}
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._playing: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    @property
    def heartbeat_age_s(self) -> float:
        return self.silent_s

    async def start(self) -> Ready:
        if self.start_error is not None:
            raise EngineStartError(self.start_error)
        self._is_alive = True
        return Ready(
            model_name="scripted",
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            page_size=16,
            num_pages=64,
            num_state_rows=8,
            max_running=4,
            limiting_resource="4 requests at once, by decision of a test",
        )

    async def close(self) -> None:
        self._end("the engine was closed")

    def die(self) -> None:
        """As when the process is killed."""
        self._end("the engine process ended unexpectedly")

    def stats(self) -> Stats:
        return self._stats_now()

    def _stats_now(self, *, requested: bool = False) -> Stats:
        return Stats(
            num_steps=len(self.submitted),
            num_running=len(self._playing),
            num_waiting=0,
            num_suspended=0,
            num_free_pages=64,
            num_free_rows=8,
            counters=dict(self.counters),
            requested=requested,
        )

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until something the engine is told makes the condition true."""
        async with self._changed, asyncio.timeout(5):
            await self._changed.wait_for(condition)

    @property
    def num_playing(self) -> int:
        return len(self._playing)

    def _send(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self.submitted.append(message)
            self._playing[message.request_id] = asyncio.create_task(self._play(message))
        elif isinstance(message, Abort):
            self.aborted.append(message.request_id)
            self._interrupt(message.request_id, "abort")
        elif isinstance(message, Stop):
            self.stopped.append(message.request_id)
            self.num_repeated.append(message.num_repeated_tokens)
            self._interrupt(message.request_id, "stop")
        elif isinstance(message, EndTurn):
            self.ended_turns[message.request_id] = message.stable_tokens
        elif isinstance(message, Prepare):
            self.prepared.append(message)
        elif isinstance(message, CloseConversation):
            self.closed_conversations.append(message.conversation_id)
        elif isinstance(message, Expect):
            self.expected_conversations.append(message.conversation_id)
        else:
            assert isinstance(message, ReadStats)
            asyncio.get_running_loop().call_soon(self._deliver, [self._stats_now(requested=True)])
        self._notify()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        asyncio.get_running_loop().create_task(notify())

    async def _play(self, submit: Submit) -> None:
        script = self.director(submit)
        if script.refuse is not None:
            self._finish(submit, "refused", 0, script, message=script.refuse)
            return
        if script.admit is not None:
            await script.admit.wait()
        num_cached, num_lost = script.num_cached_tokens, script.num_lost_tokens
        self._emit(Admitted(submit.request_id, num_cached, num_cached, num_lost, script.loss_reason))
        sampling, num_output, pending = submit.sampling, 0, list[int]()
        reason: FinishReason = "length"
        while num_output < sampling.max_new_tokens:
            if not script.is_endless and num_output == len(script.token_ids):
                reason = "stop"
                break
            if script.pause_after == num_output and script.resume is not None:
                self._emit_tokens(submit, pending)
                await script.resume.wait()
            token_id = script.token_ids[num_output % len(script.token_ids)]
            pending.append(token_id)
            num_output += 1
            if token_id in sampling.stop_token_ids:
                reason = "stop"
                break
            if len(pending) >= script.tokens_per_event:
                self._emit_tokens(submit, pending)
                await asyncio.sleep(0.001 if script.is_endless else 0)
        self._emit_tokens(submit, pending)
        self._finish(submit, reason, num_output, script)

    def _emit_tokens(self, submit: Submit, pending: list[int]) -> None:
        if not pending:
            return
        logprobs = None
        if submit.sampling.num_logprobs is not None:
            top = [(token_id, -0.5 - token_id) for token_id in range(submit.sampling.num_logprobs)]
            logprobs = [TokenLogprobs(-0.25, top) for _ in pending]
        self._emit(Tokens(submit.request_id, list(pending), logprobs))
        pending.clear()

    def _finish(
        self, submit: Submit, reason: FinishReason, num_output: int, script: Script, message: str | None = None
    ) -> None:
        self._playing.pop(submit.request_id, None)
        self._emit(
            Finished(
                request_id=submit.request_id,
                reason=reason,
                num_prompt_tokens=len(submit.prompt_ids),
                num_cached_tokens=script.num_cached_tokens,
                num_output_tokens=num_output,
                message=message,
                num_draft_nodes=script.num_draft_nodes,
                accepted_by_depth=script.accepted_by_depth,
            )
        )
        self._notify()

    def _interrupt(self, request_id: str, reason: FinishReason) -> None:
        playing = self._playing.pop(request_id, None)
        if playing is not None:
            playing.cancel()
            self._emit(Finished(request_id=request_id, reason=reason))

    def _emit(self, event: FromEngine) -> None:
        self._deliver([event])

    def _end(self, message: str) -> None:
        playing, self._playing = self._playing, {}
        for task in playing.values():
            task.cancel()
        self._engine_ended(message)
