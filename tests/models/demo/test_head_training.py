"""Training of the MTP block on its own output: unrolled in training as the engine runs it when a draft grows, and
nothing but the block learns."""

from __future__ import annotations

import random

import torch

from turnkeep.models.checkpoint_files import TensorsInMemory
from turnkeep.models.config import ModelConfig
from turnkeep.models.demo.batches import Batches, Phase
from turnkeep.models.demo.dense import load_config, load_model
from turnkeep.models.demo.head_training import draft_losses, unrolled
from turnkeep.models.demo.rendering import DIRECTORY
from turnkeep.models.draft_heads.loading import fill_draft_head
from turnkeep.models.draft_heads.paged_entries import PagedEntries


def test_the_unrolled_block_is_the_draft_head_along_the_text() -> None:
    model, config = load_model(DIRECTORY), ModelConfig.from_dict(load_config(DIRECTORY))
    head = fill_draft_head(config, TensorsInMemory(model.state_dict()), dtype="float32")
    ids = torch.tensor([random.Random(1).choices(range(11, config.vocab_size), k=64)])
    with torch.no_grad():
        hidden, ahead = model(ids)
        levels = unrolled(model, ids, hidden, 3)
    torch.testing.assert_close(levels[0][:, :-1], ahead[:, :-1], atol=1e-4, rtol=1e-4)
    embedded, table = model.backbone.embeddings(ids)[0].detach(), torch.arange(8)[None]
    for position in (5, 40):
        pool = torch.zeros(2, 8, 16, config.num_kv_heads, config.head_dim)
        states = hidden[0, : position + 1]  # before the tokens 1 to position + 1
        for level, expected in enumerate(levels, start=1):
            start, end = (1, position + 2) if level == 1 else (position + level, position + level + 1)
            positions = torch.arange(start, end)
            attention = PagedEntries([pool], table, [end - start], [start], 0, positions)
            states = head(embedded[start:end], states, positions, attention)[-1:]
            torch.testing.assert_close(states[0], expected[0, position], atol=1e-4, rtol=1e-4)


def test_a_step_improves_the_drafts_and_leaves_the_model_alone() -> None:
    model = load_model(DIRECTORY).requires_grad_(False)
    torch.manual_seed(2)
    for parameter in model.mtp.parameters():
        parameter.requires_grad_(True)
        parameter.data += 0.02 * torch.randn_like(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids, weights = Batches((Phase(1, (256,)),), 512, 0.0)[0]
    optimizer = torch.optim.SGD(model.mtp.parameters(), lr=0.001)
    losses = draft_losses(model, ids, weights, 3)
    torch.autograd.backward(torch.stack(losses).sum())
    optimizer.step()
    with torch.no_grad():
        after = draft_losses(model, ids, weights, 3)
    assert float(sum(after)) < float(sum(losses).detach())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("mtp.") for name in changed)
