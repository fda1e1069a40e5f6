"""A runner that follows a script instead of computing, for the same loop, scheduler and cache as a model's.

Its pages hold the token ids themselves and its state rows a position and a checksum of all tokens before it. A prompt
is read back from the pages, so a reused prefix is seen through the cache as a model would see it; a row that does not
belong to its position, or does not agree with the pages, fails the step.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import Counter, OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from turnkeep.engine.example_arguments import example_arguments
from turnkeep.engine.script import Rule, Script, ScriptedCall
from turnkeep.engine.scripted_pools import ScriptedPoolContent
from turnkeep.engine.scripted_prompt import THINK, THINK_END, PromptReader, PromptView
from turnkeep.scheduler.step_plan import SampledToken, StepItem, StepOutput, StepPlan

REMEMBERED_ANSWERS = 8192


class CacheContentError(AssertionError):
    """A page or a state row does not hold what was computed for its position."""


class ScriptedCrash(BaseException):
    """The script lets the engine die. No Exception, so that the loop does not take it for a step that failed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request says. An answer that repeats has no end of its own."""

    token_ids: list[int]
    rule_number: int
    rule: Rule

    def token(self, index: int) -> int:
        return self.token_ids[index % len(self.token_ids)]


class AnswerWriter:
    """From a prompt to an answer, by the script. Deterministic: a forgotten answer is written again."""

    def __init__(self, script: Script, tokenizer_json: str, *, end_token_id: int, has_reasoning: bool) -> None:
        self._script = script
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._reader = PromptReader(self._tokenizer)
        self._end_token_id = end_token_id
        self._has_reasoning = has_reasoning
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def write(self, prompt_ids: npt.NDArray[np.int32]) -> Answer:
        view = self._reader.read(prompt_ids)
        number, rule = self._script.rule_for(view.role, view.text)
        if rule.token_ids is not None:
            ids = list(rule.token_ids)
        else:
            ids = self._tokenizer.encode(self._text(rule, view), add_special_tokens=False).ids
        if rule.finish == "stop" or not ids:
            ids = [*ids, self._end_token_id]
        return Answer(ids, number, rule)

    def _text(self, rule: Rule, view: PromptView) -> str:
        calls, content = rule.tool_calls, rule.answer
        if content is None and not calls:
            if view.tools and view.role == "user":
                calls = (ScriptedCall(),)
            else:
                content = view.text
        reasoning = ""
        if self._has_reasoning and (rule.reasoning or view.opens_reasoning):
            reasoning = f"{'' if view.opens_reasoning else THINK}{rule.reasoning or ''}{THINK_END}"
        return reasoning + (content or "") + "".join(_call_text(call, view) for call in calls)


def _call_text(call: ScriptedCall, view: PromptView) -> str:
    name = call.name or (view.tools[0].name if view.tools else "tool")
    arguments = call.arguments
    if arguments is None:
        schema = next((tool.parameters for tool in view.tools if tool.name == name), None)
        arguments = example_arguments(schema)
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {written}}}</tool_call>'


class ScriptedRunner:
    """`start_number`: how many engines the server had started before this one."""

    def __init__(
        self, writer: AnswerWriter, script: Script, *, num_pages: int, num_state_rows: int, page_size: int,
        vocab_size: int, start_number: int = 0,
    ) -> None:  # fmt: skip
        self._writer = writer
        self._step_s = script.step_ms / 1000
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._start_number = start_number
        self._pages = np.full((num_pages, page_size), -1, dtype=np.int32)
        self._rows: list[tuple[int, int]] = [(-1, 0)] * num_state_rows
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._num_faults: Counter[int] = Counter()

    def pool_content(self) -> ScriptedPoolContent:
        """What its pages and rows hold, for the colder tiers."""
        return ScriptedPoolContent(self._pages, self._rows)

    def run(self, plan: StepPlan) -> StepOutput:
        """Raises CacheContentError, and what the script says (a failed step, a crash)."""
        started_s = time.perf_counter()
        pages, rows = self._pages, self._rows
        for page_copy in plan.page_copies:
            pages[page_copy.target, : page_copy.num_tokens] = pages[page_copy.source, : page_copy.num_tokens]
        for row_copy in plan.row_copies:
            rows[row_copy.target] = rows[row_copy.source]
        tokens: dict[str, tuple[SampledToken, ...]] = {}
        errors: dict[str, str] = {}
        wait_s = self._step_s
        for item in plan.items:
            self._compute(item)
            if item.sampling is None:
                continue
            answer = self._answer(item)
            index = item.num_output_tokens
            rule = answer.rule
            wait_s = max(wait_s, (rule.delay_ms if index else rule.first_delay_ms) / 1000)
            if rule.fault is not None and self._fails(answer, index):
                errors[item.request_id] = "the script says that this request fails"
            else:
                tokens[item.request_id] = (self._sampled(answer.token(index), item.sampling.num_logprobs),)
        if wait_s > 0:
            time.sleep(max(wait_s - (time.perf_counter() - started_s), 0.0))
        return StepOutput(tokens=tokens, duration_s=time.perf_counter() - started_s, errors=errors)

    def _compute(self, item: StepItem) -> None:
        """Write the item's tokens into its pages and carry its row's checksum on, also into the exports."""
        ids, start = item.token_ids, item.start
        assert item.state_row is not None
        position, checksum = self._rows[item.state_row] if start else (0, 0)
        if position != start:
            raise CacheContentError(f"row {item.state_row} holds position {position}, {start} was to be continued")
        end = start + len(ids)
        if len(ids) == 1 and not item.exports:
            page_index, slot = divmod(start, self._page_size)
            self._pages[item.page_ids[page_index], slot] = ids[0]
            self._rows[item.state_row] = (end, zlib.crc32(ids[0].to_bytes(4, "little"), checksum))
            return
        self._check_pages(item, start, checksum)
        new = np.array(ids, dtype="<i4")
        positions = np.arange(start, end)
        self._pages[item.page_ids[positions // self._page_size], positions % self._page_size] = new
        done = 0
        for position, row in sorted((*item.exports, (end, item.state_row))):
            checksum = zlib.crc32(new[done : position - start].tobytes(), checksum)
            done = position - start
            self._rows[row] = (position, checksum)

    def _check_pages(self, item: StepItem, start: int, checksum: int) -> None:
        if start and zlib.crc32(self._read_pages(item, start).astype("<i4", copy=False).tobytes()) != checksum:
            raise CacheContentError(f"the pages of {start} tokens do not hold what state row {item.state_row} has seen")

    def _read_pages(self, item: StepItem, num_tokens: int) -> npt.NDArray[np.int32]:
        ids: npt.NDArray[np.int32] = self._pages[item.page_ids].reshape(-1)[:num_tokens]
        return ids

    def _answer(self, item: StepItem) -> Answer:
        answer = self._answers.get(item.request_id)
        if answer is None:
            num_prompt_tokens = item.start + len(item.token_ids) - item.num_output_tokens
            answer = self._writer.write(self._read_pages(item, num_prompt_tokens))
            self._answers[item.request_id] = answer
            if len(self._answers) > REMEMBERED_ANSWERS:
                self._answers.popitem(last=False)
        return answer

    def _fails(self, answer: Answer, index: int) -> bool:
        """Whether this request fails now. Raises where more than the request does."""
        fault = answer.rule.fault
        if fault is None or index != fault.after_tokens:
            return False
        num_before = self._start_number if fault.kind == "crash" else self._num_faults[answer.rule_number]
        if fault.times and num_before >= fault.times:
            return False
        self._num_faults[answer.rule_number] += 1
        if fault.kind == "crash":
            raise ScriptedCrash("the script says that the engine dies here")
        if fault.kind == "step":
            raise RuntimeError("the script says that this step fails")
        return True

    def _sampled(self, token_id: int, num_logprobs: int | None) -> SampledToken:
        if num_logprobs is None:
            return SampledToken(token_id)
        others = [(token_id + distance) % self._vocab_size for distance in range(1, num_logprobs)]
        top = [(token_id, -0.01), *((other, -5.0 - rank) for rank, other in enumerate(others))]
        return SampledToken(token_id, -0.01, tuple(top[:num_logprobs]))
