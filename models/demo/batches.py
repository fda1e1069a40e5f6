"""Training batches: a pure function of the step number, so that a resumed run sees what an uncut one would.

Half of the conversations keep all reasoning; the others are rendered as a client's prompt is, closed turns without
reasoning and the last turn with it. Knows nothing about models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from turnkeep.models.demo.generator import ConversationWriter
from turnkeep.models.demo.order_desk import SYSTEM_PROMPT
from turnkeep.models.demo.rendering import TokenSpan, TurnEncoder, concatenate, load_tokenizer, render_system

# Seeds below this are for evaluation and demonstration, never for training.
FIRST_TRAINING_SEED = 1_000_000

# Recalling is learned last, so two thirds of the conversations are mostly about that.
MEMORY_SHARE = 0.8

SYSTEM_PROMPTS = (
    SYSTEM_PROMPT, SYSTEM_PROMPT, SYSTEM_PROMPT, SYSTEM_PROMPT, None, "You are a helpful assistant.",
    "You are a helpful agent.", "You work at the order desk. Be brief.",
)  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """`num_steps` steps whose sequences have one of `lengths` tokens (drawn with equal chance)."""

    num_steps: int
    lengths: tuple[int, ...]


def fill_conversation(seed: int, length: int, encoder: TurnEncoder, *, keep_reasoning: bool) -> TokenSpan:
    """One conversation with as many turns as fit into `length` tokens, at least one."""
    rng = random.Random(f"training-{seed}")
    writer = ConversationWriter(
        seed,
        with_tools=rng.random() < 0.92,
        system=rng.choice(SYSTEM_PROMPTS),
        memory_share=rng.choice((0.0, MEMORY_SHARE, MEMORY_SHARE)),
    )
    spans = [encoder.context(render_system(writer.system, writer.tools))]
    total, last = len(spans[0]), None
    while True:
        turn = writer.next_turn()
        full = encoder.turn(turn, with_reasoning=True)
        if total + len(full) > length and last is not None:
            break
        kept = full if keep_reasoning else encoder.turn(turn, with_reasoning=False)
        spans.append(kept)
        total += len(kept)
        last = full
    spans[-1] = last
    return concatenate(spans)


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Item i is the batch of step i: (ids, loss weights), both [num_sequences, length]; padding weighs 0."""

    def __init__(self, phases: tuple[Phase, ...], tokens_per_step: int, context_weight: float) -> None:
        self.phases, self.tokens_per_step, self.context_weight = phases, tokens_per_step, context_weight
        self._encoder: TurnEncoder | None = None

    def __len__(self) -> int:
        return sum(phase.num_steps for phase in self.phases)

    def length(self, step: int) -> int:
        """Sequence length of a step."""
        for phase in self.phases:
            if step < phase.num_steps:
                return random.Random(f"length-{step}").choice(phase.lengths)
            step -= phase.num_steps
        raise IndexError(f"no step {step} after the last phase")

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        if self._encoder is None:
            self._encoder = TurnEncoder(load_tokenizer(), context_weight=self.context_weight)
        length = self.length(step)
        num_sequences = max(1, self.tokens_per_step // length)
        ids = torch.zeros(num_sequences, length, dtype=torch.long)
        weights = torch.zeros(num_sequences, length)
        for row in range(num_sequences):
            seed = FIRST_TRAINING_SEED + step * 64 + row
            span = fill_conversation(seed, length, self._encoder, keep_reasoning=row % 2 == 0)
            size = min(length, len(span))
            ids[row, :size] = torch.tensor(span.ids[:size])
            weights[row, :size] = torch.tensor(span.weights[:size])
        return ids, weights
