"""Everything about a model that is text: tokenizer, chat template, boundaries, output format, sampling defaults.

Made once from a model's files; no weights, no torch.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import turnkeep
from turnkeep.cache.boundary import Boundary
from turnkeep.cache.encoded_tokens import EncodedTokens
from turnkeep.server import errors
from turnkeep.server.boundaries import BoundaryFinder
from turnkeep.server.cache_hints import CacheMark
from turnkeep.server.chat_messages import TemplateError
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.parsers import OutputFormat, select_format
from turnkeep.server.prompt_memory import MemoryKey, memory_key
from turnkeep.server.prompts import DEFAULT_SETTING, EncodedPrompt, Guarded, PromptEncoder
from turnkeep.server.stable_position import TurnEnd, marked_ends, with_declared
from turnkeep.server.tokenizer import Tokenizer
from turnkeep.server.turn_events import TokenText
from turnkeep.server.turn_request import SamplingDefaults, TurnRequest

if TYPE_CHECKING:
    from turnkeep.models.catalog import ModelSource

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered and encoded conversation, and where it is worth a snapshot."""

    encoded: EncodedPrompt
    boundaries: tuple[Boundary, ...]
    now: float  # what templates that write the date were given
    submitted: EncodedTokens  # its tokens as they are sent to the engine
    key: MemoryKey | None = None  # where it is remembered
    num_declared_tokens: int = 0  # up to the last place that the client has marked
    is_chat: bool = True  # False: a bare text, continued without a template


