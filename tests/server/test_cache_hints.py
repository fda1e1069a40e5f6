"""Hints about caching: marked places become boundaries where later prompts repeat them, and wishes are bounded."""

from __future__ import annotations

import random
from typing import Any

import pytest
from live_server import CHAT, live_server, saying, user
from text_fixtures import NOW, PIECES, TEMPLATE_NAMES, WORDS, RandomConversation, common_prefix, text_case

from turnkeep.cache.boundary import Boundary
from turnkeep.server.boundaries import BoundaryFinder
from turnkeep.server.cache_hints import MAX_MARKS, MAX_RETENTION_S, CacheMark, cache_marks, retention_s
from turnkeep.server.chat_completions import convert_request
from turnkeep.server.chat_messages import normalize_messages
from turnkeep.server.common_prefix import common_prefix_length
from turnkeep.server.prompts import PromptEncoder
from turnkeep.server.stable_position import marked_ends, with_declared
from turnkeep.server.text_model import TextModel

MARK = {"type": "ephemeral"}


def part(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def test_marks_stand_behind_parts_and_messages_in_both_spellings() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": [part("ab", cache_control=MARK), part("cd")]},
        {"role": "user", "content": [part("ab"), part("cd", prompt_cache_breakpoint={})]},
        {"role": "assistant", "content": [part("ab", cache_control=MARK), part("cd")]},
        {"role": "tool", "content": "x", "cache_control": MARK},
    ]
    assert cache_marks(messages) == (CacheMark(0, 2), CacheMark(1), CacheMark(2), CacheMark(3))
    assert cache_marks(messages * 2)[0] == CacheMark(4, 2)
    assert len(cache_marks(messages * 20)) == MAX_MARKS


@pytest.mark.parametrize("wrong", [None, True, "ephemeral", [], 3])
def test_what_is_no_mark_is_passed_over(wrong: Any) -> None:
    assert cache_marks([{"role": "user", "content": [part("a", cache_control=wrong)], "cache_control": wrong}]) == ()


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0), ({"prompt_cache_retention": "24h"}, 86400), ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, 1800),
        ({"prompt_cache_retention": "999999d"}, MAX_RETENTION_S), ({"prompt_cache_options": {"ttl": "-5m"}}, 0),
        ({"prompt_cache_options": {"ttl": 5}}, 0), ({"prompt_cache_options": "30m"}, 0),
        ({"prompt_cache_retention": "5m", "prompt_cache_options": {"ttl": "1h"}}, 3600),
        ({"tools": [{"type": "function", "cache_control": {"ttl": "1h"}, "function": {"name": "f"}}]}, 3600),
    ],
)  # fmt: skip
def test_the_longest_wish_counts_within_its_bound(fields: dict[str, Any], seconds: float) -> None:
    marked = [{"role": "user", "content": [part("a", cache_control={"type": "ephemeral", "ttl": "2s"})]}]
    assert retention_s(convert_request({"model": "m", "messages": user("a"), **fields})) == seconds
    assert retention_s(convert_request({"model": "m", "messages": marked, **fields})) == max(seconds, 2)


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_a_declared_boundary_is_repeated_by_every_prompt_that_repeats_the_marked_text(name: str) -> None:
    """TPL-13: whatever else stands behind the mark, in the same message or after it."""
    case = text_case(name)
    choice = random.Random(3)
    num_declared = num_checked = 0
    for seed in range(12):
        source = RandomConversation(seed, takes_tools=case.takes_tools)
        start = "".join(choice.choice(WORDS + PIECES) for _ in range(choice.randint(0, 30)))
        rest = "".join(choice.choice(PIECES) for _ in range(3))
        for mark, content in ((CacheMark(1), start), (CacheMark(1, len(start)), start + rest)):
            messages = normalize_messages([{"role": "system", "content": "You help."}, *user(content)])
            encoder = PromptEncoder(case.template, case.tokenizer)
            prompt = encoder.encode(messages, now=NOW)
            found = BoundaryFinder(case.template, case.tokenizer, encoder=encoder).declared_positions(
                messages, [mark], prompt
            )
            num_declared += len(found)
            for _ in range(4):
                # Not source.text(): a spelled control token changes how the whole stretch around it is encoded.
                other = start if mark.num_chars is None else start + "".join(choice.choices(PIECES, k=4))
                following = [source.answer(calls=False), source.user()] if choice.random() < 0.7 else []
                continued = normalize_messages([messages[0], *user(other), *following])
                later = PromptEncoder(case.template, case.tokenizer).encode(continued, now=NOW)
                if common_prefix_length(prompt.text, later.text) < marked_ends(encoder, prompt, messages, [mark])[0]:
                    continue  # a template that writes the marked message otherwise once others follow
                num_checked += 1
                shared = common_prefix(prompt.token_ids, later.token_ids)
                assert all(position <= shared for position in found), (seed, mark)
    assert num_declared > 12
    assert num_checked > 24


