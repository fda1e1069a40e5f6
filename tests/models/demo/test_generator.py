"""The order-desk conversations: same for a seed, and true to the simulated desk."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.order_desk import TOOLS, OrderDesk


def test_a_seed_gives_the_same_conversation_every_time() -> None:
    first, second = conversation(7, 40), conversation(7, 40)
    assert first == second
    assert first.messages() != conversation(8, 40).messages()


def test_a_longer_conversation_begins_like_the_shorter_one() -> None:
    assert conversation(5, 12).messages() == conversation(5, 45).messages(12)


@pytest.mark.parametrize("seed", range(30))
def test_a_live_desk_answers_the_expected_calls_as_the_script_says(seed: int) -> None:
    script = conversation(seed, 40)
    desk = OrderDesk(script.seed)
    for turn in script.turns:
        scripted_calls = [c["function"] for m in turn.messages for c in m.get("tool_calls", ())]
        assert [(c.name, c.arguments) for c in turn.expected_calls] == [
            (f["name"], json.loads(f["arguments"])) for f in scripted_calls
        ]
        results = [m["content"] for m in turn.messages if m["role"] == "tool"]
        assert [desk.call_json(f["name"], f["arguments"]) for f in scripted_calls] == results


@pytest.mark.parametrize("seed", range(30))
def test_the_scripted_answer_contains_every_expected_fact(seed: int) -> None:
    for turn in conversation(seed, 40).turns:
        assert turn.messages[-1]["role"] == "assistant"
        assert all(fact in turn.answer for fact in turn.expected_facts), turn


def test_every_recalled_value_was_told_before_and_as_long_ago_as_the_turn_says() -> None:
    num_far = 0
    for seed in range(20):
        script = conversation(seed, 45)
        for turn in script.turns:
            if turn.kind != "recall":
                continue
            assert turn.told_turns_ago is not None
            assert turn.mentioned_turns_ago is not None
            assert 1 <= turn.mentioned_turns_ago <= turn.told_turns_ago <= turn.index
            value = turn.expected_facts[0]
            assert value in script.turns[turn.index - turn.told_turns_ago].user
            assert value not in turn.user
            num_far += turn.mentioned_turns_ago >= 10
    assert num_far > 50


def test_calls_use_the_declared_arguments_in_schema_order() -> None:
    required = {t["function"]["name"]: t["function"]["parameters"]["required"] for t in TOOLS}
    seen = set()
    for seed in range(20):
        for turn in conversation(seed, 40).turns:
            for call in turn.expected_calls:
                assert list(call.arguments) == required[call.name]
                seen.add(call.name)
    assert seen == set(required)


def test_an_agent_without_tools_calls_none() -> None:
    script = conversation(3, 40, with_tools=False)
    assert script.tools is None
    assert not any(turn.expected_calls for turn in script.turns)


def test_no_turns_is_refused() -> None:
    with pytest.raises(ValueError, match="num_turns"):
        conversation(0, 0)


def test_the_generator_needs_no_torch() -> None:
    code = "import sys, turnkeep.models.demo.generator; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
