"""What the mixers of one forward pass share: the packed batch split once into its decode and its prefill part.

Built once a step by the decoder, so that no layer repeats the work. Knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from turnkeep.kernels.forward_batch import CacheTensors, ForwardBatch, StateExport


@dataclass(slots=True, frozen=True)
class RecurrentStep:
    """The state rows of a step: the first `num_decodes` requests take the single-token update, those after them are
    trees, the rest takes the scan."""

    num_decodes: int
    num_prefills: int
    first_prefill: int  # tokens before those of the first prefill; before them come the nodes of trees
    decode_rows: torch.Tensor  # [num_decodes] int64
    tree_rows: torch.Tensor  # [trees] int64, read only
    prefill_rows: torch.Tensor  # [num_prefills] int64
    prefill_seq_lens: tuple[int, ...]
    prefill_context_lens: tuple[int, ...]
    prefill_exports: tuple[StateExport, ...]  # `sequence` counts from the first prefill
    decode_exports: tuple[torch.Tensor, torch.Tensor] | None  # state rows (from, to), copied after the update


@dataclass(slots=True, frozen=True)
class DecoderStep:
    """One forward pass as the mixers see it."""

    batch: ForwardBatch
    cache: CacheTensors
    recurrent: RecurrentStep | None  # None without recurrent layers
    rotary: tuple[torch.Tensor, torch.Tensor] | None  # cosines and sines [T, rotary_dim / 2] float32
    sliding_rotary: tuple[torch.Tensor, torch.Tensor] | None = None  # those of sliding layers


def split_recurrent(batch: ForwardBatch, *, on_grid: bool = False) -> RecurrentStep:
    """The recurrent part of a packed batch. With states on the grid single tokens take the scan too.

    Raises ValueError when the batch carries no state rows, or has trees where states are on the grid.
    """
    rows = batch.state_rows
    if rows is None:
        raise ValueError("the batch has no state rows, but the model has recurrent layers")
    if on_grid and batch.num_trees:
        raise ValueError("draft trees cannot be verified on states in 16 bits")
    num_decodes, exports = 0 if on_grid else batch.num_decodes, batch.exports
    num_others = num_decodes + batch.num_trees
    decode_exports = None
    if num_decodes and exports:
        copies = [export for export in exports if export.sequence < num_decodes]
        if copies:
            sequences = torch.tensor([export.sequence for export in copies], dtype=torch.int64, device=rows.device)
            targets = torch.tensor([export.row for export in copies], dtype=torch.int64, device=rows.device)
            decode_exports = (rows[sequences], targets)
    if num_others and exports:
        exports = tuple(
            StateExport(export.sequence - num_others, export.length, export.row)
            for export in exports
            if export.sequence >= num_others
        )
    return RecurrentStep(
        num_decodes=num_decodes,
        num_prefills=len(batch.seq_lens) - num_others,
        first_prefill=num_decodes + batch.num_tree_nodes,
        decode_rows=rows[:num_decodes],
        tree_rows=rows[num_decodes:num_others],
        prefill_rows=rows[num_others:],
        prefill_seq_lens=batch.seq_lens[num_others:],
        prefill_context_lens=batch.context_lens[num_others:],
        prefill_exports=exports,
        decode_exports=decode_exports,
    )
