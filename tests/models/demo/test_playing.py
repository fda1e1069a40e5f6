"""Playing a scripted turn with something that generates, and scoring what it did."""

from __future__ import annotations

import pytest

from turnkeep.models.demo.evaluation import Outcome, cases_of, generate_deviating, report_of
from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.playing import parse_calls, play_turn
from turnkeep.models.demo.rendering import ASSISTANT, END, TurnEncoder, load_tokenizer, render_message
from turnkeep.models.demo.script import Conversation


class Script:
    """Generates the scripted messages of one turn; `spoil` changes each text."""

    def __init__(self, script: Conversation, index: int, spoil: tuple[str, str] = ("", "")) -> None:
        messages = [m for m in script.turns[index].messages if m["role"] == "assistant"]
        texts = [render_message(m, with_reasoning=True) for m in messages]
        self.texts = [t.removeprefix(ASSISTANT).removesuffix(END).replace(*spoil) for t in texts]
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self.texts[min(len(self.prompts), len(self.texts)) - 1]


@pytest.mark.parametrize("seed", range(5))
def test_the_scripted_agent_plays_every_turn_right(seed: int) -> None:
    script = conversation(seed, 25)
    for turn in script.turns:
        played = play_turn(script, turn.index, Script(script, turn.index))
        assert played.calls == [(c.name, c.arguments) for c in turn.expected_calls]
        assert played.answer == turn.answer


def test_the_prompt_strips_closed_turns_and_keeps_the_loop() -> None:
    script = conversation(2, 30)
    turn = next(t for t in script.turns if t.kind == "total" and t.index > 3)
    agent = Script(script, turn.index)
    play_turn(script, turn.index, agent)
    assert "<think>" not in agent.prompts[0]
    assert agent.prompts[2].count("<think>") == 2


def test_a_wrong_value_is_scored_as_wrong() -> None:
    script = conversation(0, 60)
    encoder = TurnEncoder(load_tokenizer(), context_weight=0.0)
    case = next(c for c in cases_of(script, encoder) if c.turn.kind == "price")
    value = case.turn.expected_facts[0]
    outcome = Outcome(case, exact=False, num_agreeing=9, num_predicted=10)
    generate_deviating([outcome], Script(script, case.turn.index, (value, "planets")))
    assert not outcome.calls_right
    assert not outcome.right
    report = report_of([outcome], 1)
    assert report.exact_tool_calls == 0.0
    assert report.mtp_agreement == 0.9


def test_an_exact_turn_is_not_generated_again() -> None:
    script = conversation(0, 3)
    encoder = TurnEncoder(load_tokenizer(), context_weight=0.0)
    outcomes = [Outcome(case, exact=True, num_agreeing=1, num_predicted=1) for case in cases_of(script, encoder)]

    def refuse(prompt: str) -> str:
        raise AssertionError(prompt)

    generate_deviating(outcomes, refuse)
    assert all(outcome.right for outcome in outcomes)


@pytest.mark.parametrize("body", ["{", "[]", '{"name": "x"}', '{"name": "x", "arguments": 3}', "5"])
def test_a_broken_call_is_a_call_of_nothing(body: str) -> None:
    assert parse_calls(f"<tool_call>{body}</tool_call>") == [("", {})]


def test_calls_inside_reasoning_do_not_count() -> None:
    call = '<tool_call>{"name": "x", "arguments": {}}</tool_call>'
    assert parse_calls(f"<think>{call}</think>Hello") == []
    assert parse_calls(f"<think>a</think>{call}{call}") == [("x", {}), ("x", {})]
