"""Evaluates the demo model on conversations it never saw: `python -m turnkeep.models.demo.evaluation`.

Every turn is decided by greedy decoding after the true history, as a client would send it. A teacher-forced pass
finds the turns that greedy decoding writes exactly as scripted; the others are generated and scored by what counts:
the calls and the facts of the answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from turnkeep.models.demo.dense import CHUNK, DemoModel, load_model
from turnkeep.models.demo.generator import conversation
from turnkeep.models.demo.playing import Generate, play_turn, reference_generate
from turnkeep.models.demo.rendering import DIRECTORY, TurnEncoder, load_tokenizer, render_system
from turnkeep.models.demo.script import Conversation, Turn

FAR_TURNS = 10
TOKENS_PER_BATCH = 16384
VALIDATION_SEED = 900_000
EVALUATION_SEED = 500_000


@dataclass
class Case:
    """One turn to evaluate: what a client's prompt holds before it, and the turn as it should be."""

    script: Conversation
    turn: Turn
    ids: list[int]
    written: list[bool]  # per token: the agent has to write it

    @property
    def is_recall(self) -> bool:
        """Whether the turn needs a fact told in an earlier turn."""
        return self.turn.mentioned_turns_ago is not None

    @property
    def is_far_recall(self) -> bool:
        """Whether it needs one that nobody mentioned for `FAR_TURNS` turns."""
        return self.turn.mentioned_turns_ago is not None and self.turn.mentioned_turns_ago >= FAR_TURNS


@dataclass
class Outcome:
    """How a turn went. `exact`: greedy decoding writes the scripted tokens. MTP counts are over written tokens."""

    case: Case
    exact: bool
    num_agreeing: int
    num_predicted: int
    calls_right: bool = True
    facts_right: bool = True
    text: str = ""

    @property
    def right(self) -> bool:
        """Calls and facts as expected."""
        return self.calls_right and self.facts_right


def cases_of(script: Conversation, encoder: TurnEncoder) -> Iterable[Case]:
    """Every turn of a conversation, with the closed turns rendered without reasoning."""
    history = encoder.context(render_system(script.system, script.tools)).ids
    for turn in script.turns:
        full = encoder.turn(turn, with_reasoning=True)
        written = [False] * len(history) + [weight >= 1.0 for weight in full.weights]
        yield Case(script, turn, [*history, *full.ids], written)
        history += encoder.turn(turn, with_reasoning=False).ids


