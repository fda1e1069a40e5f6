"""Prompts of conversations: canonical messages rendered and encoded, cheaply for a conversation that comes back.

Owns the guard (text in messages that spells a control token stays text) and the exact ids: where a prompt repeats the
text of what the engine holds, it gets the ids that were used and sampled. Knows no boundary and no request.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnkeep.server.chat_messages import Message, TemplateError, relaxed_messages
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.common_prefix import common_prefix_length
from turnkeep.server.prompt_memory import MemoryKey, PromptMemory
from turnkeep.server.tokenizer import Detokenizer, Tokenizer, replace_lone_surrogates

# What an agent itself writes as tokens: in its own messages these strings mean what they say. Clients that know no
# reasoning field send them back inside the content.
AGENT_MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")
GUARDS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))  # Unicode noncharacters: not for interchange


@dataclass(frozen=True, slots=True)
class Guarded:
    """Messages and tools in which spelled control tokens are broken by the character `guard` (None: none were)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    guard: str | None


@dataclass(frozen=True, slots=True)
class RenderSetting:
    """What, besides the messages, decides a prompt's text. relaxed: the template takes these messages only in relaxed
    form; what continues the prompt is then rendered in that form too."""

    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    now: float | None = None
    relaxed: bool = False
    add_generation_prompt: bool = True


DEFAULT_SETTING = RenderSetting()


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's text and tokens. Cut i is a delimiter token: it starts at character `cut_starts[i]`, ends at
    `cut_ends[i]`, and `cut_tokens[i]` tokens stand before its end. The text still holds guard characters.

    num_answer_tokens: so many tokens at its end were sampled (what the engine holds when a turn has ended).
    num_spliced_tokens: so many of its tokens were sampled in the turn that it continues.
    """

    text: str
    token_ids: list[int]
    guarded: Guarded
    setting: RenderSetting
    cut_starts: list[int] = field(repr=False)
    cut_ends: list[int] = field(repr=False)
    cut_tokens: list[int] = field(repr=False)
    num_reencoded_tokens: int = 0
    num_answer_tokens: int = 0
    num_answer_chars: int = 0
    num_spliced_tokens: int = 0

    @property
    def num_asked_chars(self) -> int:
        """Length of the prompt's text in what the engine holds."""
        return len(self.text) - self.num_answer_chars

    @property
    def text_up_to_last_cut(self) -> str:
        return self.text[: self.cut_starts[-1]] if self.cut_starts else self.text

    def num_cuts_within(self, num_chars: int) -> int:
        """How many delimiters end at or before a character position."""
        return bisect.bisect_right(self.cut_ends, num_chars)


@dataclass(slots=True)
class SpliceCounters:
    """Monotonic counts of turns that continue an answer."""

    num_spliced: int = 0  # the answer's text came back as far as its last delimiter, and got its sampled ids
    num_spliced_tokens: int = 0
    num_changed: int = 0  # it came back otherwise (a client or the template changed it), and was encoded anew
    num_unfit: int = 0  # its text and its sampled ids disagree on where delimiters stand: never spliced


