"""Trains the demo model's MTP block alone to go on from its own output: `python -m turnkeep.models.demo.head_training`.

A draft is several tokens deep, and past the first the block reads its own hidden states, which training with the
model's alone never showed it. Here it is unrolled as a draft is and learns what the model, which stays as it is, would
say at every depth. Minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from turnkeep.models.demo.batches import Batches
from turnkeep.models.demo.dense import Attention, DemoModel, load_model
from turnkeep.models.demo.rendering import DIRECTORY
from turnkeep.models.demo.training import export, learning_rate, make_optimizer, parse_phases

DEPTH = 5


def unrolled(model: DemoModel, ids: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
    """Hidden states of the block after 1 to `depth` drafted tokens: each [batch, length, hidden size].

    Of output d, position i has read the model's hidden states up to i and the tokens up to i + d; it predicts token
    i + d + 1. The block attends to what it makes of the model's own states, and to the drafted tokens of its own path.
    """
    first, second = model.mtp.layers
    enorm, hnorm, eh_proj, norm = (first.get_submodule(name) for name in ("enorm", "hnorm", "eh_proj", "norm"))
    attention = first.get_submodule("mixer")
    assert isinstance(attention, Attention)
    embedded = model.backbone.embeddings(ids)
    later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
    entries: list[tuple[Tensor, Tensor]] = []
    outputs: list[Tensor] = []
    for level in range(1, depth + 1):
        previous = outputs[-1] if outputs else hidden
        joined: Tensor = eh_proj(torch.cat([enorm(torch.roll(embedded, -level, dims=1)), hnorm(previous)], dim=-1))
        queries, keys, values = _heads(attention, norm(joined))
        entries.append((keys, values))
        mixed = _attend(queries, entries, later)
        x = second(joined + attention.o_proj(mixed.transpose(1, 2).flatten(2)))
        outputs.append(second.get_submodule("final_layernorm")(x))
    return outputs


def _heads(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, heads, length, head dim] each, keys and values repeated for their query heads."""
    q, k, v = (
        proj(x).reshape(*x.shape[:2], -1, attention.head_dim).transpose(1, 2)
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    group = attention.num_heads // attention.num_kv_heads
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def _attend(queries: Tensor, entries: list[tuple[Tensor, Tensor]], later: Tensor) -> Tensor:
    """Attention to the first entries at or before a position, and to the later ones at the position itself."""
    scale = queries.shape[-1] ** -0.5
    keys, values = entries[0]
    scores = (queries @ keys.transpose(-1, -2) * scale).masked_fill(later, -math.inf)
    own = [(queries * key).sum(-1, keepdim=True) * scale for key, _ in entries[1:]]
    weights = torch.cat([scores, *own], dim=-1).float().softmax(-1).to(values.dtype)
    mixed = weights[..., : scores.shape[-1]] @ values
    for index, (_, value) in enumerate(entries[1:], start=scores.shape[-1]):
        mixed = mixed + weights[..., index : index + 1] * value
    return mixed


def draft_losses(model: DemoModel, ids: Tensor, weights: Tensor, depth: int) -> list[Tensor]:
    """By depth, the mean divergence of the block's prediction from the model's where the agent writes."""
    with torch.no_grad():
        embedded = model.backbone.embeddings(ids)
        for layer in model.backbone.layers:
            embedded = layer(embedded)
        hidden = model.backbone.norm_f(embedded)
    losses = []
    for level, output in enumerate(unrolled(model, ids, hidden, depth), start=1):
        chosen = weights[:, level + 1 :] > 0
        with torch.no_grad():
            wanted = model.lm_head(hidden[:, level:-1][chosen]).float().log_softmax(-1)
        drafted = model.lm_head(output[:, : -level - 1][chosen]).float().log_softmax(-1)
        losses.append(F.kl_div(drafted, wanted, reduction="batchmean", log_target=True))
    return losses


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", type=Path, default=DIRECTORY, help="where model.safetensors goes")
    parser.add_argument("--phases", default=PHASES, help="STEPSxLENGTH[+LENGTH...],... (default: %(default)s)")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--export-every", type=int, default=100, help="steps between exports")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load_model(DIRECTORY).requires_grad_(False)
    model.mtp.requires_grad_(True)
    optimizer = make_optimizer(model.mtp)
    batches = Batches(parse_phases(args.phases), args.tokens_per_step, 0.0)
    loader = DataLoader(batches, batch_size=None, sampler=range(len(batches)), num_workers=1, prefetch_factor=4)
    for step, (ids, weights) in enumerate(track(loader, "training the block", total=len(batches)), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, len(batches), args.learning_rate)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = draft_losses(model, ids, weights, DEPTH)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(torch.stack(losses).mean())
        nn.utils.clip_grad_norm_(model.mtp.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: " + " ".join(f"{float(loss.detach()):.4f}" for loss in losses), flush=True)
        if step % args.export_every == 0 or step == len(batches):
            export(model, args.export)


PHASES = "220x512"

if __name__ == "__main__":
    main()
