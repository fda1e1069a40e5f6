"""Exact ids: a prompt that repeats the text of an answer gets the ids that were sampled, and no other prompt does."""

from __future__ import annotations

import random
from typing import Any

import pytest
from live_server import END_TOKEN_ID, LiveServer, live_server, user
from scripted_engine import Script
from text_fixtures import NOW, TEMPLATE_NAMES, RandomConversation, common_prefix, text_case

from turnkeep.server.chat_messages import normalize_messages
from turnkeep.server.prompt_memory import MemoryKey, memory_key
from turnkeep.server.prompts import PromptEncoder
from turnkeep.server.text_model import TextModel
from turnkeep.server.tokenizer import Tokenizer

KEY = MemoryKey("", "c")


def otherwise(tokenizer: Tokenizer, text: str, choice: random.Random) -> list[int]:
    """Ids that stand for a text and are not the ones that encoding it gives, where there is a way."""
    ids = []
    start = 0
    while start < len(text):
        end = min(len(text), start + choice.randint(1, 3))
        delimiter = tokenizer.delimiter_pattern.search(text, start)
        if delimiter is not None and delimiter.start() <= end:
            ids += tokenizer.encode(text[start : delimiter.start()]) if delimiter.start() > start else []
            ids.append(tokenizer.delimiter_id(delimiter[0]))
            start = delimiter.end()
            continue
        ids += tokenizer.encode(text[start:end])
        start = end
    return ids


def end_of_answer(encoder: PromptEncoder, asked: str, following: str) -> str:
    """What a template prints for an answer, up to the delimiter that closes it."""
    assert following.startswith(asked)
    matches = [*encoder.tokenizer.delimiter_pattern.finditer(following, len(asked))]
    return following[len(asked) : matches[0].end()] if matches else ""


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_a_repeated_answer_gets_its_sampled_ids_and_reads_the_same(name: str) -> None:
    """TPL-12: the text is that of a fresh rendering, the ids are those that the engine holds."""
    case = text_case(name)
    choice = random.Random(7)
    num_spliced = num_different = 0
    for seed in range(12):
        source = RandomConversation(seed, takes_tools=case.takes_tools)
        encoder = PromptEncoder(case.template, case.tokenizer)
        messages = normalize_messages(source.history(1))
        asked = encoder.encode(messages, now=NOW, key=KEY)
        answer = [{"role": "assistant", "content": "word and Anna's 12 boxes"}, *user("and then")]
        following = [*messages, *answer]
        fresh = PromptEncoder(case.template, case.tokenizer).encode(following, now=NOW)
        if not fresh.text.startswith(asked.text):
            continue  # a template that takes the end of its own prompt back
        output = otherwise(case.tokenizer, end_of_answer(encoder, asked.text, fresh.text), choice)
        if not output or case.tokenizer.decode(output) != end_of_answer(encoder, asked.text, fresh.text):
            continue
        held = encoder.hold(asked, output, KEY)
        prompt = encoder.encode(following, now=NOW, key=KEY)
        assert prompt.text == fresh.text
        if held is None or not prompt.num_spliced_tokens:
            continue
        num_spliced += 1
        num_different += prompt.token_ids != fresh.token_ids
        assert prompt.token_ids[: len(held.token_ids)] == held.token_ids
        assert prompt.num_spliced_tokens == len(output)
        assert case.tokenizer.decode(prompt.token_ids) == case.tokenizer.decode(fresh.token_ids)
        assert [prompt.token_ids[position - 1] for position in prompt.cut_tokens] == [
            fresh.token_ids[position - 1] for position in fresh.cut_tokens
        ]
    if name in ("chatml", "demo", "smollm2"):
        assert num_spliced == num_different > 5


def held_turn(encoder: PromptEncoder, content: str = "the order is late") -> tuple[list[dict[str, Any]], list[int]]:
    """A turn whose answer was sampled letter by letter: its messages and the ids that the engine holds."""
    asked = user("How are you?")
    prompt = encoder.encode(asked, key=KEY)
    output = [token for letter in content for token in encoder.tokenizer.encode(letter)]
    output.append(encoder.tokenizer.token_id("<|im_end|>") or 0)
    assert encoder.hold(prompt, output, KEY) is not None
    return [*asked, {"role": "assistant", "content": content}], [*prompt.token_ids, *output]


def chatml_encoder() -> PromptEncoder:
    case = text_case("chatml")
    return PromptEncoder(case.template, case.tokenizer)


def test_a_changed_answer_is_encoded_anew_and_counted() -> None:
    encoder = chatml_encoder()
    messages, held_ids = held_turn(encoder)
    changed = [messages[0], {"role": "assistant", "content": "the order is lost"}, *user("why?")]
    prompt = encoder.encode(changed, key=KEY)
    assert prompt.token_ids == chatml_encoder().encode(changed).token_ids
    assert prompt.num_spliced_tokens == 0
    assert (encoder.splices.num_spliced, encoder.splices.num_changed) == (0, 1)
    again = encoder.encode([*messages, *user("why?")], key=KEY)
    assert again.token_ids[: len(held_ids)] == held_ids
    assert (encoder.splices.num_spliced, encoder.splices.num_changed) == (1, 1)


def test_the_same_prompt_again_is_no_changed_answer() -> None:
    encoder = chatml_encoder()
    messages, _ = held_turn(encoder)
    encoder.encode(messages[:1], key=KEY)
    assert (encoder.splices.num_spliced, encoder.splices.num_changed) == (0, 0)


