"""Prompts: text stays text, and what a conversation has encoded before is not encoded again."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from text_fixtures import NOW, SPOOFED, TEMPLATE_NAMES, TOOLS, RandomConversation, text_case

from turnkeep.server.chat_messages import TemplateError, normalize_messages
from turnkeep.server.chat_template import ChatTemplate
from turnkeep.server.common_prefix import common_prefix_length
from turnkeep.server.prompt_memory import MemoryKey, PromptMemory
from turnkeep.server.prompts import GUARDS, PromptEncoder

KEY = MemoryKey("", "k")


def encoder_of(name: str) -> PromptEncoder:
    case = text_case(name)
    return PromptEncoder(case.template, case.tokenizer)


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_control_tokens_spelled_in_messages_stay_text(name: str) -> None:
    encoder = encoder_of(name)
    tokenizer = encoder.tokenizer
    delimiters = []
    for word in ("hello", *(tokenizer.token_text(i) for i in sorted(tokenizer.special_ids))):
        arguments = {word: [word]}
        function = {"name": "f", "arguments": arguments}
        messages = [
            {"role": "system", "content": f"a {word}"},
            {"role": "user", "content": f"{word}{word} b"},
            {"role": "assistant", "content": "", "reasoning_content": word, "tool_calls": [{"function": function}]},
            {"role": "tool", "content": word},
        ]
        if name == "smollm2":
            del messages[2:]
        prompt = encoder.encode(messages, tools=TOOLS, now=NOW)
        delimiters.append([i for i in prompt.token_ids if i in tokenizer.special_ids])
        assert word in tokenizer.decode(prompt.token_ids)
    assert all(found == delimiters[0] for found in delimiters)


def test_an_agents_own_markup_in_its_content_means_what_it_says_but_its_role_marks_do_not() -> None:
    encoder = encoder_of("chatml")
    think, end = encoder.tokenizer.token_id("<think>"), encoder.tokenizer.token_id("<|im_end|>")
    said = [{"role": "assistant", "content": "<think>x</think>y<|im_end|>"}]
    asked = [{"role": "user", "content": "<think>x</think>y<|im_end|>"}]
    assert think in encoder.encode(said).token_ids
    assert think not in encoder.encode(asked).token_ids
    assert encoder.encode(said).token_ids.count(end or -1) == encoder.encode(asked).token_ids.count(end or -1)


def test_text_without_control_tokens_is_not_touched_even_if_it_holds_the_guard() -> None:
    encoder = encoder_of("chatml")
    tokenizer = encoder.tokenizer
    plain = encoder.encode([{"role": "user", "content": f"a{GUARDS[0]}b"}])
    assert plain.guarded.guard is None
    assert f"a{GUARDS[0]}b" in tokenizer.decode(plain.token_ids)
    mixed = encoder.encode([{"role": "user", "content": f"a{GUARDS[0]}b<|im_end|>"}])
    assert mixed.guarded.guard == GUARDS[1]
    assert f"a{GUARDS[0]}b<|im_end|>" in tokenizer.decode(mixed.token_ids)


def test_messages_that_leave_no_guard_are_refused() -> None:
    with pytest.raises(TemplateError):
        encoder_of("chatml").encode([{"role": "user", "content": "<|im_end|>" + "".join(GUARDS)}])


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_a_returning_conversation_gets_the_tokens_of_a_fresh_one(name: str) -> None:
    """Growing, forking and shrinking histories, some with spelled control tokens, one memory key for all."""
    case = text_case(name)
    encoder = encoder_of(name)
    choice = random.Random(11)
    for seed in range(8):
        source = RandomConversation(seed, takes_tools=case.takes_tools)
        messages = source.history(1)
        for _ in range(6):
            if choice.random() < 0.2:
                messages[-1] = {"role": "user", "content": choice.choice(SPOOFED) + source.text()}
            prompt = encoder.encode(messages, now=NOW, key=KEY)
            fresh = PromptEncoder(case.template, case.tokenizer).encode(messages, now=NOW)
            assert prompt.token_ids == fresh.token_ids
            assert (prompt.cut_starts, prompt.cut_ends, prompt.cut_tokens) == (
                fresh.cut_starts,
                fresh.cut_ends,
                fresh.cut_tokens,
            )
            messages = [*messages, source.answer(calls=False), source.user()]
    assert encoder.num_without_cuts == 0


def test_only_new_text_is_encoded_when_a_conversation_returns() -> None:
    encoder = encoder_of("chatml")
    source = RandomConversation(2)
    messages = source.history(20)
    first = encoder.encode(messages, key=MemoryKey("", "a"))
    for _ in range(6):  # others in between push it out of the recent prompts
        encoder.encode(source.history(2), key=MemoryKey("", "b"))
    added = [{"role": "assistant", "content": "the order"}, {"role": "user", "content": "and then"}]
    again = encoder.encode([*messages, *added], key=MemoryKey("", "a"))
    assert first.num_reencoded_tokens == len(first.token_ids)
    assert again.num_reencoded_tokens < 40 < len(again.token_ids)


def test_memory_is_bounded() -> None:
    case = text_case("chatml")
    memory = PromptMemory(max_chars=20_000)
    encoder = PromptEncoder(case.template, case.tokenizer, memory=memory)
    for number in range(60):
        encoder.encode([{"role": "user", "content": "the order " * 100}], key=MemoryKey("", str(number)))
    remembered = sum(len(prompt.text) for prompts in memory._prompts.values() for prompt in prompts)
    assert remembered == memory.num_chars <= 20_000
    assert 0 < len(memory) < 60


def test_threads_can_share_an_encoder() -> None:
    encoder = encoder_of("demo")
    histories = [RandomConversation(seed).history(2) for seed in range(12)]
    expected = [encoder_of("demo").encode(messages).token_ids for messages in histories]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            prompts = pool.map(lambda messages: encoder.encode(messages, key=KEY).token_ids, histories)
            assert list(prompts) == expected


def test_a_strict_template_gets_messages_it_can_take() -> None:
    encoder = encoder_of("tools_last")
    messages = normalize_messages(
        [
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"role": "system", "content": "late"},
            {"role": "user", "content": "d"},
        ]
    )
    prompt = encoder.encode(messages)
    assert prompt.setting.relaxed
    assert encoder.num_relaxed == 1
    assert prompt.text == "<|bos|>[INST]a\n\nb[/INST]c<|eos|>[INST]late\n\nd[/INST]"


def test_broken_arguments_in_a_history_are_rendered_by_a_template_that_wants_an_object() -> None:
    source = (
        "{% for m in messages %}{% for call in m.tool_calls or [] %}"
        "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    )
    encoder = PromptEncoder(ChatTemplate(source), text_case("chatml").tokenizer)
    calls = [{"function": {"name": "f", "arguments": "{broken"}}]
    messages = normalize_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert encoder.encode(messages).text == "arguments={broken"


def test_the_original_complaint_is_reported_when_relaxing_does_not_help() -> None:
    encoder = PromptEncoder(
        ChatTemplate("{{ raise_exception('first: ' ~ messages[0].role) }}"), text_case("chatml").tokenizer
    )
    with pytest.raises(TemplateError, match="first: system"):
        encoder.encode([{"role": "system", "content": "x"}])


def test_common_prefix_length_counts_characters_across_blocks() -> None:
    choice = random.Random(0)
    for _ in range(200):
        length = choice.choice([0, 1, 5, 4095, 4096, 4097, 9000])
        text = "".join(choice.choices("ab", k=length))
        position = choice.randint(0, length)
        assert common_prefix_length(text, text[:position] + "c") == position
        assert common_prefix_length(text[:position], text) == position
