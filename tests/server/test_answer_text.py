"""From token ids to deltas: the same however the engine's events were cut, and nothing that may not be shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import END_TOKEN_ID, make_text_model

from turnkeep.scheduler.request import SamplingParams
from turnkeep.server.answer_text import AnswerText
from turnkeep.server.stable_position import UNSURE_TOKENS
from turnkeep.server.turn_events import TurnDelta
from turnkeep.server.turn_request import TurnRequest

TEXT_MODEL = make_text_model()
NAMES = frozenset({"f"})
PIECES = [
    "Hello", " there", " 😀", "é", "<think>", "</think>", "\n", "STOP", "ST",
    '<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>', "<tool_call>", "</tool_call>", "<", "{}",
]  # fmt: skip


def make(**fields: Any) -> AnswerText:
    request = TurnRequest(
        messages=[{"role": "user", "content": "x"}],
        sampling=SamplingParams(max_new_tokens=100),
        **{"tool_names": NAMES, **fields},
    )
    prompt = TEXT_MODEL.prepare(request, now=0.0)
    return AnswerText(TEXT_MODEL, request, prompt, (END_TOKEN_ID,), 0)


def play(token_ids: list[int], sizes: list[int], reason: str = "stop", **fields: Any) -> AnswerText:
    answer = make(**fields)
    start = 0
    for size in [*sizes, len(token_ids)]:
        answer.push(token_ids[start : start + size], None)
        start += size
    answer.finish(reason)
    return answer


def shown(answer: AnswerText) -> tuple[Any, ...]:
    message = answer.collected.message()
    calls = [call["function"] for call in message.get("tool_calls", [])]
    counts = (answer.num_output_tokens, answer.num_reasoning_tokens)
    return message["content"], message.get("reasoning_content"), calls, answer.end_reason, counts


@settings(deadline=None, max_examples=60)
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    sizes=st.lists(st.integers(1, 5), max_size=30),
    reason=st.sampled_from(["stop", "length"]),
    stops=st.sampled_from([(), ("STOP",), ("there", "{}")]),
    parallel=st.booleans(),
)
def test_the_answer_does_not_depend_on_how_events_were_merged(
    pieces: list[str], sizes: list[int], reason: str, stops: tuple[str, ...], parallel: bool
) -> None:
    token_ids = [*TEXT_MODEL.tokenizer.encode("".join(pieces)), END_TOKEN_ID]
    fields = {"stop_strings": stops, "parallel_tool_calls": parallel}
    whole = shown(play(token_ids, [], reason, **fields))
    assert shown(play(token_ids, sizes, reason, **fields)) == whole
    assert shown(play(token_ids, [1] * len(token_ids), reason, **fields)) == whole
    assert "�" not in (whole[0] or "")
    for stop in stops:
        # Behind reasoning or a call, which end what may become a stop string, content goes on.
        assert stop not in (whole[0] or "") or whole[1] or whole[2]


def test_the_end_token_is_counted_and_not_shown() -> None:
    token_ids = [*TEXT_MODEL.tokenizer.encode("Hi"), END_TOKEN_ID]
    answer = play(token_ids, [])
    assert answer.collected.message()["content"] == "Hi"
    assert answer.num_output_tokens == len(token_ids)
    assert answer.collected.token_ids == token_ids


def test_an_incomplete_character_is_held_until_it_is_complete() -> None:
    token_ids = TEXT_MODEL.tokenizer.encode("😀")
    assert len(token_ids) > 1
    answer = make()
    assert all(delta.content == "" for delta in answer.push(token_ids[:-1], None))
    assert [delta.content for delta in answer.push(token_ids[-1:], None)] == ["😀"]


def test_what_follows_a_stop_string_is_known_but_not_part_of_the_answer() -> None:
    token_ids = TEXT_MODEL.tokenizer.encode("one STOP two three")
    answer = play(token_ids, [], stop_strings=("STOP",))
    assert answer.is_stopped
    assert answer.collected.message()["content"] == "one "
    assert answer.output_ids == token_ids
    assert answer.num_output_tokens < len(token_ids)
    assert answer.end_reason == "stop"


def test_reasoning_after_content_starts_a_delta_of_its_own() -> None:
    answer = make()
    deltas = answer.push(TEXT_MODEL.tokenizer.encode("first<think>then</think>last"), None)
    kinds = [(bool(delta.content), bool(delta.reasoning)) for delta in deltas if not is_bare(delta)]
    assert (True, True) not in kinds[:1]
    answer.finish("stop")
    assert answer.collected.message()["content"] == "firstlast"
    assert answer.collected.message()["reasoning_content"] == "then"


def is_bare(delta: TurnDelta) -> bool:
    return not (delta.content or delta.reasoning or delta.tool_calls)


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "num_calls"),
    [
        ("<think>a STOP b</think>one STOP two", "one ", "a STOP b", 0),
        ('one<tool_call>{"name": "look", "arguments": {"x": "STOP"}}</tool_call>', "one", None, 1),
        ('one<tool_call>{"name": "look", "arguments": {}}</tool_call>two STOP', "onetwo ", None, 1),
        ('ST<tool_call>{"name": "look", "arguments": {}}</tool_call>OP', "STOP", None, 1),
        ("one ST", "one ST", None, 0),
    ],
)
def test_stop_strings_end_content_and_mean_nothing_elsewhere(
    text: str, content: str, reasoning: str | None, num_calls: int
) -> None:
    """PARSE-6, API-CH-9: no half tag is left behind, and reasoning or a call is not cut."""
    token_ids = [*TEXT_MODEL.tokenizer.encode(text), END_TOKEN_ID]
    for sizes in ([], [1] * len(token_ids)):
        answer = play(token_ids, sizes, stop_strings=("STOP",), tool_names=frozenset({"look"}))
        message = answer.collected.message()
        assert (message["content"], message.get("reasoning_content")) == (content, reasoning)
        assert len(message.get("tool_calls", ())) == num_calls
        assert answer.end_reason == ("tool_calls" if num_calls else "stop")


@pytest.mark.parametrize("stop", ["_call>", "call", "<tool", "think>"])
def test_a_stop_string_inside_a_tag_leaves_no_half_of_it(stop: str) -> None:
    text = '<think>x</think>one<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    answer = play([*TEXT_MODEL.tokenizer.encode(text), END_TOKEN_ID], [], stop_strings=(stop,), tool_names={"look"})
    assert answer.collected.message()["content"] == "one"
    assert answer.end_reason == "tool_calls"


@pytest.mark.parametrize("sizes", [[], [1] * 40, [7, 5, 2]])
def test_tokens_before_a_stop_string_are_told_from_those_that_it_is_made_of(sizes: list[int]) -> None:
    words = [f" w{number}" for number in range(12)]
    before = [token for word in words for token in TEXT_MODEL.tokenizer.encode(word)]
    token_ids = [*before, *TEXT_MODEL.tokenizer.encode(" STOP and more")]
    answer = play(token_ids, sizes, stop_strings=("STOP",))
    assert answer.stop_string == "STOP"
    assert len(before) - UNSURE_TOKENS - 1 <= answer.num_repeated_tokens <= len(before) - UNSURE_TOKENS + 1
    assert play(token_ids[:3], [], stop_strings=("STOP",)).num_repeated_tokens == 0