class PromptEncoder:
    """Renders and encodes prompts of one model, with what is remembered of their conversations.

    Safe to use from several threads.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, memory: PromptMemory | None = None) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self.num_relaxed = 0  # prompts whose messages the template took only in relaxed form
        self.num_without_cuts = 0  # prompts whose delimiters could not be found in the text (no reuse, no boundaries)
        self.splices = SpliceCounters()
        self._memory = PromptMemory() if memory is None else memory

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        now: float | None = None,
        key: MemoryKey | None = None,
        add_generation_prompt: bool = True,
    ) -> EncodedPrompt:
        """The prompt of canonical messages. key: where it is remembered. Raises TemplateError."""
        guarded = self.guard(messages, tools)
        setting = RenderSetting(guarded.tools, template_kwargs, now, add_generation_prompt=add_generation_prompt)
        try:
            text = self.render(guarded.messages, setting)
        except TemplateError as error:
            setting = replace(setting, relaxed=True)
            try:
                text = self.render(guarded.messages, setting)
            except TemplateError:
                raise error from None
            self.num_relaxed += 1
        known = [] if key is None else self._memory.recall(key)
        prompt = self.encode_after(known, text, guarded, setting)
        if key is not None:
            self._count_splice(known, prompt)
            self._memory.remember(key, prompt)
        return prompt

    def hold(self, prompt: EncodedPrompt, output_ids: Sequence[int], key: MemoryKey | None) -> EncodedPrompt | None:
        """What the engine holds when a turn has ended: prompt and output, by the text they stand for. Remembered, so
        that a prompt which repeats this text gets these ids. None when text and ids disagree on the delimiters."""
        detokenizer = Detokenizer(self.tokenizer)
        text = detokenizer.push(output_ids) + detokenizer.flush()
        cuts = self._cuts(text, output_ids)
        if cuts is None or not prompt.cut_starts:
            self.splices.num_unfit += 1
            return None
        num_chars, num_tokens = len(prompt.text), len(prompt.token_ids)
        held = replace(
            prompt,
            text=prompt.text + text,
            token_ids=[*prompt.token_ids, *output_ids],
            cut_starts=prompt.cut_starts + [num_chars + position for position in cuts[0]],
            cut_ends=prompt.cut_ends + [num_chars + position for position in cuts[1]],
            cut_tokens=prompt.cut_tokens + [num_tokens + position for position in cuts[2]],
            num_answer_tokens=len(output_ids),
            num_answer_chars=len(text),
            num_spliced_tokens=0,
        )
        if key is not None:
            self._memory.remember(key, held)
        return held

    def _count_splice(self, known: Sequence[EncodedPrompt], prompt: EncodedPrompt) -> None:
        if prompt.num_spliced_tokens:
            self.splices.num_spliced += 1
            self.splices.num_spliced_tokens += prompt.num_spliced_tokens
        elif any(_continues(prompt, held) for held in known if held.num_answer_tokens):
            self.splices.num_changed += 1

    def guard(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        mark: str | None = None,
        avoid: str = "",
    ) -> Guarded:
        """Break every control token that a message or tool spells; agents' own messages may spell their markup.

        mark: the guard to use (default: the first that occurs neither in these texts nor in `avoid`).
        """
        pattern = self.tokenizer.control_pattern
        markup = {text for text in AGENT_MARKUP if pattern.fullmatch(text)}
        plain_tools = [dict(tool) for tool in tools] if tools else None
        if not _any_text(lambda text: pattern.search(text) is not None, [*messages, plain_tools]):
            return Guarded(list(messages), plain_tools, None)
        guard = mark or _unused_mark([*messages, plain_tools], avoid)

        def broken(text: str, allowed: frozenset[str] = frozenset()) -> str:
            return _break_matches(text, pattern, guard, allowed)

        result: list[Message] = []
        for message in messages:
            changed: Message = _map_text(broken, message)
            if message["role"] == "assistant" and isinstance(message.get("content"), str):
                changed["content"] = broken(message["content"], frozenset(markup))
            result.append({**changed, "role": message["role"]})
        return Guarded(result, _map_text(broken, plain_tools), guard)

    def render(self, messages: Sequence[Message], setting: RenderSetting) -> str:
        """Text of (guarded) messages. Raises TemplateError."""
        text = self.template.render(
            relaxed_messages(messages) if setting.relaxed else messages,
            tools=setting.tools,
            template_kwargs=setting.template_kwargs,
            now=setting.now,
            add_generation_prompt=setting.add_generation_prompt,
        )
        return replace_lone_surrogates(text)

    def encode_after(
        self,
        known: Sequence[EncodedPrompt],
        text: str,
        guarded: Guarded,
        setting: RenderSetting = DEFAULT_SETTING,
    ) -> EncodedPrompt:
        """Tokens and cuts of a text; what a known prompt shares with it up to a delimiter is not encoded again: text
        on either side of a delimiter tokenizes independently of the other."""
        best, num_cuts = _longest_known(known, text, guarded.guard)
        if best is not None:
            start = best.cut_starts[num_cuts - 1]
            num_tokens = best.cut_tokens[num_cuts - 1] - 1
            # The delimiter itself is encoded again: some tokenizers treat the first word of a text on its own.
            ids, starts, ends, tokens = self.encode_piece(text[start:], guarded.guard)
            if starts and ids[0] == best.token_ids[num_tokens]:
                num_asked_tokens = len(best.token_ids) - best.num_answer_tokens
                return EncodedPrompt(
                    text,
                    best.token_ids[:num_tokens] + ids,
                    guarded,
                    setting,
                    best.cut_starts[: num_cuts - 1] + [start + position for position in starts],
                    best.cut_ends[: num_cuts - 1] + [start + position for position in ends],
                    best.cut_tokens[: num_cuts - 1] + [num_tokens + position for position in tokens],
                    len(ids),
                    num_spliced_tokens=max(0, num_tokens + 1 - num_asked_tokens),
                )
        ids, starts, ends, tokens = self.encode_piece(text, guarded.guard)
        return EncodedPrompt(text, ids, guarded, setting, starts, ends, tokens, len(ids))

    def encode_piece(self, text: str, guard: str | None) -> tuple[list[int], list[int], list[int], list[int]]:
        """Token ids of a text, and its cuts (starts, ends, tokens); no cuts when text and tokens disagree on them."""
        ids = self._encode_guarded(text, guard) if guard and guard in text else self.tokenizer.encode(text)
        cuts = self._cuts(text, ids)
        if cuts is None:
            self.num_without_cuts += 1
            return ids, [], [], []
        return ids, *cuts

    def _cuts(self, text: str, ids: Sequence[int]) -> tuple[list[int], list[int], list[int]] | None:
        """Where the delimiters of a text start and end, and how many of its tokens stand before their ends; None when
        text and tokens disagree on them."""
        special = self.tokenizer.special_ids
        tokens = [position for position, token_id in enumerate(ids, 1) if token_id in special]
        matches = [*self.tokenizer.delimiter_pattern.finditer(text)]
        if [ids[position - 1] for position in tokens] != [self.tokenizer.delimiter_id(match[0]) for match in matches]:
            return None
        return [match.start() for match in matches], [match.end() for match in matches], tokens

    def _encode_guarded(self, text: str, guard: str) -> list[int]:
        """Encode a text with guards: the stretch around a guard, up to the next control token, as plain text."""
        ids: list[int] = []
        start = 0  # of the text that is not encoded yet
        matches = [*self.tokenizer.control_pattern.finditer(text)]
        ends = [match.end() for match in matches]
        while (position := text.find(guard, start)) >= 0:
            index = bisect.bisect_right(ends, position)
            island = max(start, ends[index - 1]) if index else start
            following = matches[index].start() if index < len(matches) else len(text)
            ids += self.tokenizer.encode(text[start:island])
            ids += self.tokenizer.encode(text[island:following].replace(guard, ""), allow_special=False)
            start = following
        return ids + self.tokenizer.encode(text[start:])


def _longest_known(
    candidates: Sequence[EncodedPrompt], text: str, guard: str | None
) -> tuple[EncodedPrompt | None, int]:
    """The prompt that shares most text up to a delimiter, and the number of its cuts in the shared text."""
    best, best_cuts, best_chars = None, 0, 0
    for known in reversed(candidates):
        shared = common_prefix_length(known.text, text)
        if known.guarded.guard != guard:  # the mark of one is an ordinary character for the other
            for mark in (known.guarded.guard, guard):
                found = text.find(mark, 0, shared) if mark else -1
                shared = found if found >= 0 else shared
        num_cuts = known.num_cuts_within(shared)
        if num_cuts and known.cut_ends[num_cuts - 1] > best_chars:
            best, best_cuts, best_chars = known, num_cuts, known.cut_ends[num_cuts - 1]
    return best, best_cuts


def _continues(prompt: EncodedPrompt, held: EncodedPrompt) -> bool:
    """Whether a prompt goes on where a turn ended: it repeats what was asked, and more."""
    num_cuts = held.num_cuts_within(held.num_asked_chars)
    asked = held.text[: held.cut_starts[num_cuts - 1]] if num_cuts else held.text
    return len(prompt.text) > held.num_asked_chars and prompt.text.startswith(asked)


def _unused_mark(value: Any, avoid: str) -> str:
    texts = [avoid]

    def collect(text: str) -> bool:
        texts.append(text)
        return False

    _any_text(collect, value)
    for mark in GUARDS:
        if not any(mark in text for text in texts):
            return mark
    raise TemplateError("the messages use every Unicode noncharacter", "messages")


def _any_text(test: Callable[[str], bool], value: Any) -> bool:
    """Whether any text inside plain data passes a test."""
    if isinstance(value, str):
        return test(value)
    if isinstance(value, Mapping):
        return any(_any_text(test, key) or _any_text(test, item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return any(_any_text(test, item) for item in value)
    return False


def _map_text(change: Callable[[str], str], value: Any) -> Any:
    """Plain data with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_text(change, key): _map_text(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_text(change, item) for item in value]
    return value


def _break_matches(text: str, pattern: Any, guard: str, allowed: frozenset[str]) -> str:
    """The text with the guard behind the first character of every match that is not allowed, until none is left."""
    start = 0
    while (match := pattern.search(text, start)) is not None:
        if match[0] in allowed:
            start = match.end()
            continue
        text = f"{text[: match.start() + 1]}{guard}{text[match.start() + 1 :]}"
        start = match.start() + 2
    return text