@torch.no_grad()
def run_cases(
    model: DemoModel, cases: Sequence[Case], on_batch: Callable[[int], None] = lambda num_cases: None
) -> list[Outcome]:
    """Teacher-forced forward of every case. All argmaxes right = greedy decoding writes exactly this turn."""
    outcomes: list[Outcome] = []
    pending: list[Case] = []
    for case in sorted(cases, key=lambda c: len(c.ids)):
        longest = -(-len(case.ids) // CHUNK) * CHUNK
        if pending and longest * (len(pending) + 1) > TOKENS_PER_BATCH:
            outcomes += _run_batch(model, pending)
            on_batch(len(pending))
            pending = []
        pending.append(case)
    if pending:
        outcomes += _run_batch(model, pending)
        on_batch(len(pending))
    return outcomes


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


def generate_deviating(outcomes: Sequence[Outcome], generate: Generate) -> None:
    """Really generate the turns that are not exact, and score calls and facts."""
    for outcome in outcomes:
        if outcome.exact:
            continue
        case = outcome.case
        played = play_turn(case.script, case.turn.index, generate)
        outcome.calls_right = played.calls == [(c.name, c.arguments) for c in case.turn.expected_calls]
        outcome.facts_right = all(fact in played.answer for fact in case.turn.expected_facts)
        outcome.text = played.text


@dataclass
class Report:
    """Shares are 0..1; every share stands next to the number of turns (or tokens) it is over."""

    num_conversations: int
    num_turns: int
    exact_tool_calls: float
    num_tool_turns: int
    num_needless_calls: int
    far_recall: float
    num_far_recalls: int
    near_recall: float
    num_near_recalls: int
    exact_turns: float
    right_turns: float
    mtp_agreement: float
    num_mtp_tokens: int


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")


def report_of(outcomes: Sequence[Outcome], num_conversations: int) -> Report:
    """The numbers of the model card."""
    tools = [o for o in outcomes if o.case.turn.expected_calls]
    far = [o for o in outcomes if o.case.is_far_recall]
    near = [o for o in outcomes if o.case.is_recall and not o.case.is_far_recall]
    num_tokens = sum(o.num_predicted for o in outcomes)
    return Report(
        num_conversations=num_conversations,
        num_turns=len(outcomes),
        exact_tool_calls=_share([o.calls_right for o in tools]),
        num_tool_turns=len(tools),
        num_needless_calls=sum(not o.calls_right for o in outcomes if not o.case.turn.expected_calls),
        far_recall=_share([o.right for o in far]),
        num_far_recalls=len(far),
        near_recall=_share([o.right for o in near]),
        num_near_recalls=len(near),
        exact_turns=_share([o.exact for o in outcomes]),
        right_turns=_share([o.right for o in outcomes]),
        mtp_agreement=sum(o.num_agreeing for o in outcomes) / num_tokens,
        num_mtp_tokens=num_tokens,
    )


def validate(model: DemoModel, num_conversations: int = 6, num_turns: int = 36) -> str:
    """Short text with the shares of exact turns, for the training log."""
    encoder = TurnEncoder(load_tokenizer(), context_weight=0.0)
    scripts = [conversation(VALIDATION_SEED + seed, num_turns) for seed in range(num_conversations)]
    cases = [case for script in scripts for case in cases_of(script, encoder)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outcomes = run_cases(model, [c for c in cases if c.turn.index % 2 or c.is_far_recall])
    report = report_of(outcomes, num_conversations)
    recalls = _share([o.exact for o in outcomes if o.case.is_recall])
    far = _share([o.exact for o in outcomes if o.case.is_far_recall])
    tools = _share([o.exact for o in outcomes if o.case.turn.expected_calls and not o.case.is_recall])
    kinds = sorted({o.case.turn.kind for o in outcomes})
    by_kind = " ".join(f"{k} {_share([o.exact for o in outcomes if o.case.turn.kind == k]):.3f}" for k in kinds)
    return f"recall {recalls:.3f} far {far:.3f} tools {tools:.3f} mtp {report.mtp_agreement:.3f} | {by_kind}"


def evaluate(
    directory: Path, num_conversations: int, num_turns: int, first_seed: int, *, bfloat16: bool
) -> list[Outcome]:
    """Every turn of `num_conversations` unseen conversations. `bfloat16` runs the teacher-forced pass in bfloat16."""
    model = load_model(directory)
    encoder = TurnEncoder(load_tokenizer(directory), context_weight=0.0)
    generate = reference_generate(directory)
    outcomes: list[Outcome] = []
    autocast = torch.autocast("cpu", dtype=torch.bfloat16) if bfloat16 else contextlib.nullcontext()
    for seed in track(range(first_seed, first_seed + num_conversations), "evaluating", console=Console(stderr=True)):
        cases = list(cases_of(conversation(seed, num_turns), encoder))
        with autocast:
            new = run_cases(model, cases)
        generate_deviating(new, generate)
        outcomes += new
    return outcomes


def print_report(outcomes: Sequence[Outcome], report: Report, console: Console) -> None:
    """The report, the share of right turns of every kind, and what went wrong."""
    table = Table("kind", "turns", "right", "exact")
    for kind in sorted({o.case.turn.kind for o in outcomes}):
        chosen = [o for o in outcomes if o.case.turn.kind == kind]
        right, exact = _share([o.right for o in chosen]), _share([o.exact for o in chosen])
        table.add_row(kind, str(len(chosen)), f"{right:.4f}", f"{exact:.4f}")
    console.print(table)
    for outcome in outcomes:
        if not outcome.right:
            turn = outcome.case.turn
            console.print(f"wrong: {turn.user!r} expected {turn.answer!r} got {outcome.text!r}", markup=False)
    console.print_json(json.dumps(asdict(report)))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DIRECTORY, help="model folder (default: the bundled one)")
    parser.add_argument("--conversations", type=int, default=30)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED, help="first seed; below 1000000 is unseen")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bfloat16", action="store_true", help="teacher-forced pass in bfloat16 instead of float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    outcomes = evaluate(args.model, args.conversations, args.turns, args.seed, bfloat16=args.bfloat16)
    print_report(outcomes, report_of(outcomes, args.conversations), Console())


if __name__ == "__main__":
    main()
