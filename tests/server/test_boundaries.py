"""Boundaries never lie beyond what the next prompt really repeats, and give up little of it."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import replace
from typing import Any

import pytest
from text_fixtures import NOW, TEMPLATE_NAMES, TOOLS, RandomConversation, TextCase, common_prefix, text_case

from turnkeep.server.boundaries import BoundaryFinder
from turnkeep.server.chat_messages import normalize_messages
from turnkeep.server.chat_template import ChatTemplate, TemplateError
from turnkeep.server.prompts import EncodedPrompt, PromptEncoder

NUM_HISTORIES = int(os.environ.get("TURNKEEP_BOUNDARY_HISTORIES", "12"))
FIRST_SEED = int(os.environ.get("TURNKEEP_BOUNDARY_SEED", "1000"))
NUM_CONTINUATIONS = 6
MAX_SLACK = 16
MAX_SLACK_WITHOUT_DELIMITERS = 24


class Bench:
    """One template with its encoder and finder, and prompts as a later request would give them."""

    def __init__(self, case: TextCase) -> None:
        self.case = case
        self.encoder = PromptEncoder(case.template, case.tokenizer)
        self.finder = BoundaryFinder(case.template, case.tokenizer, encoder=self.encoder)
        self.max_slack = MAX_SLACK if case.has_delimiters else MAX_SLACK_WITHOUT_DELIMITERS

    def prompt(self, messages: list[dict[str, Any]], tools: Any) -> EncodedPrompt:
        return self.encoder.encode(messages, tools=tools, now=NOW)

    def fresh_ids(self, messages: list[dict[str, Any]], tools: Any) -> list[int]:
        """Tokens of a prompt, by an encoder that remembers nothing."""
        return PromptEncoder(self.case.template, self.case.tokenizer).encode(messages, tools=tools, now=NOW).token_ids

    def positions(self, messages: list[dict[str, Any]], tools: Any, prompt: EncodedPrompt) -> dict[str, int]:
        found = self.finder.prompt_boundaries(messages, tools, None, prompt.token_ids, prompt=prompt, now=NOW)
        assert [b.position for b in found] == sorted({b.position for b in found})
        assert all(0 < boundary.position < len(prompt.token_ids) for boundary in found)
        return {boundary.kind: boundary.position for boundary in found}


def continuations(source: RandomConversation) -> list[list[dict[str, Any]]]:
    """Answers with what follows them: at least a closed turn, and a tool result where there are tools."""
    result = [[source.answer(calls=False), source.user()]]
    if source.takes_tools:
        call = source.answer(calls=True)
        result.append([call, *source.results(call)])
        result.append([call, *source.results(call), source.answer(calls=False), source.user()])
    while len(result) < NUM_CONTINUATIONS:
        result.append([*source.turn()[1:], source.user()])
    return result


def cases(name: str) -> list[tuple[RandomConversation, list[dict[str, Any]], Any, bool]]:
    result = []
    for number in range(NUM_HISTORIES):
        takes_tools = text_case(name).takes_tools
        source = RandomConversation(FIRST_SEED + number, takes_tools=takes_tools)
        in_loop = takes_tools and number % 3 == 2
        tools = TOOLS if takes_tools and number % 2 else None
        result.append((source, source.history(source.choice.randint(0, 4), in_loop=in_loop), tools, in_loop))
    return result


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_turn_start_lies_within_every_next_prompt_and_near_its_end(name: str) -> None:
    bench = Bench(text_case(name))
    for source, messages, tools, in_loop in cases(name):
        prompt = bench.prompt(messages, tools)
        position = bench.positions(messages, tools, prompt).get("turn_start", 0)
        last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
        base = messages[: last_user + 1]
        shared = []
        for after in continuations(source):
            # The turn goes on; or its answer is thrown away and made again.
            for next_messages in ([*messages, *after], [*base, *after]):
                shared.append(common_prefix(prompt.token_ids, bench.fresh_ids(next_messages, tools)))
        assert position <= min(shared)
        if not in_loop:
            assert min(shared) - position <= bench.max_slack, (position, shared)


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_turn_start_stays_where_it_is_during_a_tool_loop(name: str) -> None:
    bench = Bench(text_case(name))
    if not bench.case.takes_tools:
        return
    for seed in range(20):
        source = RandomConversation(seed)
        messages = source.history(2)
        first = bench.positions(messages, TOOLS, bench.prompt(messages, TOOLS))["turn_start"]
        for _ in range(3):
            call = source.answer(calls=True)
            messages = [*messages, call, *source.results(call)]
            prompt = bench.prompt(messages, TOOLS)
            remembered = bench.positions(messages, TOOLS, prompt)["turn_start"]
            forgotten = Bench(bench.case).positions(messages, TOOLS, prompt)["turn_start"]
            assert remembered in (first, first + 1)  # the first prompt may end with the delimiter itself
            assert abs(forgotten - remembered) <= 1


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_trunk_lies_within_other_conversations_that_begin_alike(name: str) -> None:
    bench = Bench(text_case(name))
    num_found = 0
    for source, messages, tools, _ in cases(name):
        prompt = bench.prompt(messages, tools)
        position = bench.positions(messages, tools, prompt).get("trunk")
        leading = [message for message in messages[:1] if message["role"] == "system"]
        if position is None:
            continue
        num_found += 1
        shared = []
        for _ in range(NUM_CONTINUATIONS):
            others = [*leading, *source.history(source.choice.randint(0, 2))]
            others = leading + [message for message in others if message["role"] != "system"]
            shared.append(common_prefix(prompt.token_ids, bench.fresh_ids(others, tools)))
        assert position <= min(shared)
        if bench.case.has_delimiters and len(leading) > 0 and len(messages) > 2:
            system_tokens = len(bench.case.tokenizer.encode(leading[0]["content"].strip(), allow_special=False))
            if name not in ("tools_last", "plain_text"):  # these print system text late, or without an end
                assert position >= system_tokens
    assert num_found or name in ("tools_last", "plain_text")


def generated_ids(bench: Bench, prompt: EncodedPrompt, messages: list[dict[str, Any]], tools: Any) -> list[int] | None:
    """What an agent that writes as the template prints would have sampled to give the last message."""
    guarded = bench.encoder.guard(messages, tools, mark=prompt.guarded.guard, avoid=prompt.text)
    setting = replace(prompt.setting, add_generation_prompt=False)
    text = bench.encoder.render(guarded.messages, setting)
    if not text.startswith(prompt.text):
        return None
    ids = bench.encoder.encode_after([], text, guarded, setting).token_ids
    return ids if common_prefix(ids, prompt.token_ids) == len(prompt.token_ids) else None


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_turn_end_is_what_the_asked_for_continuation_repeats(name: str) -> None:
    bench = Bench(text_case(name))
    num_compared = num_kept = 0
    for source, messages, tools, _ in cases(name):
        for calls in (False, True) if bench.case.takes_tools else (False,):
            prompt = bench.prompt(messages, tools)
            answer = source.answer(calls=calls)
            engine_ids = generated_ids(bench, prompt, [*messages, answer], tools)
            if engine_ids is None:
                continue
            stable = bench.finder.turn_end(
                messages, answer, tools, None, engine_ids, prompt=prompt, now=NOW
            ).stable_tokens
            shared = []
            for _ in range(NUM_CONTINUATIONS):
                after = source.results(answer) if calls else [source.user()]
                shared.append(common_prefix(engine_ids, bench.fresh_ids([*messages, answer, *after], tools)))
            assert stable <= min(shared)
            assert min(shared) - stable <= bench.max_slack, (stable, shared)
            num_compared += 1
            num_kept += stable >= len(engine_ids) - 2  # up to the end token, perhaps without it and a line break
    assert num_compared >= NUM_HISTORIES // 4  # the others begin otherwise than the generation prompt
    if name in ("chatml", "smollm2"):
        assert num_kept == num_compared


def test_an_append_only_template_keeps_the_whole_answer_and_a_stripping_one_falls_back_to_turn_start() -> None:
    bench = Bench(text_case("demo"))
    tokenizer = bench.case.tokenizer
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Hello"}]
    prompt = bench.prompt(messages, TOOLS)
    start = bench.positions(messages, TOOLS, prompt)["turn_start"]
    assert start == len(prompt.token_ids) - 1

    call = {"name": "find_order", "arguments": '{"order": "7"}'}
    calling = {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [{"function": call}]}
    text = '<think>look</think><tool_call>{"name": "find_order", "arguments": {"order": "7"}}</tool_call><|end|>'
    engine_ids = prompt.token_ids + tokenizer.encode(text)
    assert bench.finder.turn_end(messages, calling, TOOLS, None, engine_ids, prompt=prompt).stable_tokens == len(
        engine_ids
    )

    answering = {"role": "assistant", "content": "Done.", "reasoning_content": "think"}
    engine_ids = prompt.token_ids + tokenizer.encode("<think>think</think>Done.<|end|>")
    assert bench.finder.turn_end(messages, answering, TOOLS, None, engine_ids, prompt=prompt).stable_tokens == len(
        prompt.token_ids
    )
    keeping = {"keep_thinking": True}
    kept = bench.encoder.encode(messages, tools=TOOLS, template_kwargs=keeping)
    assert bench.finder.turn_end(messages, answering, TOOLS, keeping, engine_ids, prompt=kept).stable_tokens == len(
        engine_ids
    )


def test_a_loop_whose_calls_come_back_without_reasoning_resumes_behind_the_newest_tool_result() -> None:
    bench = Bench(text_case("demo"))
    source = RandomConversation(7)
    messages = source.history(1)
    for _ in range(12):  # long enough to be probed through a short stand-in
        call = source.answer(calls=True)
        call.pop("reasoning_content", None)
        messages = [*messages, call, *source.results(call)]
        prompt = bench.prompt(messages, TOOLS)
        found = bench.finder.prompt_boundaries(messages, TOOLS, None, prompt.token_ids, prompt=prompt)
        assert [boundary.kind for boundary in found][-2:] == ["turn_start", "turn_end"]
        shared = []
        for calls in (True, True, True):
            after = source.answer(calls=calls)
            shared.append(
                common_prefix(prompt.token_ids, bench.fresh_ids([*messages, after, *source.results(after)], TOOLS))
            )
        assert found[-1].position <= min(shared) <= found[-1].position + 2


def test_a_loop_whose_calls_come_back_as_generated_needs_no_boundary_behind_tool_results() -> None:
    bench = Bench(text_case("demo"))
    source = RandomConversation(7)
    messages = [source.user()]
    for _ in range(3):
        call = {**source.answer(calls=True), "reasoning_content": "look"}
        messages = [*messages, call, *source.results(call)]
        prompt = bench.prompt(messages, TOOLS)
        assert "turn_end" not in bench.positions(messages, TOOLS, prompt)


def test_a_template_that_prints_calls_otherwise_than_generated_is_noticed_at_the_first_one() -> None:
    bench = Bench(text_case("chatml"))
    messages = [{"role": "user", "content": "Go"}]
    prompt = bench.prompt(messages, TOOLS)
    function = {"name": "find_order", "arguments": '{"order":"7"}'}
    answer = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
    # Generated without the blanks that the template prints.
    text = '\n<tool_call>\n{"name":"find_order","arguments":{"order":"7"}}\n</tool_call><|im_end|>'
    engine_ids = prompt.token_ids + bench.case.tokenizer.encode(text)
    assert (
        bench.finder.turn_end(messages, answer, TOOLS, None, engine_ids, prompt=prompt).stable_tokens
        < len(engine_ids) - 1
    )
    looped = normalize_messages([*messages, answer, {"role": "tool", "content": "found", "tool_call_id": "c"}])
    assert "turn_end" in bench.positions(looped, TOOLS, bench.prompt(looped, TOOLS))


def test_an_answer_cut_by_the_length_limit_is_kept_where_the_text_tokenizes_alike() -> None:
    bench = Bench(text_case("chatml"))
    messages = [{"role": "user", "content": "Hello"}]
    prompt = bench.prompt(messages, None)
    engine_ids = prompt.token_ids + bench.case.tokenizer.encode("the order of blue")
    answer = {"role": "assistant", "content": "the order of blue"}
    assert bench.finder.turn_end(messages, answer, None, None, engine_ids, prompt=prompt).stable_tokens == len(
        engine_ids
    )


def test_text_that_spells_control_tokens_does_not_break_boundaries() -> None:
    bench = Bench(text_case("chatml"))
    messages = [{"role": "user", "content": "say <|im_end|> twice"}]
    prompt = bench.prompt(messages, None)
    assert "turn_start" in bench.positions(messages, None, prompt)
    said = bench.case.tokenizer.encode("<|im_end|> and ", allow_special=False)
    rest = bench.case.tokenizer.encode("<|im_end|>", allow_special=False)
    answer = {"role": "assistant", "content": "<|im_end|> and <|im_end|>"}
    engine_ids = prompt.token_ids + bench.case.tokenizer.encode(answer["content"], allow_special=False)
    assert len(said) + len(rest) > 4
    assert bench.finder.turn_end(messages, answer, None, None, engine_ids, prompt=prompt).stable_tokens == len(
        engine_ids
    )


def test_a_template_that_refuses_every_continuation_gives_no_boundaries_and_counts_it() -> None:
    tokenizer = text_case("chatml").tokenizer
    template = ChatTemplate("{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}<|im_start|>A")
    finder = BoundaryFinder(template, tokenizer)
    messages = [{"role": "user", "content": "x"}]
    ids = PromptEncoder(template, tokenizer).encode(messages).token_ids
    assert finder.prompt_boundaries(messages, None, None, ids) == ()
    assert finder.turn_end(messages, {"role": "assistant", "content": "y"}, None, None, ids).stable_tokens == 0
    assert finder.num_failures == 2


def test_a_template_that_looks_at_dropped_messages_is_probed_in_full() -> None:
    """Every message count changes the end of the prompt: no short conversation behaves like the long one."""
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if messages|length > 12 %}{{ messages|length }}{% endif %}<|im_start|>assistant"
    )
    tokenizer = text_case("chatml").tokenizer
    encoder = PromptEncoder(ChatTemplate(source), tokenizer)
    finder = BoundaryFinder(encoder.template, tokenizer, encoder=encoder)
    messages = [{"role": role, "content": "hello"} for _ in range(9) for role in ("user", "assistant")]
    messages.append({"role": "user", "content": "last"})
    prompt = encoder.encode(messages)
    positions = [b.position for b in finder.prompt_boundaries(messages, None, None, prompt.token_ids, prompt=prompt)]
    after = encoder.encode([*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}])
    assert positions
    assert max(positions) <= common_prefix(prompt.token_ids, after.token_ids)


def test_long_histories_cost_little_more_than_rendering_them() -> None:
    """Probing a conversation of 100 messages takes less time than rendering and encoding it once."""
    case = text_case("demo")
    messages = RandomConversation(3).history(0)
    source = RandomConversation(4)
    while len(messages) < 100:
        messages += source.turn()
    messages.append(source.user())
    bench = Bench(case)
    prompt = bench.prompt(messages, TOOLS)
    answer = {"role": "assistant", "content": "Fine."}
    engine_ids = prompt.token_ids + case.tokenizer.encode("Fine.<|end|>")

    def seconds(action: Any) -> float:
        times = []
        for _ in range(15):
            start = time.thread_time()
            action()
            times.append(time.thread_time() - start)
        return statistics.median(times)

    plain = seconds(lambda: PromptEncoder(case.template, case.tokenizer).encode(messages, tools=TOOLS))
    for _ in range(3):
        bench.positions(messages, TOOLS, prompt)
    probing = seconds(lambda: bench.positions(messages, TOOLS, prompt))
    ending = seconds(lambda: bench.finder.turn_end(messages, answer, TOOLS, None, engine_ids, prompt=prompt))
    assert probing < plain
    assert ending < plain


def test_messages_a_template_refuses_are_an_error_of_the_request() -> None:
    bench = Bench(text_case("demo"))
    with pytest.raises(TemplateError):
        bench.encoder.encode([{"role": "narrator", "content": "x"}])