class TextModel:
    """The text half of one model. Its methods take time on long conversations and are called in a worker thread."""

    def __init__(
        self,
        tokenizer_json: str,
        chat_template: str | None,
        *,
        name: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        sampling_defaults: SamplingDefaults | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> None:
        """The parsers' names (server/parsers) take the place of what the template tells about the model's output."""
        self.name = name
        self.has_chat_template = chat_template is not None
        self.tokenizer = Tokenizer(tokenizer_json)
        self.template = ChatTemplate(
            chat_template or PLAIN_TEMPLATE, bos_token=bos_token, eos_token=eos_token, special_tokens=special_tokens
        )
        self.encoder = PromptEncoder(self.template, self.tokenizer)
        self.boundaries = BoundaryFinder(self.template, self.tokenizer, encoder=self.encoder)
        self.format: OutputFormat = select_format(
            self.template, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser
        )
        self.hidden_ids = self.tokenizer.hidden_ids(keep=self.format.markup)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.sampling_defaults = sampling_defaults or SamplingDefaults()
        digest = hashlib.sha256("\0".join([turnkeep.__version__, name, tokenizer_json, chat_template or ""]).encode())
        self.fingerprint = f"fp_{digest.hexdigest()[:12]}"
        self._token_texts: dict[int, tuple[str, tuple[int, ...] | None]] = {}

    @classmethod
    def from_source(
        cls, source: ModelSource, *, tool_call_parser: str | None = None, reasoning_parser: str | None = None
    ) -> TextModel:
        return cls(
            source.tokenizer_json(),
            source.chat_template(),
            name=source.name,
            bos_token=source.bos_token,
            eos_token=source.eos_token,
            special_tokens=source.special_tokens(),
            eos_token_ids=source.eos_token_ids,
            sampling_defaults=SamplingDefaults.from_generation_config(source.generation_config()),
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )

    def prepare(
        self, request: TurnRequest, *, now: float, root: str = "", conversation_id: str | None = None
    ) -> Prompt:
        """Render, encode and find the boundaries. root: under which alone the prompt and its answer are remembered.

        Raises ApiError when the template refuses the messages.
        """
        kwargs = request.template_kwargs
        key = memory_key(root, conversation_id, request.messages, request.tools)
        try:
            encoded = self.encoder.encode(
                request.messages, tools=request.tools, template_kwargs=kwargs, now=now, key=key
            )
        except TemplateError as error:
            raise errors.bad_request(str(error), error.param or "messages") from None
        if not encoded.token_ids:
            raise errors.bad_request("The messages give an empty prompt.", "messages")
        boundaries = self.boundaries.prompt_boundaries(
            request.messages, request.tools, kwargs, encoded.token_ids, prompt=encoded, now=now
        )
        submitted = EncodedTokens(encoded.token_ids)
        if not request.cache_marks:
            return Prompt(encoded, boundaries, now, submitted, key)
        declared = self.boundaries.declared_positions(request.messages, request.cache_marks, encoded)
        num_declared_tokens = max(declared, default=0)
        return Prompt(encoded, with_declared(boundaries, declared), now, submitted, key, num_declared_tokens)

    def prepare_text(self, text: str) -> Prompt:
        """A bare text to be continued, after what the tokenizer puts before a text, unless the text begins with it.

        What spells a control token in it is one. Raises ApiError when it is empty.
        """
        encoded = self.encoder.encode_after([], text, Guarded([], None, None))
        if not encoded.token_ids:
            raise errors.bad_request("The prompt must not be empty.", "prompt")
        opening = self.tokenizer.opening_ids
        if encoded.token_ids[: len(opening)] != opening:
            encoded = replace(encoded, token_ids=[*opening, *encoded.token_ids])
        return _bare_prompt(encoded)

    def prepare_tokens(self, token_ids: list[int]) -> Prompt:
        """The same for token ids, which are taken as they are. Raises ApiError for one that does not exist."""
        if not all(0 <= token_id < self.tokenizer.vocab_size for token_id in token_ids):
            limit = self.tokenizer.vocab_size
            raise errors.bad_request(f"A token id is at least 0 and less than {limit}.", "prompt")
        text = self.tokenizer.decode(token_ids)
        encoded = EncodedPrompt(text, token_ids, Guarded([], None, None), DEFAULT_SETTING, [], [], [], len(token_ids))
        return _bare_prompt(encoded)

    def turn_end(
        self,
        request: TurnRequest,
        prompt: Prompt,
        answer: dict[str, object],
        output_ids: list[int],
        num_unsent: int = 0,
    ) -> TurnEnd:
        """What the next prompt will repeat of prompt + output when the client sends `answer` back, and how it begins.

        Remembers these tokens by their text, for the prompt that does.
        """
        engine_ids = [*prompt.encoded.token_ids, *output_ids]
        if not prompt.is_chat:
            return TurnEnd(len(engine_ids), [])
        held = self.encoder.hold(prompt.encoded, output_ids, prompt.key)
        return self.boundaries.turn_end(
            request.messages,
            answer,
            request.tools,
            request.template_kwargs,
            engine_ids,
            prompt=prompt.encoded,
            now=prompt.now,
            held=held,
            num_unsent=num_unsent,
        )

    def repeats_answer(self, prompt: Prompt, *, has_calls: bool) -> bool:
        """Whether a next prompt is likely to repeat the tokens of an answer like this one."""
        return not (prompt.is_chat and self.boundaries.are_changed(prompt.encoded.setting, calls=has_calls))

    def message_at(self, request: TurnRequest, prompt: Prompt, position: int) -> int | None:
        """Index of the request's message to which the token at a position belongs; None behind all messages, or where
        the template does not tell."""
        marks = [CacheMark(index) for index in range(len(request.messages))]
        try:
            ends = marked_ends(self.encoder, prompt.encoded, request.messages, marks)
        except TemplateError:
            return None
        encoded = prompt.encoded
        num_cuts = bisect.bisect_right(encoded.cut_tokens, position)
        first, num_chars = (encoded.cut_tokens[num_cuts - 1], encoded.cut_ends[num_cuts - 1]) if num_cuts else (0, 0)
        num_chars += len(self.tokenizer.decode(encoded.token_ids[first:position]))
        return next((index for index, end in enumerate(ends) if end > num_chars), None)

    def counts(self) -> dict[str, int]:
        """Monotonic counts, for metrics: answers that came back with the ids that were sampled (spliced) or with other
        text (changed) or whose text and ids disagree (unfit), and prompts in which something could not be found."""
        splices, boundaries = self.encoder.splices, self.boundaries.counters
        return {
            "spliced_answers": splices.num_spliced,
            "spliced_tokens": splices.num_spliced_tokens,
            "changed_answers": splices.num_changed,
            "unfit_answers": splices.num_unfit,
            "boundary_failures": boundaries.num_failures,
            "lost_cache_marks": boundaries.num_lost_marks,
            "relaxed_prompts": self.encoder.num_relaxed,
            "prompts_without_cuts": self.encoder.num_without_cuts,
        }

    def token_text(self, token_id: int, logprob: float) -> TokenText:
        """One token as logprobs show it; bytes are None when the token is only a part of a character."""
        if token_id not in self._token_texts:
            text = self.tokenizer.decode([token_id])
            whole = "�" not in text
            self._token_texts[token_id] = (text, tuple(text.encode()) if whole else None)
        text, raw = self._token_texts[token_id]
        return TokenText(text, raw, logprob)


def _bare_prompt(encoded: EncodedPrompt) -> Prompt:
    """The same text asked again, or for several answers, resumes before its last token."""
    position = len(encoded.token_ids) - 1
    boundaries = (Boundary(position, "turn_start"),) if position > 0 else ()
    return Prompt(encoded, boundaries, 0.0, EncodedTokens(encoded.token_ids), is_chat=False)
