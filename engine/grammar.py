"""Which tokens a request's grammar allows next: one matcher a request, rebuilt from its output tokens whenever needed.

Knows token ids, grammars in llguidance's JSON form and bit masks; no tensors and no text. A matcher's state is always
what the output tokens of the plan say, so failed steps, suspensions and prefix hits need no care. What a grammar may
cost is bounded by llguidance's own limits: about 20 ms to begin one, about 15 ms a token.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

MAX_MATCHERS = 512  # live states; one that is dropped is computed again from its tokens
MAX_GRAMMARS = 64  # compiled grammars kept for the next request
SLOW_GRAMMAR_S = 0.1


class GrammarError(ValueError):
    """The grammar cannot be used, or the output has left it. The message is fit for the client."""


@dataclass(slots=True)
class _State:
    matcher: LLMatcher
    grammar: str
    consumed: list[int]


class GrammarMatchers:
    """Matchers of all running requests. `read_tokenizer` gives the text of a tokenizer.json, on first need."""

    def __init__(
        self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int], *,
        max_matchers: int = MAX_MATCHERS,
    ) -> None:  # fmt: skip
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._max_matchers = max_matchers
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._states: OrderedDict[str, _State] = OrderedDict()
        self._grammars: OrderedDict[str, LLMatcher] = OrderedDict()
        self._words = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def prepare(self) -> None:
        """Read the vocabulary in a thread beside the steps, where llguidance is installed: for a large one that takes
        seconds, which would otherwise stop every request when the first grammar comes."""
        if importlib.util.find_spec("llguidance") is not None:
            threading.Thread(target=self._prepare, name="turnkeep-grammar").start()

    def _prepare(self) -> None:
        try:
            self._llguidance_tokenizer()
        except Exception as error:  # only requests with a grammar need it, and they are told then
            log.warning("output cannot be structured with this tokenizer: %s", error)

    def allowed_bits(
        self, request_id: str, grammar: str, output_ids: Sequence[int], stop_token_ids: Sequence[int]
    ) -> bytes:
        """A bit for every token of the vocabulary, lowest first: the tokens that may follow `output_ids`.

        Where the grammar may end, the model's end tokens and `stop_token_ids` are allowed. Raises GrammarError.
        """
        matcher = self._matcher(request_id, grammar, output_ids)
        from llguidance.numpy import fill_next_token_bitmask

        words = self._words
        words.fill(0)
        if not matcher.is_stopped():
            fill_next_token_bitmask(matcher, words[None, :], 0)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {_first_line(matcher.get_error())}")
        if matcher.is_accepting():
            for token_id in (*self._eos_token_ids, *stop_token_ids):
                words.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        return words.tobytes()

    def _matcher(self, request_id: str, grammar: str, output_ids: Sequence[int]) -> LLMatcher:
        """The request's matcher, in the state after `output_ids`."""
        state = self._states.pop(request_id, None)
        num_consumed = len(state.consumed) if state is not None else 0
        if state is None or state.grammar != grammar or list(output_ids[:num_consumed]) != state.consumed:
            state, num_consumed = _State(self._compiled(grammar).deep_copy(), grammar, []), 0
        new_ids = list(output_ids[num_consumed:])
        if new_ids and not state.matcher.consume_tokens(new_ids):
            raise GrammarError(f"the output is not what its grammar allows: {_first_line(state.matcher.get_error())}")
        state.consumed += new_ids
        self._states[request_id] = state
        while len(self._states) > self._max_matchers:
            self._states.popitem(last=False)
        return state.matcher

    def _compiled(self, grammar: str) -> LLMatcher:
        """The matcher at its start, never advanced itself."""
        known = self._grammars.pop(grammar, None)
        if known is None:
            known = self._compile(grammar)
        self._grammars[grammar] = known
        while len(self._grammars) > MAX_GRAMMARS:
            self._grammars.popitem(last=False)
        return known

    def _compile(self, grammar: str) -> LLMatcher:
        tokenizer = self._llguidance_tokenizer()
        from llguidance import LLMatcher

        started_s = time.perf_counter()
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        duration_s = time.perf_counter() - started_s
        if duration_s > SLOW_GRAMMAR_S:
            log.warning("a grammar took %.0f ms to compile", duration_s * 1000)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be used: {_first_line(matcher.get_error())}")
        return matcher

    def _llguidance_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    from llguidance import LLTokenizer
                except ImportError:
                    raise GrammarError("structured output needs the package llguidance on the server") from None
                try:
                    text = self._read_tokenizer()
                    self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
                except Exception as error:  # llguidance raises several kinds for files it cannot use
                    raise GrammarError(f"this model's tokenizer cannot follow grammars: {error}") from None
            return self._tokenizer


def _first_line(text: str) -> str:
    """llguidance adds the state of its parser to an error, on further lines."""
    return text.strip().partition("\n")[0][:300]
