"""Training: batches that depend on the step alone, honest loss weights, and a run that can be resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from turnkeep.models.demo.batches import FIRST_TRAINING_SEED, Batches, Phase, fill_conversation
from turnkeep.models.demo.dense import load_model
from turnkeep.models.demo.evaluation import EVALUATION_SEED, VALIDATION_SEED
from turnkeep.models.demo.rendering import ASSISTANT, DIRECTORY, THINK, TurnEncoder, load_tokenizer
from turnkeep.models.demo.training import Trainer, export, learning_rate, parse_phases

PHASES = (Phase(3, (128,)), Phase(2, (128, 256)))


def test_a_batch_depends_on_its_step_alone() -> None:
    first, second = Batches(PHASES, 512, 0.0), Batches(PHASES, 512, 0.0)
    ids, weights = first[4]
    assert torch.equal(ids, second[4][0])
    assert torch.equal(weights, second[4][1])
    assert not torch.equal(first[0][0], first[1][0])
    with pytest.raises(IndexError):
        first.length(5)


def test_training_never_sees_the_seeds_of_evaluation() -> None:
    assert max(EVALUATION_SEED, VALIDATION_SEED) + 10_000 < FIRST_TRAINING_SEED


@pytest.mark.parametrize("keep_reasoning", [False, True])
def test_loss_is_on_what_the_agent_writes_and_never_on_the_absence_of_thinking(keep_reasoning: bool) -> None:
    tokenizer = load_tokenizer()
    encoder = TurnEncoder(tokenizer, context_weight=0.0)
    span = fill_conversation(FIRST_TRAINING_SEED + 3, 700, encoder, keep_reasoning=keep_reasoning)
    assert len(span) <= 700
    tokens = [tokenizer.id_to_token(i) for i in span.ids]
    role = ""
    for position, token in enumerate(tokens):
        weight = span.weights[position]
        if token.startswith("<|") and token != "<|end|>":
            role = token
            assert weight == 0.0
        elif role != ASSISTANT:
            assert weight == 0.0
        elif tokens[position - 1] == ASSISTANT:
            assert weight == (1.0 if token == THINK else 0.0)
        else:
            assert weight == 1.0
    opened = tokens.count(THINK)
    assert opened == tokens.count(ASSISTANT) if keep_reasoning else 0 < opened < tokens.count(ASSISTANT)


def test_phases_are_parsed() -> None:
    assert parse_phases("10x512,5x512+1024") == (Phase(10, (512,)), Phase(5, (512, 1024)))


def test_the_learning_rate_rises_then_falls() -> None:
    rates = [learning_rate(step, 1000, 2e-3) for step in range(1000)]
    assert rates[0] < rates[50] < rates[99] == pytest.approx(2e-3)
    assert rates[999] < 1e-4


def test_a_resumed_run_gives_the_weights_of_an_uncut_one(tmp_path: Path) -> None:
    def trainer(name: str) -> Trainer:
        return Trainer(Batches((Phase(2, (128,)),), 128, 0.0), 2e-3, tmp_path / name, compiled=False)

    uncut, cut = trainer("uncut"), trainer("cut")
    for step in range(2):
        uncut.train_step(*uncut.batches[step])
    cut.train_step(*cut.batches[0])
    cut.save()
    resumed = trainer("cut")
    assert resumed.step == 1
    resumed.train_step(*resumed.batches[1])
    for name, value in uncut.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_an_export_can_be_loaded_again(tmp_path: Path) -> None:
    trainer = Trainer(Batches(PHASES, 128, 0.0), 2e-3, tmp_path / "state", compiled=False)
    export(trainer.model, tmp_path)
    (tmp_path / "config.json").write_bytes((DIRECTORY / "config.json").read_bytes())
    loaded = load_model(tmp_path)
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-2, atol=1e-3)
