"""Definition of sampling, in plain PyTorch for any device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from turnkeep.kernels.sampling.likeliest import likeliest, num_kept
from turnkeep.kernels.sampling.logit_changes import change_logits
from turnkeep.kernels.sampling.noise import gumbel_noise, gumbel_noise_rows
from turnkeep.kernels.sampling.sampling_batch import SamplingBatch, SamplingRow

# Filters look at this many of the likeliest tokens first, at more of them only if they do not decide.
NUM_CANDIDATES = 64
LARGE_VOCABULARY, MANY_CANDIDATES = 8192, 256  # a second look at so many logits costs more than sorting a few more
MORE_CANDIDATES = 16  # times as many
# Noise is drawn for kept tokens alone while they are at most this share of the vocabulary (one draw serves four
# neighbours when the whole row is drawn).
MAX_KEPT_SHARE = 1 / 8


class InvalidLogitsError(ValueError):
    """Logits from which no token can be chosen; `rows` are the rows of the batch concerned."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        super().__init__(f"logits of rows {rows} have no finite largest value (NaN, infinite, or no token allowed)")


def sample_reference(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """See `turnkeep.kernels.sampling.sample`."""
    if batch.is_plain_greedy:
        return _largest(logits)[1]
    logits = change_logits(logits.to(torch.float32), batch.rows)
    largest, token_ids = _largest(logits)
    drawn = [index for index, row in enumerate(batch.rows) if row.temperature > 0.0]
    if len(drawn) == len(batch.rows):
        return _draw(logits, largest, batch.rows)
    if drawn:
        index = torch.tensor(drawn, dtype=torch.int64, device=logits.device)
        token_ids[index] = _draw(logits[index], largest[index], [batch.rows[index] for index in drawn])
    return token_ids


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value and its lowest index in each row; raises InvalidLogitsError where it is not finite."""
    values, token_ids = logits.max(dim=-1)  # NaN counts as largest
    invalid = [row for row, value in enumerate(values.tolist()) if not math.isfinite(value)]
    if invalid:
        raise InvalidLogitsError(invalid)
    return values, token_ids


def _draw(logits: torch.Tensor, largest: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sampled ids [K] of rows with a temperature; logits [K, V] and the largest of each row [K]."""
    temperatures = torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=logits.device)
    # Measured from the largest logit, a tiny temperature gives -inf for the others instead of inf - inf.
    scaled = (logits - largest[:, None]) / temperatures[:, None]
    seeds = torch.tensor([_signed(row.seed) for row in rows], dtype=torch.int64, device=scaled.device)
    positions = torch.tensor([row.position for row in rows], dtype=torch.int64, device=scaled.device)
    if not any(_is_filtered(row) for row in rows):
        return (scaled + gumbel_noise_rows(seeds, positions, scaled.shape[1])).argmax(-1)
    ids, valid = _kept(scaled, rows)
    if ids.shape[1] > MAX_KEPT_SHARE * scaled.shape[1]:
        dropped = torch.ones_like(scaled, dtype=torch.bool).scatter_(1, ids, ~valid)
        scores = scaled + gumbel_noise_rows(seeds, positions, scaled.shape[1])
        return scores.masked_fill_(dropped, -torch.inf).argmax(-1)
    scores = scaled.gather(1, ids) + gumbel_noise(seeds[:, None], positions[:, None], ids)
    scores.masked_fill_(~valid, -torch.inf)
    best = scores.amax(-1, keepdim=True)
    return ids.masked_fill(scores < best, scaled.shape[1]).amin(-1)  # the lowest id among equal scores


def _kept(scaled: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the tokens that the filters keep and which of them count, [K, n] each, n the largest kept set."""
    vocab_size = scaled.shape[1]
    length = NUM_CANDIDATES if vocab_size < LARGE_VOCABULARY else MANY_CANDIDATES
    counts = None
    while counts is None:
        values, ids = likeliest(scaled, length if 2 * length < vocab_size else vocab_size)
        counts = num_kept(scaled, values, rows)
        length *= MORE_CANDIDATES
    ids = ids[:, : int(counts.max())]
    return ids, torch.arange(ids.shape[1], device=ids.device) < counts[:, None]


def _is_filtered(row: SamplingRow) -> bool:
    return row.top_k > 0 or row.top_p < 1.0 or row.min_p > 0.0


def _signed(seed: int) -> int:
    """The int64 that has the bits of a 64-bit seed."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed


def top_logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `turnkeep.kernels.sampling.top_logprobs`."""
    logprobs = logits.to(torch.float32).log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None]).squeeze(1)
    _, ids = likeliest(logits, min(num_logprobs, logits.shape[1]))
    return chosen, ids, logprobs.gather(1, ids)
