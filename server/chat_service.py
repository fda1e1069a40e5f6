"""The walk of one turn: prepare the prompt, submit, turn engine events into text, find the stable end, record.

Used by every API shape and by the offline API. Knows no HTTP and no wire format; the engine is a handle.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.engine.handle import EngineHandle
from turnkeep.engine.messages import Prepare, Submit
from turnkeep.server import errors
from turnkeep.server.chat_completions import ChatCompletionRequest
from turnkeep.server.conversations import (
    Conversation,
    ConversationTable,
    cache_root,
    is_last_turn,
    resolve_conversation,
)
from turnkeep.server.engine_supervisor import EngineSupervisor
from turnkeep.server.grammar_checker import GrammarChecker
from turnkeep.server.metrics import ServerMetrics
from turnkeep.server.stable_position import TurnEnd
from turnkeep.server.stores import Store, StoreDownError
from turnkeep.server.tenant_limits import TenantLimits
from turnkeep.server.text_model import Prompt, TextModel
from turnkeep.server.turn import Choice, Turn
from turnkeep.server.turn_request import TurnRequest, to_turn

log = logging.getLogger(__name__)

T = TypeVar("T")

TAG_FIELDS = (
    "conversation", "conversation_id", "session_id", "conversation_params", "vllm_xargs", "prompt_cache_key", "metadata"
)  # fmt: skip


class ChatService:
    """Serves turns of one model. All methods run in one event loop; text work runs in one worker thread beside it."""

    def __init__(
        self,
        text_model: TextModel,
        supervisor: EngineSupervisor,
        metrics: ServerMetrics,
        *,
        served_names: tuple[str, ...] = (),
        accept_any_model: bool = False,
        max_waiting: int = 1024,
        limits: TenantLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.text_model = text_model
        self.metrics = metrics
        self.served_names = served_names or (text_model.name,)
        self.fingerprint = text_model.fingerprint
        self.conversations = ConversationTable(clock=clock)
        metrics.register_counts("texts", "What became of prompts and answers as text.", "event", text_model.counts)
        metrics.register_counts(
            "conversations", "Conversations and the ids of requests.", "event", lambda: self.conversations.counters
        )
        self.registry: Store | None = None  # when a conversation began, beyond this process
        self.is_draining = False
        self._supervisor = supervisor
        self._accept_any_model = accept_any_model
        self._max_waiting = max_waiting
        self._limits = limits or TenantLimits()
        self._clock = clock
        self._turns: set[Turn] = set()
        self._endings: set[asyncio.Task[None]] = set()
        # One thread: the memory of earlier prompts is shared, and text work must not take the event loop's time.
        self._text_worker = ThreadPoolExecutor(1, thread_name_prefix="turnkeep-text")
        self._grammars = GrammarChecker(text_model)
        self._num_requests = 0

    @property
    def num_open_turns(self) -> int:
        return len(self._turns)

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt + output; None until the engine has told."""
        ready = self._supervisor.ready
        return None if ready is None else ready.max_model_len

    def serves(self, model: str) -> bool:
        return self._accept_any_model or model in self.served_names

    def check_open(self) -> EngineHandle:
        """The engine, when a new turn may enter. Raises ApiError 503 or 429 before any work is spent on it."""
        refused = self.metrics.refused
        if self.is_draining:
            refused.labels("draining").inc()
            raise errors.unavailable("The server is shutting down.", retry_after_s=5)
        if len(self._turns) >= self._max_waiting <= sum(not turn.is_admitted for turn in self._turns):
            refused.labels("queue_full").inc()
            raise errors.overloaded(f"{self._max_waiting} requests are waiting already.", retry_after_s=5)
        try:
            return self._supervisor.engine()
        except errors.ApiError:
            refused.labels("engine_down").inc()
            raise

    async def prepare(
        self, body: ChatCompletionRequest, headers: Mapping[str, str], tenant: str
    ) -> tuple[TurnRequest, Prompt, Conversation | None, str]:
        """The checked request, its prompt, its conversation, and the cache root. Raises ApiError 400."""
        tag = resolve_conversation(headers, {name: getattr(body, name) for name in TAG_FIELDS})
        self.conversations.note_tag(tag)
        root = cache_root(tenant or None, body.cache_salt)
        known = (
            None if tag.conversation_id is None else await self._open_conversation(root, tag.conversation_id, tenant)
        )
        if known is not None:
            self._expect(root, known.conversation_id)
        now = self._clock() if known is None else known.started_s

        def work() -> tuple[TurnRequest, Prompt]:
            request = to_turn(body, self.text_model.sampling_defaults, self._vocab_size())
            return request, self.text_model.prepare(request, now=now, root=root, conversation_id=tag.conversation_id)

        request, prompt = await self.in_text_worker(work)
        return request, prompt, known, root

    def _expect(self, root: str, conversation_id: str) -> None:
        """What the cache keeps far away of a conversation can come nearer while its prompt is being prepared."""
        with contextlib.suppress(errors.ApiError):
            self._supervisor.engine().expect(root, conversation_id)

    async def _open_conversation(self, root: str, conversation_id: str, tenant: str) -> Conversation:
        """The conversation, with the clock that it began with: here, before a restart, or on another server."""
        is_new = self.conversations.find(root, conversation_id) is None
        conversation = self.conversations.open(root, conversation_id, tenant)
        if is_new and self.registry is not None:
            # Without the registry only a template that writes the date could read differently than before.
            with contextlib.suppress(StoreDownError):
                conversation.started_s = await self.registry.register(root, conversation_id, conversation.started_s)
        return conversation

    def close_conversation(self, root: str, conversation_id: str) -> None:
        """It will not go on: what is kept for it may be the first to go."""
        self.conversations.close(root, conversation_id)
        with contextlib.suppress(errors.ApiError):  # a new engine keeps nothing for it
            self._supervisor.engine().close_conversation(root, conversation_id)

    async def start_turn(
        self, body: ChatCompletionRequest, headers: Mapping[str, str], tenant: str, arrival_s: float
    ) -> Turn:
        """Submit one turn. The caller iterates it inside `async with`: leaving early aborts what still runs.

        Raises ApiError for what can be refused before the engine sees it.
        """
        self._check_tenant(tenant)
        request, prompt, conversation, root = await self.prepare(body, headers, tenant)
        request = await self._with_grammar(request, prompt)
        turn = self._submit(request, prompt, conversation, root, arrival_s, tenant)
        turn.is_last = is_last_turn(headers)
        return turn

    async def start_text(
        self, body: ChatCompletionRequest, text: str | list[int], arrival_s: float, tenant: str = ""
    ) -> Turn:
        """The same for a bare text or token ids; `body` only says how to sample."""
        self._check_tenant(tenant)
        request = to_turn(body, self.text_model.sampling_defaults, self._vocab_size())
        prepare = self.text_model.prepare_text if isinstance(text, str) else self.text_model.prepare_tokens
        prompt = await self.in_text_worker(lambda: prepare(text))  # type: ignore[arg-type]  # chosen by its type
        request = await self._with_grammar(request, prompt)
        return self._submit(request, prompt, None, cache_root(tenant or None, body.cache_salt), arrival_s, tenant)

    def _check_tenant(self, tenant: str) -> None:
        """Whether a new turn of this tenant may enter. Raises ApiError 503 or 429, before any work is spent on it."""
        self.check_open()
        num_waiting = 0
        if 2 * len(self._turns) >= self._max_waiting:
            num_waiting = sum(not turn.is_admitted and turn.tenant == tenant for turn in self._turns)
        try:
            self._limits.check(tenant, num_waiting=num_waiting, max_waiting=self._max_waiting)
        except errors.ApiError:
            self.metrics.refused.labels("tenant_limit").inc()
            raise

    async def _with_grammar(self, request: TurnRequest, prompt: Prompt) -> TurnRequest:
        """The request with the grammar that its output must follow, if it asks for one. Raises ApiError."""
        if request.output_rules is None:
            return request
        text, tools = prompt.encoded.text if prompt.is_chat else None, request.tools or []
        grammar = await self._grammars.grammar(request.output_rules, tools, text, self._vocab_size())
        return replace(request, sampling=msgspec.structs.replace(request.sampling, grammar=grammar))

    def _submit(
        self, request: TurnRequest, prompt: Prompt, conversation: Conversation | None, root: str, arrival_s: float,
        tenant: str,
    ) -> Turn:  # fmt: skip
        engine = self.check_open()  # again: preparing takes time
        num_prompt_tokens = len(prompt.encoded.token_ids)
        limit = self.max_model_len or num_prompt_tokens + 1
        if num_prompt_tokens >= limit:
            self.metrics.refused.labels("context").inc()
            raise errors.context_overflow(num_prompt_tokens, limit)
        turn = Turn(self, engine, request, prompt, conversation, arrival_s=arrival_s, tenant=tenant, root=root)
        for index in range(request.num_choices):
            submit = self._submit_message(request, prompt, index, limit, root)
            submit.tenant = tenant
            if index == 0 and conversation is not None:
                submit.conversation_id = conversation.conversation_id
            turn.choices.append(Choice(self.text_model, request, prompt, submit, engine.submit(submit), index))
        self._turns.add(turn)
        self._limits.turn_opened(tenant)
        self._limits.charge(tenant, num_prompt_tokens * request.num_choices)
        return turn

    def turn_closed(self, turn: Turn) -> None:
        self._turns.discard(turn)
        self._limits.turn_closed(turn.tenant)

    async def end_choice(self, turn: Turn, choice: Choice) -> None:
        """After Finished: tell the engine how much of it will be repeated, and keep the record.

        Not cancelled with the client: one that leaves after the last token has still had its turn.
        """
        await asyncio.shield(self.run_to_end(self._end_choice(turn, choice)))

    def run_to_end(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that goes on whatever becomes of the client; close() waits for it."""
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    async def close(self) -> None:
        """Wait for the endings that still run. The engine is closed by its supervisor."""
        if self._endings:
            await asyncio.gather(*self._endings, return_exceptions=True)
        await self._grammars.close()
        self._text_worker.shutdown(wait=False, cancel_futures=True)

    async def _end_choice(self, turn: Turn, choice: Choice) -> None:
        finished = choice.finished
        assert finished is not None
        answer, output_ids = choice.text.collected.message(), choice.text.output_ids
        end = TurnEnd(0, [])
        try:
            end = await self.in_text_worker(
                lambda: self.text_model.turn_end(
                    turn.request, turn.prompt, answer, output_ids, choice.text.num_unsent_tokens
                )
            )
        except Exception:
            # The answer is good whatever happens here; only the next turn would have to compute more.
            log.exception("the stable end of turn %s could not be found", choice.request_id)
        turn.engine.end_turn(choice.request_id, end.stable_tokens, bool(answer.get("tool_calls")))
        self._prepare_next(turn, end, choice.num_prompt_tokens + len(output_ids) - 1)
        self._limits.charge(turn.tenant, len(output_ids) - finished.num_cached_tokens)
        self.metrics.count_finished(finished, choice.ended())
        if turn.conversation is not None and choice.index == 0:
            record = turn.conversation.record_turn(
                request_id=choice.request_id,
                prompt_ids=turn.prompt.encoded.token_ids,
                output_ids=output_ids,
                num_matched_tokens=0 if choice.admitted is None else choice.admitted.num_matched_tokens,
                num_cached_tokens=finished.num_cached_tokens,
                finish_reason=choice.text.end_reason,
                stable_tokens=end.stable_tokens,
                ttft_s=turn.time_to_first_token_s,
                lost_tokens=choice.lost_tokens,
            )
            choice.lost_tokens = record.lost_tokens
            self.metrics.count_turn(turn.conversation.num_turns, record)
            if (position := record.first_difference) is not None:
                record.first_different_message = await self.in_text_worker(
                    lambda: self.text_model.message_at(turn.request, turn.prompt, position)
                )
            if turn.is_last:
                self.close_conversation(turn.conversation.root, turn.conversation.conversation_id)

    def _prepare_next(self, turn: Turn, end: TurnEnd, num_computed_tokens: int) -> None:
        """Where the template does not repeat what was just computed, let the engine compute how the next prompt begins
        while nobody waits for it. Only for conversations: of a single question nothing is known to follow."""
        has_answers = any(message["role"] == "assistant" for message in turn.request.messages)
        is_conversation = turn.conversation is not None or has_answers
        is_lost = end.stable_tokens < num_computed_tokens and len(end.token_ids) > end.stable_tokens
        if is_lost and is_conversation and turn.num_choices == 1 and not turn.is_last:
            conversation_id = None if turn.conversation is None else turn.conversation.conversation_id
            turn.engine.prepare(Prepare(EncodedTokens(end.token_ids), conversation_id, turn.root))

    def _submit_message(self, request: TurnRequest, prompt: Prompt, index: int, limit: int, root: str) -> Submit:
        """Each choice is a request of its own to the engine; only their seeds differ."""
        sampling = request.sampling
        room = limit - len(prompt.encoded.token_ids)
        # With ignore_eos the client's own stop ids still count; the end of a grammar is an end in any case.
        goes_on = sampling.ignore_eos and sampling.grammar is None
        eos_ids = () if goes_on else tuple(sorted(self.text_model.eos_token_ids))
        self._num_requests += 1
        return Submit(
            request_id=f"turn-{self._num_requests}-{index}",
            prompt_ids=prompt.submitted,
            sampling=msgspec.structs.replace(
                sampling,
                max_new_tokens=min(sampling.max_new_tokens, room),
                min_new_tokens=min(sampling.min_new_tokens, room),
                seed=(sampling.seed + index) % 2**64,
                stop_token_ids=tuple(dict.fromkeys((*eos_ids, *sampling.stop_token_ids))),
                ignore_eos=False,
            ),
            boundaries=prompt.boundaries,
            cache_root=root,
            priority=request.priority,
            retention_s=request.retention_s,
            may_be_stopped=bool(request.stop_strings) or not request.parallel_tool_calls,
        )

    def _vocab_size(self) -> int:
        ready = self._supervisor.ready
        return self.text_model.tokenizer.vocab_size if ready is None else ready.vocab_size

    async def in_text_worker(self, work: Callable[[], T]) -> T:
        """Run work on texts beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._text_worker, work)
