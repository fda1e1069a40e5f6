"""What a request asks to change in its logits before a token is chosen: forbidden ids, biases, penalties, a grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from turnkeep.kernels.sampling.sampling_batch import SamplingRow


def change_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """A changed copy of logits [K, V] float32, or logits themselves when no row changes them.

    Raises ValueError for a token id outside the vocabulary.
    """
    changed = [index for index, row in enumerate(rows) if row.changes_logits]
    if not changed:
        return logits
    logits = logits.clone()
    for index in changed:
        _change_row(logits[index], rows[index])
    return logits


def _change_row(logits: torch.Tensor, row: SamplingRow) -> None:
    if row.forbidden_ids:
        logits[_ids(row.forbidden_ids, logits)] = -torch.inf
    if row.logit_bias:
        bias = torch.tensor(list(row.logit_bias.values()), dtype=logits.dtype, device=logits.device)
        logits[_ids(list(row.logit_bias), logits)] += bias
    if row.repetition_penalty != 1.0:
        seen = torch.unique(_ids([*row.prompt_ids, *row.output_ids], logits))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / row.repetition_penalty, values * row.repetition_penalty)
    if row.output_ids and (row.frequency_penalty != 0.0 or row.presence_penalty != 0.0):
        seen, counts = torch.unique(_ids(row.output_ids, logits), return_counts=True)
        logits[seen] -= row.frequency_penalty * counts.to(logits.dtype) + row.presence_penalty
    if row.allowed_bits is not None:
        logits.masked_fill_(_not_allowed(row.allowed_bits, logits), -torch.inf)


def _not_allowed(bits: bytes, logits: torch.Tensor) -> torch.Tensor:
    """The tokens without their bit as bool [V]. Turned round while they are bits: there are eight times fewer."""
    if 8 * len(bits) < logits.shape[0]:
        raise ValueError(f"{8 * len(bits)} bits of allowed tokens for a vocabulary of {logits.shape[0]}")
    missing = np.unpackbits(~np.frombuffer(bits, dtype=np.uint8), count=logits.shape[0], bitorder="little")
    return torch.from_numpy(missing.view(np.bool_)).to(logits.device)


def _ids(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)
    if len(token_ids) and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[0]:
        raise ValueError(
            f"token ids up to {int(ids.max())} (from {int(ids.min())}) outside a vocabulary of {len(logits)}"
        )
    return ids
