"""Choosing tokens from logits: greedy, or by Gumbel noise keyed by (seed, position, token).

The token of a row depends on its own logits and SamplingRow alone, never on the rest of the batch, and equal noise
keys give equal noise everywhere: the same request gives the same tokens however it is scheduled.

Every device takes the reference; a faster kernel for a device is chosen in this file.
"""

from __future__ import annotations

import torch

from turnkeep.kernels.sampling.logit_changes import change_logits
from turnkeep.kernels.sampling.noise import gumbel_noise, gumbel_noise_rows
from turnkeep.kernels.sampling.philox import philox4x32
from turnkeep.kernels.sampling.reference import InvalidLogitsError, sample_reference, top_logprobs_reference
from turnkeep.kernels.sampling.sampling_batch import GREEDY, SamplingBatch, SamplingRow
from turnkeep.kernels.sampling.verify import TreeToVerify, VerifiedTree, verify_trees

__all__ = [
    "GREEDY",
    "InvalidLogitsError",
    "SamplingBatch",
    "SamplingRow",
    "TreeToVerify",
    "VerifiedTree",
    "change_logits",
    "gumbel_noise",
    "gumbel_noise_rows",
    "philox4x32",
    "sample",
    "top_logprobs",
    "verify_trees",
]


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The chosen token of each row: logits [K, V] float32 -> ids [K] int64; logits are not changed.

    In this order: forbidden ids, logit bias, penalties, allowed tokens; greedy rows then take the largest logit (ties:
    lowest id). Other rows divide by the temperature, keep the tokens that pass min_p, then top_k, then top_p (taken of
    what is left, as vLLM and Hugging Face do), and take the largest of logit + noise. Raises InvalidLogitsError, naming
    the rows, where the largest logit is NaN or infinite (no token would mean anything), ValueError for sizes or ids
    that do not fit.
    """
    if logits.dim() != 2 or logits.shape[0] != len(batch.rows):
        raise ValueError(f"sample: logits {tuple(logits.shape)} for {len(batch.rows)} rows")
    return sample_reference(logits, batch)


def top_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities of the model itself: of the raw logits, before temperature, filters and penalties.

    logits [K, V], token_ids [K] -> (logprob of token_ids [K], the num_logprobs likeliest ids [K, n], their logprobs
    [K, n]), likeliest first, ties by the lowest id. n = min(num_logprobs, V). Raises ValueError for sizes that do
    not fit.
    """
    if logits.dim() != 2 or token_ids.shape != logits.shape[:1] or num_logprobs < 0:
        raise ValueError(
            f"top_logprobs: logits {tuple(logits.shape)}, ids {tuple(token_ids.shape)}, num_logprobs {num_logprobs}"
        )
    return top_logprobs_reference(logits, token_ids, num_logprobs)
