"""Conversation ids by precedence, bounded tables, and an account of every token of a turn."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from turnkeep.server.cache_report import LOSS_REASONS, cache_report
from turnkeep.server.conversations import (
    MAX_BRANCHES,
    MAX_TURNS,
    Conversation,
    ConversationTable,
    cache_root,
    resolve_conversation,
)

# Every place an id may stand, by precedence.
SIGNALS: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("previous_response_id", {}, {"previous_response_id": "@@"}),
    ("conversation", {}, {"conversation": {"id": "@@"}}),
    ("conversation_id", {}, {"conversation_id": "@@"}),
    ("x-conversation-id", {"X-Conversation-Id": "@@"}, {}),
    ("x-dynamo-session-id", {"X-Dynamo-Session-ID": "@@"}, {}),
    ("session_id", {}, {"session_id": "@@"}),
    ("conversation_params.conversation_id", {}, {"conversation_params": {"conversation_id": "@@"}}),
    ("vllm_xargs.session_id", {}, {"vllm_xargs": {"session_id": "@@"}}),
    ("x-claude-code-session-id", {"X-Claude-Code-Session-Id": "@@"}, {}),
    ("metadata.user_id", {}, {"metadata": {"user_id": '{"session_id": "@@"}'}}),
    ("thread-id", {"thread-id": "@@"}, {}),
    ("session-id", {"session_id": "@@"}, {}),
    ("x-session-id", {"X-Session-ID": "@@"}, {}),
    ("x-session-affinity", {"x-session-affinity": "@@"}, {}),
    ("prompt_cache_key", {}, {"prompt_cache_key": "@@"}),
]


def filled(value: Any, text: str) -> Any:
    return json.loads(json.dumps(value).replace("@@", text))


@pytest.mark.parametrize(("source", "headers", "body"), SIGNALS)
def test_each_signal_names_the_conversation(source: str, headers: dict[str, str], body: dict[str, Any]) -> None:
    tag = resolve_conversation(filled(headers, "c-1"), filled(body, "c-1"))
    assert (tag.conversation_id, tag.source, tag.conflicting) == ("c-1", source, ())
    assert tag.shared == (source == "prompt_cache_key")


def test_the_earlier_signal_wins_and_the_others_count_as_conflicts() -> None:
    for number, (source, _, _) in enumerate(SIGNALS):
        all_headers: dict[str, str] = {}
        all_body: dict[str, Any] = {}
        for name, other_headers, other_body in SIGNALS[number:]:
            all_headers |= filled(other_headers, f"c-{name}")
            all_body |= filled(other_body, f"c-{name}")
        tag = resolve_conversation(all_headers, all_body)
        assert (tag.conversation_id, tag.source) == (f"c-{source}", source)
        assert tag.conflicting == tuple(name for name, _, _ in SIGNALS[number + 1 :] if name != "prompt_cache_key")


def test_equal_signals_do_not_conflict() -> None:
    assert resolve_conversation({"session-id": "a", "thread-id": "a"}, {"conversation": "a"}).conflicting == ()


def test_a_sub_agent_has_an_id_of_its_own() -> None:
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}
    assert resolve_conversation(headers, {}).conversation_id == "s:a"


@pytest.mark.parametrize("name", ["user", "safety_identifier", "id"])
def test_who_asks_is_not_which_conversation(name: str) -> None:
    headers = {"x-request-id": "r", "x-client-request-id": "r", "x-correlation-id": "r", "x-litellm-session-id": "r"}
    assert resolve_conversation(headers, {name: "u", "metadata": {"user_id": "u"}}).conversation_id is None


def test_an_operator_can_name_more_headers() -> None:
    tag = resolve_conversation({"X-Correlation-ID": "r"}, {}, extra_headers=["x_correlation_id"])
    assert (tag.conversation_id, tag.source) == ("r", "x_correlation_id")


@pytest.mark.parametrize(
    "bad",
    ["", "x" * 257, "ü" * 129, "a\nb", "a\x00", "\x1b[0m", "../x", "a/b", "a\\b", "..", 5, None, ["x"], {"id": 5}],
)
def test_an_unusable_id_is_passed_over(bad: object) -> None:
    tag = resolve_conversation({}, {"conversation": bad, "prompt_cache_key": "k"})
    assert (tag.conversation_id, tag.num_unusable) == ("k", isinstance(bad, str))


@pytest.mark.parametrize("bad", ["{", "{}", "[]", '{"session_id": 5}', "{" * 10_000, 5, None])
def test_odd_metadata_is_ignored(bad: object) -> None:
    assert resolve_conversation({}, {"metadata": {"user_id": bad}}).conversation_id is None
    assert resolve_conversation({}, {"metadata": bad}).conversation_id is None


def test_tenants_and_salts_have_roots_of_their_own() -> None:
    pairs = [
        (None, None),
        ("a", None),
        (None, "a"),
        ("a", "a"),
        ("a", ""),
        ("", "a"),
        ("aa", None),
        ("a", "b"),
        ("ab", ""),
    ]
    assert len({cache_root(*pair) for pair in pairs}) == len(pairs)
    assert cache_root("a", "b") == cache_root("a", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_one_id_of_two_tenants_is_two_conversations() -> None:
    table = ConversationTable(clock=Clock())
    assert table.open("root a", "c") is not table.open("root b", "c")
    assert table.open("root a", "c") is table.find("root a", "c")
    assert table.find("root c", "c") is None


def test_the_table_forgets_the_least_recently_used_and_the_old() -> None:
    clock = Clock()
    table = ConversationTable(clock=clock, max_conversations=3, ttl_s=60)
    for name in "abc":
        clock.now += 1
        table.open("", name)
    clock.now += 1
    table.open("", "a")
    table.open("", "d")
    assert [name for name in "abcd" if table.find("", name)] == ["a", "c", "d"]
    clock.now += 59.5
    assert [name for name in "abcd" if table.find("", name)] == ["a", "d"]
    clock.now += 60
    assert table.find("", "a") is None
    assert len(table) == 0
    assert (table.counters["opened"], table.counters["evicted"], table.counters["expired"]) == (4, 1, 3)


def test_a_closed_conversation_is_gone() -> None:
    table = ConversationTable(clock=Clock())
    table.open("", "a")
    assert table.close("", "a")
    assert not table.close("", "a")
    assert table.find("", "a") is None


def test_kept_tokens_are_bounded_over_all_conversations() -> None:
    table = ConversationTable(clock=Clock(), max_held_tokens=1000)
    for number in range(1100):
        conversation = table.open("", str(number))
        record(conversation, list(range(50)), [1], cached=0)
    held = sum(table.open("", str(number)).num_held_tokens for number in range(1100))
    assert held <= 1000 + 50 * 256
    assert table.counters["trimmed"] > 0


def test_sources_and_conflicts_are_counted() -> None:
    table = ConversationTable(clock=Clock())
    table.note_tag(resolve_conversation({"session-id": "a"}, {"conversation": "b"}))
    table.note_tag(resolve_conversation({}, {}))
    assert +table.counters == {"source:conversation": 1, "source:none": 1, "conflicts": 1}


def record(
    conversation: Conversation,
    prompt: list[int],
    output: list[int],
    *,
    cached: int,
    matched: int | None = None,
    lost: dict[str, int] | None = None,
) -> Any:
    return conversation.record_turn(
        request_id=f"r{conversation.num_turns}",
        prompt_ids=prompt,
        output_ids=output,
        num_matched_tokens=cached if matched is None else matched,
        num_cached_tokens=cached,
        finish_reason="stop",
        lost_tokens=lost,
    )


def new_conversation() -> Conversation:
    return ConversationTable(clock=Clock()).open("", "c")


def test_a_continued_conversation_has_only_new_tokens() -> None:
    conversation = new_conversation()
    first = record(conversation, [1] * 50, [2] * 10, cached=0)
    assert (first.num_new_tokens, first.num_held_tokens, first.first_difference) == (50, 0, None)
    prompt = [1] * 50 + [2] * 10 + [3] * 20
    second = record(conversation, prompt, [4], cached=59)
    assert (second.branch, second.num_held_tokens, second.num_new_tokens) == (0, 59, 21)
    assert (second.num_lost_template, second.lost_tokens) == (0, {})
    assert second.first_difference is None


def test_every_lost_token_has_its_reason() -> None:
    conversation = new_conversation()
    record(conversation, [1] * 50, [2] * 10, cached=0)
    # The template drops 5 of the 9 computed answer tokens; pages match 40 of the common 54; a snapshot stood at 30.
    second = record(conversation, [1] * 50 + [2] * 4 + [3] * 20, [4], cached=30, matched=40)
    assert second.num_lost_template == 5
    assert second.lost_tokens == {"evicted": 14, "no_snapshot": 10}
    assert second.num_new_tokens == 20
    assert second.first_difference == 54


@pytest.mark.parametrize("reason", ["tier", "capacity", "evicted", "no_snapshot"])
def test_what_the_engine_remembers_of_a_loss_is_reported(reason: str) -> None:
    conversation = new_conversation()
    record(conversation, [1] * 50, [2] * 10, cached=0)
    second = record(conversation, [1] * 50 + [2] * 10 + [3] * 20, [4], cached=30, matched=30, lost={reason: 25})
    expected = {reason: 25}
    expected["evicted"] = expected.get("evicted", 0) + 4  # up to the 59 tokens that were held
    assert second.lost_tokens == expected
    assert second.num_new_tokens == 21
    report = cache_report(conversation)
    assert report["totals"]["lost"] == {**dict.fromkeys(LOSS_REASONS, 0), "template": 0, **expected}
    assert report["turns"][-1]["lost"] == report["totals"]["lost"]


def test_a_conversation_that_comes_back_with_another_salt_is_told_so() -> None:
    table = ConversationTable(clock=Clock())
    record(table.open("salt one", "c", "tenant"), [1] * 50, [2] * 10, cached=0)
    second = record(table.open("salt two", "c", "tenant"), [1] * 50 + [2] * 10 + [3] * 20, [4], cached=0)
    assert second.lost_tokens == {"salt": 59}
    third = record(table.open("salt two", "c", "tenant"), [1] * 50 + [2] * 10 + [3] * 20 + [4, 5], [6], cached=80)
    assert third.lost_tokens == {}
    other = record(table.open("other", "c", "other tenant"), [1] * 50 + [2] * 10, [4], cached=0)
    assert other.lost_tokens == {}


def test_the_same_prompt_again_loses_nothing_but_computes_its_last_token() -> None:
    conversation = new_conversation()
    record(conversation, [1] * 50, [2] * 10, cached=0)
    again = record(conversation, [1] * 50, [2] * 10, cached=49)
    assert (again.num_new_tokens, again.num_lost_template, again.lost_tokens) == (1, 0, {})
    assert again.first_difference is None


def test_tokens_add_up_for_any_turn() -> None:
    choice = random.Random(3)
    conversation = new_conversation()
    prompt = [choice.randint(0, 2) for _ in range(40)]
    for _ in range(200):
        keep = choice.randint(0, len(prompt))
        prompt = prompt[:keep] + [choice.randint(0, 2) for _ in range(choice.randint(1, 60))]
        matched = choice.randint(0, len(prompt) - 1)
        turn = record(
            conversation, prompt, [7] * choice.randint(0, 5), cached=choice.randint(0, matched), matched=matched
        )
        parts = (turn.num_new_tokens, *turn.lost_tokens.values(), turn.num_cached_tokens)
        assert min(parts) >= 0
        assert turn.num_lost_template >= 0
        assert sum(parts) == turn.num_prompt_tokens


def test_a_side_call_is_a_branch_and_does_not_hide_the_main_one() -> None:
    conversation = new_conversation()
    system = [9] * 20
    record(conversation, system + [1] * 200, [2] * 10, cached=0)
    title = record(conversation, [*system, *[5] * 180], [6] * 3, cached=20)
    assert (title.branch, title.num_lost_template, title.first_difference) == (1, 0, 20)
    main = record(conversation, system + [1] * 200 + [2] * 10 + [3], [4], cached=229)
    assert (main.branch, main.num_held_tokens) == (0, 229)
    assert conversation.num_branches == 2


def test_records_of_a_conversation_are_bounded() -> None:
    conversation = new_conversation()
    for number in range(MAX_TURNS + 20):
        record(conversation, [number] * 30, [1], cached=0)
    assert len(conversation.turns) == MAX_TURNS
    assert conversation.num_turns == MAX_TURNS + 20
    assert conversation.num_held_tokens == MAX_BRANCHES * 30


def test_the_report_is_plain_data_that_adds_up() -> None:
    conversation = new_conversation()
    record(conversation, [1] * 50, [2] * 10, cached=0)
    record(conversation, [1] * 50 + [2] * 4 + [3] * 20, [4], cached=30, matched=40)
    report = json.loads(json.dumps(cache_report(conversation)))
    assert report["conversation_id"] == "c"
    assert report["totals"]["prompt_tokens"] == 124
    assert report["totals"]["cached_tokens"] == 30
    assert report["totals"]["recomputed_tokens"] == 94
    assert report["totals"]["cached_share"] == pytest.approx(30 / 124)
    assert report["totals"]["lost"] == {
        **dict.fromkeys(LOSS_REASONS, 0),
        "template": 5,
        "evicted": 14,
        "no_snapshot": 10,
    }
    assert [turn["recomputed_tokens"] for turn in report["turns"]] == [50, 44]
    assert report["turns"][1]["matched_tokens"] == 40
    assert cache_report(new_conversation())["totals"]["cached_share"] == 0.0
