"""From the token ids of one choice to its deltas: detokenize, parse reasoning and tool calls, look for stop strings.

Stop strings end the content that a client reads; in reasoning, markup and the arguments of calls they mean nothing.
Works token by token, so that the result does not depend on how the engine's events were merged. No engine, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from turnkeep.engine.messages import TokenLogprobs
from turnkeep.server.chat_answers import CollectedChoice
from turnkeep.server.parsers import AnswerParser, Delta, PlainParser, StopStrings
from turnkeep.server.stable_position import UNSURE_TOKENS
from turnkeep.server.text_model import Prompt, TextModel
from turnkeep.server.tokenizer import Detokenizer
from turnkeep.server.turn_events import EndReason, TokenLogprob, ToolCallDelta, TurnDelta
from turnkeep.server.turn_request import TurnRequest


class AnswerText:
    """The text of one choice. `output_ids` are all tokens of the engine, also those after a stop string."""

    def __init__(
        self, text_model: TextModel, request: TurnRequest, prompt: Prompt, stop_token_ids: Iterable[int], index: int
    ) -> None:
        self.output_ids: list[int] = []
        self.num_output_tokens = 0  # without what came after a stop string: the usage
        self.num_reasoning_tokens = 0
        self.collected = CollectedChoice()
        self._text_model = text_model
        self._index = index
        self._stop_token_ids = frozenset(stop_token_ids)
        self._parallel_tool_calls = request.parallel_tool_calls
        self._detokenizer = Detokenizer(text_model.tokenizer, text_model.hidden_ids)
        self._stop_strings = StopStrings(request.stop_strings)
        self._parser: AnswerParser | PlainParser = PlainParser()
        if prompt.is_chat:
            self._parser = text_model.format.new_parser(
                prompt.encoded.text,
                tool_names=request.tool_names,
                tools=request.tools or (),
                hides_calls=request.hides_calls,
            )
        self._has_too_many_calls = False
        self._num_calls = 0
        self._num_shown_tokens = 0  # as of the last text that did not end the answer

    @property
    def is_stopped(self) -> bool:
        """The answer is complete although the engine does not know it yet: it must be told to stop."""
        return self._stop_strings.stopped or self._has_too_many_calls

    @property
    def num_repeated_tokens(self) -> int:
        """How many of the tokens come, for certain, before what stopped the answer: a next prompt has them, too."""
        return max(self._num_shown_tokens - UNSURE_TOKENS, 0)

    @property
    def num_unsent_tokens(self) -> int:
        """How many of the last tokens come, perhaps, after what stopped the answer."""
        return len(self.output_ids) - self.num_repeated_tokens if self.is_stopped else 0

    @property
    def has_calls(self) -> bool:
        """A tool call was delivered."""
        return self._num_calls > 0

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stop_strings.matched

    def push(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> list[TurnDelta]:
        """The deltas of some new tokens; usually one, none when nothing can be shown yet."""
        if len(token_ids) == 1 and logprobs is None and not self.is_stopped:
            return self._push_one(token_ids[0])
        deltas: list[TurnDelta] = []
        for position, token_id in enumerate(token_ids):
            self.output_ids.append(token_id)
            if self.is_stopped:
                continue
            self.num_output_tokens += 1
            is_end = token_id in self._stop_token_ids
            text = "" if is_end else self._detokenizer.push((token_id,))
            parsed = self._until_stop(self._parser.push(text)) if text else []
            if any(one.kind == "reasoning" for one in parsed):
                self.num_reasoning_tokens += 1
            delta = self._merge(deltas, parsed)
            delta.token_ids.append(token_id)
            self._count_shown(parsed)
            if logprobs is not None and not is_end:
                delta.logprobs.append(self._token_logprob(token_id, logprobs[position]))
        return self._collect(deltas)

    def _push_one(self, token_id: int) -> list[TurnDelta]:
        """As push(), for what almost every event is: one token, without logprobs."""
        self.output_ids.append(token_id)
        self.num_output_tokens += 1
        text = "" if token_id in self._stop_token_ids else self._detokenizer.push_one(token_id)
        parsed = self._until_stop(self._parser.push(text)) if text else []
        kind = parsed[0].kind if len(parsed) == 1 else None
        if kind == "content":
            delta = TurnDelta(self._index, content=parsed[0].text, token_ids=[token_id])
        elif kind == "reasoning":
            self.num_reasoning_tokens += 1
            delta = TurnDelta(self._index, reasoning=parsed[0].text, token_ids=[token_id])
        else:
            self.num_reasoning_tokens += any(one.kind == "reasoning" for one in parsed)
            deltas: list[TurnDelta] = []
            self._merge(deltas, parsed).token_ids.append(token_id)
            self._count_shown(parsed)
            return self._collect(deltas)
        self._count_shown(parsed)
        self.collected.add(delta)
        return [delta]

    def finish(self, reason: str) -> list[TurnDelta]:
        """The rest that was held back. `reason` is the engine's."""
        deltas: list[TurnDelta] = []
        rest = "" if self.is_stopped else self._detokenizer.flush()
        parsed = self._parser.push(rest) if rest else []
        parsed += self._parser.finish("stop" if self.is_stopped else reason)
        self._merge(deltas, self._until_stop(parsed))
        if held := self._stop_strings.flush():
            self._merge(deltas, [Delta("content", held)])
        return self._collect(deltas)

    def _until_stop(self, parsed: list[Delta]) -> list[Delta]:
        """What may be shown of the parser's deltas: content up to a stop string, and nothing behind it."""
        if not self._stop_strings.is_active:
            return parsed
        shown: list[Delta] = []
        for one in parsed:
            if self._stop_strings.stopped:
                break
            if one.kind == "content":
                text = self._stop_strings.push(one.text)
            else:
                text = self._stop_strings.flush()  # a stop string does not go on behind a call
            if text:
                shown.append(Delta("content", text))
            if one.kind != "content":
                shown.append(one)
        return shown

    def _count_shown(self, parsed: list[Delta]) -> None:
        if parsed and not self.is_stopped:
            self._num_shown_tokens = self.num_output_tokens

    @property
    def end_reason(self) -> EndReason:
        """As the client sees it; valid after finish()."""
        if self._stop_strings.stopped:
            return "tool_calls" if self._num_calls else "stop"
        return cast(EndReason, self._parser.finish_reason)

    def _merge(self, deltas: list[TurnDelta], parsed: list[Delta]) -> TurnDelta:
        """Add to the last delta where the order of the kinds allows it: reasoning, content, tool calls."""
        if not deltas:
            deltas.append(TurnDelta(self._index))
        for one in parsed:
            last = deltas[-1]
            if one.kind == "reasoning":
                if last.content or last.tool_calls:
                    deltas.append(last := TurnDelta(self._index))
                last.reasoning += one.text
            elif one.kind == "content":
                if last.tool_calls:
                    deltas.append(last := TurnDelta(self._index))
                last.content += one.text
            elif one.index > 0 and not self._parallel_tool_calls:
                self._has_too_many_calls = True
            elif one.kind == "tool_call":
                self._num_calls += 1
                call_id = one.call_id or self._text_model.format.new_call_id()
                last.tool_calls.append(ToolCallDelta(one.index, id=call_id, name=one.text))
            else:
                last.tool_calls.append(ToolCallDelta(one.index, arguments=one.text))
        return deltas[-1]

    def _collect(self, deltas: list[TurnDelta]) -> list[TurnDelta]:
        shown = [delta for delta in deltas if not delta.is_empty]
        for delta in shown:
            self.collected.add(delta)
        return shown

    def _token_logprob(self, token_id: int, logprobs: TokenLogprobs) -> TokenLogprob:
        texts = self._text_model
        top = tuple(texts.token_text(other, logprob) for other, logprob in logprobs.top)
        return TokenLogprob(texts.token_text(token_id, logprobs.logprob), top)
