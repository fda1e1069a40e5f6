"""Trains the demo model from scratch on generated conversations: `python -m turnkeep.models.demo.training`.

Resumable from a state file, exports the checkpoint at intervals and at the end. On two CPU cores the whole run
takes about an hour.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from turnkeep.models.demo.batches import Batches, Phase
from turnkeep.models.demo.dense import DemoModel, initialize, load_config
from turnkeep.models.demo.evaluation import validate
from turnkeep.models.demo.rendering import DIRECTORY

SEED = 20
MTP_LOSS_WEIGHT = 0.3
CONTEXT_LOSS_WEIGHT = 0.0
WARMUP_STEPS = 100

Weighted = tuple[Tensor, Tensor, Tensor]


def parse_phases(text: str) -> tuple[Phase, ...]:
    """`1500x512,600x512+1024` -> two phases: 1500 steps of 512 tokens, 600 steps of either length."""
    phases = []
    for item in text.split(","):
        steps, _, lengths = item.partition("x")
        phases.append(Phase(int(steps), tuple(int(length) for length in lengths.split("+"))))
    return tuple(phases)


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to 2 % of the peak."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only."""
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "conv1d" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() <= 1 or "conv1d" in n]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), fused=True)


def select(hidden: Tensor, ids: Tensor, weights: Tensor, ahead: int) -> Weighted:
    """(hidden states, target ids, loss weights) of the positions whose token `ahead` later carries loss."""
    targets, weight = ids[:, ahead:], weights[:, ahead:]
    chosen = weight > 0
    return hidden[:, :-ahead][chosen], targets[chosen], weight[chosen]


def head_loss(model: DemoModel, selected: Weighted) -> Tensor:
    """Weighted mean cross-entropy of the shared head."""
    hidden, targets, weight = selected
    logits = model.lm_head(hidden).float()
    return (F.cross_entropy(logits, targets, reduction="none") * weight).sum() / weight.sum()


def export(model: DemoModel, directory: Path) -> None:
    """Write `model.safetensors` in bfloat16, complete or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    partial = directory / "model.safetensors.part"
    save_file(tensors, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, directory / "model.safetensors")


class Trainer:
    """Model, optimizer and step counter, saved together in one state file."""

    def __init__(self, batches: Batches, peak: float, state_file: Path, compiled: bool) -> None:
        self.model = DemoModel(load_config(DIRECTORY))
        initialize(self.model, SEED)
        self.optimizer = make_optimizer(self.model)
        self.batches, self.peak, self.state_file = batches, peak, state_file
        self.step = self.num_tokens = 0
        if state_file.exists():
            state = torch.load(state_file, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.num_tokens = state["step"], state["num_tokens"]
        self._forward: Any = torch.compile(self.model, dynamic=False) if compiled else self.model

    def save(self) -> None:
        """Write the state file, complete or not at all."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "step": self.step, "num_tokens": self.num_tokens}  # fmt: skip
        partial = self.state_file.with_suffix(".part")
        torch.save(state, partial)
        os.replace(partial, self.state_file)

    def train_step(self, ids: Tensor, weights: Tensor) -> tuple[float, float]:
        """One update; returns the losses of the main and of the MTP prediction."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, len(self.batches), self.peak)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, ahead = self._forward(ids)
            main = head_loss(self.model, select(hidden, ids, weights, 1))
            mtp = head_loss(self.model, select(ahead, ids, weights, 2))
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(main + MTP_LOSS_WEIGHT * mtp)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.num_tokens += ids.numel()
        return float(main.detach()), float(mtp.detach())

    def remaining(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches still to come, made by one background process."""
        steps = range(self.step, len(self.batches))
        yield from DataLoader(self.batches, batch_size=None, sampler=steps, num_workers=1, prefetch_factor=8)


def run(trainer: Trainer, progress: Progress, export_to: Path, every_s: float) -> None:
    """Train to the end; every `every_s` seconds validate, save and export."""
    task = progress.add_task("training", total=len(trainer.batches), completed=trainer.step, note="")
    started = last = time.monotonic()
    first_tokens = trainer.num_tokens
    for ids, weights in trainer.remaining():
        main, mtp = trainer.train_step(ids, weights)
        now = time.monotonic()
        rate = (trainer.num_tokens - first_tokens) / (now - started)
        note = f"loss {main:.4f} mtp {mtp:.4f} {rate:,.0f} tok/s {trainer.num_tokens / 1e6:.2f}M"
        progress.update(task, completed=trainer.step, note=note)
        if not progress.console.is_terminal and trainer.step % 50 == 0:
            progress.console.print(f"step {trainer.step} length {ids.shape[1]} {note}")
        if now - last > every_s or trainer.step == len(trainer.batches):
            trainer.save()
            export(trainer.model, export_to)
            progress.console.print(f"step {trainer.step}: {validate(trainer.model)}")
            last = time.monotonic()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="state file to resume from and to write")
    parser.add_argument("--export", type=Path, default=DIRECTORY, help="where model.safetensors goes")
    parser.add_argument("--phases", default=PHASES, help="STEPSxLENGTH[+LENGTH...],... (default: %(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=5120)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--every-s", type=float, default=300.0, help="seconds between validations and exports")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches = Batches(parse_phases(args.phases), args.tokens_per_step, CONTEXT_LOSS_WEIGHT)
    trainer = Trainer(batches, args.learning_rate, args.state, compiled=not args.no_compile)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(TextColumn("{task.description}"), *columns) as progress:
        run(trainer, progress, args.export, args.every_s)


PHASES = "980x512,350x1024,1320x1024+1024+2560"

if __name__ == "__main__":
    main()
