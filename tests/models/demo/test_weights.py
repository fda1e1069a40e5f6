"""The bundled weights: they do what the model card says, on a small sample of unseen conversations."""

from __future__ import annotations

import pytest

from turnkeep.models.demo.dense import load_model
from turnkeep.models.demo.evaluation import Outcome, cases_of, report_of, run_cases
from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.rendering import DIRECTORY, TurnEncoder, load_tokenizer

SEED = 7


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    encoder = TurnEncoder(load_tokenizer(), context_weight=0.0)
    cases = cases_of(conversation(SEED, 30), encoder)
    return run_cases(load_model(DIRECTORY), [c for c in cases if c.turn.expected_calls or c.is_far_recall])


def test_greedy_decoding_writes_the_expected_calls(outcomes: list[Outcome]) -> None:
    tools = [o for o in outcomes if o.case.turn.expected_calls]
    assert len(tools) >= 8
    assert sum(o.exact for o in tools) / len(tools) >= 0.97


def test_facts_from_ten_turns_ago_are_recalled(outcomes: list[Outcome]) -> None:
    far = [o for o in outcomes if o.case.is_far_recall]
    assert len(far) >= 5
    assert all(o.exact for o in far)


def test_the_mtp_block_agrees_with_the_model(outcomes: list[Outcome]) -> None:
    assert report_of(outcomes, 1).mtp_agreement >= 0.85
