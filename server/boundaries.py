"""Stable positions of a conversation, found for any chat template by rendering what might come next.

A boundary is as far as every probable continuation repeats the prompt, backed off to just behind a delimiter token:
text before a delimiter tokenizes the same whatever follows. Long conversations are probed through a short stand-in
that ends alike, which is checked against the real text and, now and then, against a full rendering.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnkeep.cache.boundary import Boundary
from turnkeep.server.bounded_table import put_newest, table_key
from turnkeep.server.cache_hints import CacheMark
from turnkeep.server.chat_messages import Message, TemplateError, normalize_messages
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.common_prefix import common_prefix_length, common_prefix_of, common_prefix_tokens
from turnkeep.server.probes import (
    ANSWER_PROBES,
    FORK_PROBES,
    LOOP_PROBES,
    OPENING_PROBES,
    Probe,
    continuations,
    count_leading_system,
    find_last_user,
    shorten,
)
from turnkeep.server.prompts import EncodedPrompt, Guarded, PromptEncoder, RenderSetting
from turnkeep.server.stable_position import (
    UNSURE_TOKENS,
    TurnEnd,
    has_near_delimiter,
    marked_ends,
    stable_position,
)
from turnkeep.server.tokenizer import Tokenizer

MIN_PLAIN_TRUNK_TOKENS = 16  # a shorter trunk without system text or tools is not worth a snapshot
FAR_TOKENS = 64  # a prompt that goes on for more behind its turn_start is worth a snapshot at its end
NEAR_CHARS = 64  # a delimiter this near the end of a shared text is worth backing off to
NUM_FULL_ROUNDS = 3  # rounds with every probe before a class of conversations is probed by its worst one
MAX_CLASSES = 256
MAX_TRUNKS = 64
MAX_STARTS = 4096
PROBES = {"turn": ANSWER_PROBES, "loop": LOOP_PROBES, "fork": FORK_PROBES, "end": ()}


@dataclass(slots=True)
class _Class:
    """What was learnt of conversations alike: same template switches, tools or not, system text or not."""

    probes: tuple[Probe, ...]
    num_rounds: int = 0
    worst: int = 0  # index of the probe that kept least
    next_other: int = 0  # the other probes take turns
    may_shorten: bool = True
    verified_length: int = 0  # messages of the longest conversation whose stand-in was checked in full


@dataclass(slots=True)
class BoundaryCounters:
    """Monotonic counts, for metrics."""

    num_failures: int = 0  # prompts for which no boundary could be found
    num_full_renderings: int = 0  # probes that had to render a whole long conversation
    num_far_delimiters: int = 0  # boundaries set without a delimiter near the end of what is repeated
    num_lost_marks: int = 0  # cache marks of clients that the template does not print where they can be found
    num_unlike: int = 0  # classes whose short stand-in did not behave like the conversation


class BoundaryFinder:
    """Finds boundaries for one model. Give it the encoder of the prompts, so that only new text is encoded."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, encoder: PromptEncoder | None = None) -> None:
        self._encoder = encoder or PromptEncoder(template, tokenizer)
        self._tokenizer = tokenizer
        self._shows_clock = "strftime_now" in template.source
        self._classes: OrderedDict[bytes, _Class] = OrderedDict()
        self._trunks: OrderedDict[bytes, str] = OrderedDict()
        self._starts: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._changed_answers: OrderedDict[bytes, bool] = OrderedDict()
        self.counters = BoundaryCounters()
        self._lock = threading.Lock()  # the tables above are used by worker threads

    @property
    def num_failures(self) -> int:
        """Prompts for which no boundary could be found."""
        return self.counters.num_failures

    def prompt_boundaries(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        prompt_ids: Sequence[int],
        *,
        prompt: EncodedPrompt | None = None,
        now: float | None = None,
    ) -> tuple[Boundary, ...]:
        """trunk and turn_start of a prompt (with generation prompt) of canonical messages, ascending. And where answers
        do not come back as they were generated (a client that drops their reasoning, a template that prints them
        otherwise), what takes the place of their turn_end: one behind the newest tool result, from which the loop's
        next request goes on, or one before the newest user message, from which an edit of it does. Where the prompt
        ends far behind turn_start, one at its end instead: a retry goes on there.

        Every position is smaller than the number of tokens, so that the same prompt sent again can use it. Empty when
        the template refuses every probe.
        """
        try:
            if prompt is None:
                prompt = self._encoder.encode(messages, tools=tools, template_kwargs=template_kwargs, now=now)
            if list(prompt_ids) != prompt.token_ids:
                self.counters.num_failures += 1
                return ()
            setting = prompt.setting
            with self._lock:
                trunk = self._trunk(prompt, setting)
                start = self._turn_start(prompt, setting)
                tail = self._loop_tail(prompt, setting) or self._last_end(prompt, setting)
        except TemplateError:
            self.counters.num_failures += 1
            return ()
        found = []
        if trunk is not None and trunk != start:
            found.append(Boundary(trunk, "trunk"))
        if start is not None:
            found.append(Boundary(start, "turn_start"))
        is_asked = prompt.guarded.messages[-1]["role"] == "user"
        if is_asked and start is not None and len(prompt.token_ids) - start > FAR_TOKENS:
            tail = len(prompt.token_ids) - 1
        if tail is not None and tail > (trunk or 0) and tail != start:
            found.append(Boundary(tail, "turn_end"))
        return tuple(sorted(found, key=lambda boundary: boundary.position))

    def declared_positions(
        self, messages: Sequence[Message], marks: Sequence[CacheMark], prompt: EncodedPrompt
    ) -> list[int]:
        """Token positions of the places in canonical messages that the client has marked, ascending."""
        try:
            ends = marked_ends(self._encoder, prompt, messages, marks)
        except TemplateError:
            ends = []
        self.counters.num_lost_marks += len(marks) - len(ends)
        return [position for end in ends if (position := stable_position(self._encoder, prompt, end)) > 0]

    def turn_end(
        self,
        messages: Sequence[Message],
        answer_message: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
        engine_ids: Sequence[int],
        *,
        prompt: EncodedPrompt | None = None,
        now: float | None = None,
        held: EncodedPrompt | None = None,
        num_unsent: int = 0,
    ) -> TurnEnd:
        """How the next prompt begins, and how many of engine_ids (prompt and sampled tokens) it repeats, if the client
        returns the answer as it is and sends what it asks for: results of its tool calls, or a user message.

        held: engine_ids with their text, where they are remembered; the next prompt then gets these ids. num_unsent:
        of engine_ids so many of the last ones are not, or not for certain, a part of the answer.
        """
        try:
            if prompt is None:
                prompt = self._encoder.encode(messages, tools=tools, template_kwargs=template_kwargs, now=now)
            answer = normalize_messages([dict(answer_message)])
            guard = prompt.guarded.guard
            guarded = self._encoder.guard(answer, None, mark=guard, avoid=prompt.text)
            setting = prompt.setting
            with self._lock:
                text = self._next_prompt_text(prompt, guarded.messages[0], setting)
        except TemplateError:
            self.counters.num_failures += 1
            return TurnEnd(0, [])
        marked = Guarded([], None, guard or guarded.guard)
        ids = self._encoder.encode_after([held or prompt], text, marked, prompt.setting).token_ids
        if ids and ids[-1] not in self._tokenizer.special_ids:
            ids = ids[: max(0, len(ids) - UNSURE_TOKENS)]
        stable = common_prefix_tokens(engine_ids, ids)
        key = table_key(bool(answer[0].get("tool_calls")), bool(tools), template_kwargs)
        with self._lock:
            put_newest(self._changed_answers, key, stable < len(engine_ids) - max(num_unsent, 1), MAX_CLASSES)
        return TurnEnd(stable, ids)

    def _trunk(self, prompt: EncodedPrompt, setting: RenderSetting) -> int | None:
        messages = prompt.guarded.messages
        leading = messages[: count_leading_system(messages)]
        now = setting.now if self._shows_clock else None
        key = table_key(leading, setting.tools, setting.template_kwargs, now)
        shared = self._trunks.get(key)
        if shared is None:
            texts = self._render_all([[*leading, *probe.messages] for probe in OPENING_PROBES], setting)
            shared = common_prefix_of(texts) if texts else ""
            put_newest(self._trunks, key, shared, MAX_TRUNKS)
        position = self._position(prompt, common_prefix_length(prompt.text, shared))
        if position == 0 or (position < MIN_PLAIN_TRUNK_TOKENS and not leading and not setting.tools):
            return None
        return position

    def _turn_start(self, prompt: EncodedPrompt, setting: RenderSetting) -> int | None:
        messages = prompt.guarded.messages
        last_user = find_last_user(messages)
        if last_user is None:
            return None
        base = messages[: last_user + 1]
        in_loop = last_user + 1 < len(messages)
        key = table_key(last_user, base[-1], bool(setting.tools), setting.template_kwargs)
        if in_loop:
            num_chars = self._known_start(key, prompt.text)
            if num_chars is None:
                text = self._render(base, setting)
                num_chars = min(
                    self._stable_chars("turn", base, text, setting), common_prefix_length(text, prompt.text)
                )
        else:
            num_chars = self._stable_chars("turn", base, prompt.text, setting)
        put_newest(self._starts, key, (num_chars, hash(prompt.text[:num_chars])), MAX_STARTS)
        position = self._position(prompt, num_chars)
        return position or None

    def _known_start(self, key: bytes, text: str) -> int | None:
        """The stable length found in an earlier request of this turn, if the prompt still begins alike."""
        known = self._starts.get(key)
        if known is None or hash(text[: known[0]]) != known[1]:
            return None
        return known[0]

    def _loop_tail(self, prompt: EncodedPrompt, setting: RenderSetting) -> int | None:
        """How far every next call of a tool loop repeats the prompt, if calls are known to come back changed."""
        messages = prompt.guarded.messages
        if messages[-1]["role"] != "tool":
            return None
        turn = messages[find_last_user(messages) or 0 :]
        drops_reasoning = self._encoder.template.reads_reasoning and any(
            message.get("tool_calls") and not message.get("reasoning_content") for message in turn
        )
        if not drops_reasoning and not self.are_changed(setting, calls=True):
            return None
        return self._position(prompt, self._stable_chars("loop", messages, prompt.text, setting))

    def _last_end(self, prompt: EncodedPrompt, setting: RenderSetting) -> int | None:
        """How far a prompt with another newest user message repeats this one, if answers are known to come back
        changed: then nothing else is kept there."""
        messages = prompt.guarded.messages
        is_first = find_last_user(messages[:-1]) is None
        if messages[-1]["role"] != "user" or is_first or not self.are_changed(setting, calls=False):
            return None
        return self._position(prompt, self._stable_chars("fork", messages, prompt.text, setting, num_replaced=1))

    def are_changed(self, setting: RenderSetting, *, calls: bool) -> bool:
        """Whether prompts were seen to repeat answers, or calls, otherwise than they were generated."""
        return self._changed_answers.get(table_key(calls, bool(setting.tools), setting.template_kwargs), False)

    def _stable_chars(
        self, purpose: str, base: list[Message], text: str, setting: RenderSetting, num_replaced: int = 0
    ) -> int:
        """How much of the prompt text of `base` its probes repeat, which stand behind it or in place of its last
        messages: every answer and continuation, every call, or every other question."""
        known = self._class_of(base, setting, purpose)
        short = shorten(base) if known.may_shorten else base
        if len(short) < len(base):
            lifted = self._stable_chars_by(short, base, text, known, setting, num_replaced)
            if lifted is not None:
                return lifted
            self.counters.num_full_renderings += 1
        return self._probe_answers(base[: len(base) - num_replaced], text, known, setting)

    def _stable_chars_by(
        self,
        short: list[Message],
        base: list[Message],
        text: str,
        known: _Class,
        setting: RenderSetting,
        num_replaced: int,
    ) -> int | None:
        """The same through the stand-in; None when its text does not end like the real one."""
        short_text = self._render(short, setting)
        stable = self._probe_answers(short[: len(short) - num_replaced], short_text, known, setting)
        if not text.endswith(short_text[self._margin(short_text, stable) :]):
            return None
        lifted = len(text) - (len(short_text) - stable)
        if len(base) >= 2 * known.verified_length:
            known.verified_length = len(base)
            self.counters.num_full_renderings += 1
            kept = base[: len(base) - num_replaced]
            full = self._limit(kept, text, [known.probes[known.worst], known.probes[0]], setting)[0]
            if full is not None and full < lifted:
                known.may_shorten = False
                self.counters.num_unlike += 1
                return None
        return lifted

    def _probe_answers(self, base: list[Message], text: str, known: _Class, setting: RenderSetting) -> int:
        if known.num_rounds < NUM_FULL_ROUNDS:
            chosen = list(range(len(known.probes)))
        else:
            known.next_other = (known.next_other + 1) % len(known.probes)
            chosen = [known.worst, known.next_other]
        known.num_rounds += 1
        limit, worst = self._limit(base, text, [known.probes[index] for index in chosen], setting)
        if limit is None:
            raise TemplateError("no continuation of this conversation can be rendered", "messages")
        known.worst = chosen[worst]
        return limit

    def _limit(
        self, base: list[Message], text: str, probes: list[Probe], setting: RenderSetting
    ) -> tuple[int | None, int]:
        """Shortest common prefix of a prompt text with its continuations, and the number of the probe that gave it."""
        limit, worst = None, 0
        for index, probe in enumerate(probes):
            try:
                other = self._render([*base, *probe.messages], setting)
            except TemplateError:
                continue
            shared = common_prefix_length(text, other)
            if limit is None or shared < limit:
                limit, worst = shared, index
        return limit, worst

    def _next_prompt_text(self, prompt: EncodedPrompt, answer: Message, setting: RenderSetting) -> str:
        """What all next prompts begin with, cut behind a delimiter where there is one after the answer."""
        messages = prompt.guarded.messages
        known = self._class_of(messages, setting, "end")
        short = shorten(messages) if known.may_shorten else messages
        if len(short) < len(messages):
            text = self._lifted_next_text(prompt, short, answer, setting)
            if text is not None:
                if len(messages) < 2 * known.verified_length:
                    return text
                known.verified_length = len(messages)
                if common_prefix_length(text, full := self._full_next_text(messages, answer, setting)) == len(text):
                    return text
                known.may_shorten = False
                self.counters.num_unlike += 1
                return full
        return self._full_next_text(messages, answer, setting)

    def _full_next_text(self, messages: list[Message], answer: Message, setting: RenderSetting) -> str:
        if len(messages) > 2 * len(shorten(messages)):
            self.counters.num_full_renderings += 1
        texts = self._render_all([[*messages, answer, *after] for after in continuations(answer)], setting)
        if not texts:
            raise TemplateError("no continuation of this answer can be rendered", "messages")
        return self._cut(common_prefix_of(texts))

    def _lifted_next_text(
        self, prompt: EncodedPrompt, short: list[Message], answer: Message, setting: RenderSetting
    ) -> str | None:
        short_text = self._render(short, setting)
        next_text = self._full_next_text(short, answer, setting)
        margin = self._margin(short_text, common_prefix_length(short_text, next_text))
        if not margin or not prompt.text.endswith(short_text[margin:]):
            return None
        return prompt.text[: len(prompt.text) - (len(short_text) - margin)] + next_text[margin:]

    def _render(self, messages: Sequence[Message], setting: RenderSetting) -> str:
        return self._encoder.render(messages, setting)

    def _render_all(self, conversations: list[list[Message]], setting: RenderSetting) -> list[str]:
        """Texts of the conversations that the template takes."""
        texts = []
        for messages in conversations:
            try:
                texts.append(self._render(messages, setting))
            except TemplateError:
                continue
        return texts

    def _class_of(self, messages: list[Message], setting: RenderSetting, purpose: str) -> _Class:
        key = table_key(
            purpose, setting.template_kwargs, bool(setting.tools), count_leading_system(messages), messages[-1]["role"]
        )
        known = self._classes.get(key)
        if known is None:
            known = _Class(PROBES[purpose])
            put_newest(self._classes, key, known, MAX_CLASSES)
        return known

    def _margin(self, text: str, position: int) -> int:
        """Start of the delimiter before the last delimiter that ends at or before a position; 0 if there is none."""
        starts = [m.start() for m in self._tokenizer.delimiter_pattern.finditer(text, 0, position)]
        return starts[-2] if len(starts) > 1 else 0

    def _cut(self, text: str) -> str:
        """The text up to its last delimiter, if one stands near its end."""
        ends = [m.end() for m in self._tokenizer.delimiter_pattern.finditer(text, max(0, len(text) - NEAR_CHARS))]
        return text[: ends[-1]] if ends else text

    def _position(self, prompt: EncodedPrompt, num_chars: int) -> int:
        self.counters.num_far_delimiters += not has_near_delimiter(prompt, num_chars)
        return stable_position(self._encoder, prompt, num_chars)