def test_ids_stay_exact_over_many_turns() -> None:
    encoder = chatml_encoder()
    messages, held_ids = held_turn(encoder)
    for number in range(8):
        messages = [*messages, *user(f"turn {number}")]
        prompt = encoder.encode(messages, key=KEY)
        assert prompt.token_ids[: len(held_ids)] == held_ids
        output = [
            *encoder.tokenizer.encode("a"),
            *encoder.tokenizer.encode("n"),
            encoder.tokenizer.token_id("<|im_end|>"),
        ]
        assert encoder.hold(prompt, output, KEY) is not None
        held_ids = [*prompt.token_ids, *output]
        messages = [*messages, {"role": "assistant", "content": "an"}]
    assert encoder.splices.num_spliced == 8


def test_an_answer_that_spells_a_delimiter_in_letters_is_never_spliced() -> None:
    encoder = chatml_encoder()
    prompt = encoder.encode(user("How are you?"), key=KEY)
    letters = [token for letter in "<|im_end|>" for token in encoder.tokenizer.encode(letter)]
    assert encoder.hold(prompt, letters, KEY) is None
    assert encoder.splices.num_unfit == 1


def test_nothing_is_found_under_another_root_or_another_id() -> None:
    """SEC-TIME-1: what one key sampled is never a part of another key's prompt."""
    encoder = chatml_encoder()
    messages, held_ids = held_turn(encoder)
    following = [*messages, *user("why?")]
    fresh = chatml_encoder().encode(following).token_ids
    for key in (MemoryKey("other", "c"), MemoryKey("", "d")):
        prompt = encoder.encode(following, key=key)
        assert prompt.token_ids == fresh
        assert common_prefix(prompt.token_ids, held_ids) < len(held_ids)


def test_its_own_ids_count_where_another_conversation_reads_alike() -> None:
    encoder = chatml_encoder()
    messages, held_ids = held_turn(encoder)
    following = [*messages, *user("why?")]
    other = encoder.encode(following, key=MemoryKey("", "d"))
    mine = encoder.encode(following, key=KEY)
    assert mine.token_ids[: len(held_ids)] == held_ids
    assert other.text == mine.text
    assert other.token_ids != mine.token_ids


def test_a_conversation_without_an_id_is_known_by_how_it_opens() -> None:
    system: list[dict[str, Any]] = [{"role": "system", "content": "You help."}]
    opening = [*system, *user("hi")]
    assert memory_key("r", None, opening, None) == memory_key("r", None, [*opening, *user("more")], None)
    others = [memory_key("r", None, [*system, *user("ho")], None), memory_key("s", None, opening, None)]
    others += [memory_key("r", None, opening, [1]), memory_key("r", "c", opening, None)]
    assert memory_key("r", None, opening, None) not in others
    assert memory_key("r", "c", opening, None) == memory_key("r", "c", system, None)


@pytest.mark.parametrize("fields", [{}, {"conversation_id": "c"}])
async def test_the_next_turn_over_http_repeats_exactly_what_was_sampled(
    text_model: TextModel, fields: dict[str, Any]
) -> None:
    letters = [token for letter in "Your order is late." for token in text_model.tokenizer.encode(letter)]
    assert letters != text_model.tokenizer.encode("Your order is late.")
    async with live_server(Script([*letters, END_TOKEN_ID]), text_model=text_model) as server:
        before = text_model.counts()  # the model's text half is shared between tests
        await two_turns(server, fields)
        first, second = server.engine.submitted
        held = [*first.prompt_ids, *letters, END_TOKEN_ID]
        assert second.prompt_ids[: len(held)] == held
        # The turn's end is stable as a whole: the cache can go on from where the answer ended.
        assert server.engine.ended_turns[first.request_id] >= len(held) - 1
        assert await server.metric('turnkeep_texts_total{event="spliced_answers"}') == before["spliced_answers"] + 1
        spliced = await server.metric('turnkeep_texts_total{event="spliced_tokens"}')
        assert spliced == before["spliced_tokens"] + len(letters) + 1


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({0: "You helped."}, 0), ({1: "where is my order, number seventeen?"}, 1), ({2: "Your order is lost."}, 2),
        ({2: "Your order is lost.", 3: "Oh?"}, 2), ({}, None),
    ],
)  # fmt: skip
async def test_the_report_names_the_first_message_that_reads_otherwise(
    text_model: TextModel, changed: dict[int, str], expected: int | None
) -> None:
    answer = Script([*text_model.tokenizer.encode("Your order is late."), END_TOKEN_ID])
    async with live_server(answer, text_model=text_model) as server:
        messages = [{"role": "system", "content": "You help."}, *user("Where is my order, number seventeen?")]
        _, body = await server.post({"model": "demo", "messages": messages, "conversation_id": "c"})
        messages = [*messages, body["choices"][0]["message"], *user("Why?")]
        for index, text in changed.items():
            messages[index] = {**messages[index], "content": text}
        assert (await server.post({"model": "demo", "messages": messages, "conversation_id": "c"}))[0] == 200
        _, report = await server.get("/v1/conversations/c/cache")
    turn = report["turns"][1]
    assert turn["first_different_message"] == expected
    assert (turn["first_difference"] is None) == (expected is None)


async def two_turns(server: LiveServer, fields: dict[str, Any]) -> None:
    messages = user("Where is my order, number seventeen?")
    _, answer = await server.post({"model": "demo", "messages": messages, **fields})
    messages = [*messages, answer["choices"][0]["message"], *user("Why?")]
    assert (await server.post({"model": "demo", "messages": messages, **fields}))[0] == 200