def test_a_whole_message_is_covered_with_the_delimiter_that_closes_it() -> None:
    case = text_case("chatml")
    encoder = PromptEncoder(case.template, case.tokenizer)
    messages = normalize_messages([*user("one two"), {"role": "assistant", "content": "three"}, *user("four")])
    prompt = encoder.encode(messages, now=NOW)
    finder = BoundaryFinder(case.template, case.tokenizer, encoder=encoder)
    end = case.tokenizer.token_id("<|im_end|>")
    positions = finder.declared_positions(messages, [CacheMark(0), CacheMark(1), CacheMark(2)], prompt)
    assert [prompt.token_ids[position - 1] for position in positions] == [end, end, end]
    assert positions == [i for i, token in enumerate(prompt.token_ids, 1) if token == end][-3:]
    assert finder.counters.num_lost_marks == 0


def test_a_position_has_one_boundary_and_they_ascend() -> None:
    found = with_declared([Boundary(4, "trunk"), Boundary(9, "turn_start")], [2, 9, 6, 6])
    assert found == (Boundary(2, "declared"), Boundary(4, "trunk"), Boundary(6, "declared"), Boundary(9, "turn_start"))


async def test_hints_of_every_shape_reach_the_engine_and_change_no_token(text_model: TextModel) -> None:
    texts = ["You help.", "A rather long text about lamps and boxes. ", "And a question?"]
    plain = [{"role": "system", "content": texts[0]}, *user(texts[1] + texts[2])]
    mark = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "1h"}}
    chat = [plain[0], {"role": "user", "content": [part(texts[1], **mark), part(texts[2])]}]
    marked = [part(texts[1], cache_control={"type": "ephemeral", "ttl": "1h"}), part(texts[2])]
    item = [{"type": "input_text", "text": texts[1], **mark}, {"type": "input_text", "text": texts[2]}]
    async with live_server(saying(text_model, "fine"), text_model=text_model) as server:
        for path, body in (
            (CHAT, {"messages": plain}),
            (CHAT, {"messages": chat}),
            ("/v1/responses", {"instructions": texts[0], "input": [{"role": "user", "content": item}]}),
        ):
            assert (await server.post({"model": "demo", **body}, path))[0] == 200
        blocks = {"system": texts[0], "messages": [{"role": "user", "content": marked}], "max_tokens": 9}
        assert (await server.post({"model": "demo", **blocks}, "/v1/messages"))[0] == 200
        first, second, third, fourth = server.engine.submitted
    assert first.prompt_ids == second.prompt_ids == third.prompt_ids
    assert [one.kind for one in second.boundaries] == ["trunk", "declared", "turn_start"]
    assert second.boundaries == third.boundaries
    assert "declared" in [one.kind for one in fourth.boundaries]  # its texts are joined by a line break
    assert [one.retention_s for one in server.engine.submitted] == [0.0, 3600.0, 3600.0, 3600.0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_marked", [False, True])
async def test_created_tokens_are_those_up_to_the_last_mark_that_were_not_read(
    text_model: TextModel, is_marked: bool, stream: bool
) -> None:
    marks = {"cache_control": MARK} if is_marked else {}
    asked = [{"role": "user", "content": [part("A long text about lamps and boxes. " * 4, **marks)]}]
    async with live_server(saying(text_model, "fine", num_cached_tokens=3), text_model=text_model) as server:
        fields = {"model": "demo", "max_tokens": 9, "messages": [*asked, *user("and now?")], "stream": stream}
        async with server.session.post(server.url + "/v1/messages", json=fields) as response:
            text = await response.text()
        submitted = server.engine.submitted[-1]
    declared = [one.position for one in submitted.boundaries if one.kind == "declared"]
    assert bool(declared) == is_marked
    created = declared[-1] - 3 if is_marked else 0
    assert f'"cache_creation_input_tokens":{created}' in text
    assert '"cache_read_input_tokens":3' in text
    assert f'"input_tokens":{len(submitted.prompt_ids) - 3 - created}' in text
