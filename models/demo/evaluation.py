"""Evaluates the demo model on unseen conversations, turn by turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from turnkeep.models.demo.dense import CHUNK, DemoModel
from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.rendering import TokenSpan, TurnEncoder, load_tokenizer, render_system
from turnkeep.models.demo.script import Conversation, Turn

FAR_TURNS = 10
TOKENS_PER_BATCH = 16384


@dataclass
class Case:
    """One turn to evaluate: what a client's prompt holds before it, and the turn as it should be."""

    script: Conversation
    turn: Turn
    num_prompt_tokens: int
    ids: list[int]
    written: list[bool]  # per token: the agent has to write it

    @property
    def is_far_recall(self) -> bool:
        """Whether the turn needs a fact that nobody mentioned for `FAR_TURNS` turns."""
        return self.turn.mentioned_turns_ago is not None and self.turn.mentioned_turns_ago >= FAR_TURNS


@dataclass
class Outcome:
    """Whether greedy decoding writes the whole turn as expected, and how often the MTP head agrees with it."""

    case: Case
    exact: bool
    num_agreeing: int
    num_predicted: int


def cases_of(script: Conversation, encoder: TurnEncoder) -> Iterable[Case]:
    """Every turn of a conversation, with the closed turns rendered without reasoning."""
    history = encoder.context(render_system(script.system, script.tools))
    for turn in script.turns:
        full = encoder.turn(turn, with_reasoning=True)
        ids = [*history.ids, *full.ids]
        written = [False] * len(history) + [weight >= 1.0 for weight in full.weights]
        yield Case(script, turn, len(history), ids, written)
        history.extend(TokenSpan(*_plain(encoder.turn(turn, with_reasoning=False))))


def _plain(span: TokenSpan) -> tuple[list[int], list[float]]:
    return span.ids, span.weights


@torch.no_grad()
def run_cases(model: DemoModel, cases: Sequence[Case]) -> list[Outcome]:
    """Teacher-forced forward of every case. All argmaxes right = greedy decoding writes exactly this turn."""
    outcomes: list[Outcome] = []
    pending: list[Case] = []
    for case in sorted(cases, key=lambda c: len(c.ids)):
        longest = -(-len(case.ids) // CHUNK) * CHUNK
        if pending and longest * (len(pending) + 1) > TOKENS_PER_BATCH:
            outcomes += _run_batch(model, pending)
            pending = []
        pending.append(case)
    return outcomes + (_run_batch(model, pending) if pending else [])


def _run_batch(model: DemoModel, cases: list[Case]) -> list[Outcome]:
    length = -(-max(len(case.ids) for case in cases) // CHUNK) * CHUNK
    ids = torch.zeros(len(cases), length, dtype=torch.long)
    written = torch.zeros(len(cases), length, dtype=torch.bool)
    for row, case in enumerate(cases):
        ids[row, : len(case.ids)] = torch.tensor(case.ids)
        written[row, : len(case.ids)] = torch.tensor(case.written)
    hidden, ahead = model(ids)
    outcomes = []
    for row, case in enumerate(cases):
        places = written[row].nonzero()[:, 0]
        predicted = model.lm_head(hidden[row, places - 1]).argmax(-1)
        drafted = model.lm_head(ahead[row, places - 2]).argmax(-1)
        exact = bool((predicted == ids[row, places]).all())
        outcomes.append(Outcome(case, exact, int((drafted == predicted).sum()), len(places)))
    return outcomes


def _share(outcomes: Sequence[Outcome]) -> str:
    if not outcomes:
        return "-"
    return f"{sum(outcome.exact for outcome in outcomes) / len(outcomes):.3f}"


def validate(model: DemoModel, num_conversations: int = 6, num_turns: int = 36) -> str:
    """Short text with the numbers that matter while training (teacher-forced exact turns)."""
    encoder = TurnEncoder(load_tokenizer(), context_weight=0.0)
    scripts = [conversation(900_000 + seed, num_turns) for seed in range(num_conversations)]
    cases = [case for script in scripts for case in cases_of(script, encoder)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outcomes = run_cases(model, [c for c in cases if c.turn.index % 2 or c.is_far_recall])
    agreement = sum(o.num_agreeing for o in outcomes) / sum(o.num_predicted for o in outcomes)
    recall = [o for o in outcomes if o.case.turn.mentioned_turns_ago is not None]
    far = [o for o in recall if o.case.is_far_recall]
    tools = [o for o in outcomes if o.case.turn.expected_calls and o not in recall]
    kinds = sorted({o.case.turn.kind for o in outcomes})
    by_kind = " ".join(f"{kind} {_share([o for o in outcomes if o.case.turn.kind == kind])}" for kind in kinds)
    return f"recall {_share(recall)} far {_share(far)} tools {_share(tools)} mtp {agreement:.3f} | {by_kind}"
