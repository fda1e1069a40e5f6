"""Which tokens a draft head proposes at a node: those the target would choose if its logits were the head's.

For greedy requests these are the likeliest. For others the head adds the very noise that the target will add at that
position (Gumbel noise keyed by seed, position and token; Daliri et al. 2024, coupling without communication), so that
both choose alike far more often than their distributions agree. What is proposed never changes what is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from turnkeep.kernels.sampling.noise import gumbel_noise, gumbel_noise_rows
from turnkeep.scheduler.drafts import TreeGrant
from turnkeep.scheduler.request import SamplingParams

NUM_CANDIDATES = 64  # tokens of a node that are looked at where there is noise
MAX_DRAWN_AT_ONCE = 4096  # tokens of a vocabulary; most of a draw's cost is its calls, up to some thousand numbers

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
_INT64 = 1 << 63


class ChildChoice:
    """The choice of one growth: how the tokens of each of R requests are chosen, from their roots' positions on."""

    def __init__(self, samplings: Sequence[SamplingParams], roots: Ints, grant: TreeGrant) -> None:
        """roots [R]: positions of the roots; the noise of a node's children is that of their own positions."""
        self._num_children = grant.max_children
        self._max_depth = grant.max_depth
        self._is_noisy = any(sampling.temperature > 0.0 for sampling in samplings)
        if not self._is_noisy:
            return
        self._is_greedy = np.array([sampling.temperature == 0.0 for sampling in samplings])[:, None, None]
        temperatures = [sampling.temperature or 1.0 for sampling in samplings]
        self._inverse_temperatures = (1.0 / torch.tensor(temperatures, dtype=torch.float32))[:, None, None]
        seeds = [(sampling.seed + _INT64) % (2 * _INT64) - _INT64 for sampling in samplings]
        self._seeds = torch.tensor(seeds, dtype=torch.int64)
        self._roots = torch.from_numpy(roots)
        self._filters = _Filters(samplings) if any(map(_is_filtered, samplings)) else None
        self._noise_of_all: Floats | None = None  # [R, depths, V]

    def children(self, logits: torch.Tensor, depth: int) -> tuple[Ints, Floats]:
        """The best children of F nodes of every request: token ids and logs of their probabilities, [R, F, K] each.

        logits [R, F, V] float32; depth: that of the children, 1 for those of the roots.
        """
        num_children = min(self._num_children, logits.shape[2])
        if not self._is_noisy:
            values, ids = logits.log_softmax(-1).topk(num_children, dim=-1)
            return ids.cpu().numpy(), values.cpu().numpy()
        scaled = logits * self._inverse_temperatures.to(logits.device)
        best, best_ids = scaled.topk(min(NUM_CANDIDATES, logits.shape[2]), dim=-1)
        scores: Floats = (best - scaled.logsumexp(-1, keepdim=True)).cpu().numpy()  # [R, F, C]
        ids_of_best = best_ids.cpu()
        if self._filters is not None:
            scores = self._filters.applied(scores)
        noise = self._noise(ids_of_best, depth, logits.shape[2])
        perturbed = scores + np.where(self._is_greedy, np.float32(0.0), noise)
        order = np.argsort(-perturbed, axis=-1, kind="stable")[..., :num_children]
        chosen = np.take_along_axis(perturbed, order, -1)
        # How likely the target's scores, which differ by the head's errors, put another candidate first: as likely as
        # if those errors were Gumbel noise too. On the bundled model other scales than one gave fewer tokens a step.
        total = np.log(np.exp(perturbed - chosen[..., :1]).sum(-1, keepdims=True)) + chosen[..., :1]
        return np.take_along_axis(ids_of_best.numpy(), order, -1), chosen - np.where(self._is_greedy, 0.0, total)

    def _noise(self, token_ids: torch.Tensor, depth: int, vocab_size: int) -> Floats:
        """Of the candidates [R, F, C]: drawn for all depths and tokens at once where these are few."""
        if vocab_size > MAX_DRAWN_AT_ONCE:
            positions = (self._roots + depth)[:, None, None]
            return gumbel_noise(self._seeds[:, None, None], positions, token_ids).numpy()
        if self._noise_of_all is None:
            positions = self._roots[:, None] + torch.arange(1, self._max_depth + 1)
            seeds = self._seeds[:, None].expand_as(positions)
            rows = gumbel_noise_rows(seeds.flatten(), positions.flatten(), vocab_size)
            self._noise_of_all = rows.view(*positions.shape, vocab_size).numpy()
        requests = np.arange(len(self._roots))[:, None, None]
        noise: Floats = self._noise_of_all[requests, depth - 1, token_ids.numpy()]
        return noise


class _Filters:
    """min_p, top_k and top_p over a node's candidates, as good as all tokens for a proposal."""

    def __init__(self, samplings: Sequence[SamplingParams]) -> None:
        floors = [np.log(sampling.min_p) if sampling.min_p > 0.0 else -np.inf for sampling in samplings]
        self._floors = np.array(floors, dtype=np.float32)[:, None, None]
        self._top_ks = np.array([sampling.top_k or NUM_CANDIDATES for sampling in samplings])[:, None, None]
        top_ps = [sampling.top_p if sampling.top_p < 1.0 else np.inf for sampling in samplings]
        self._top_ps = np.array(top_ps, dtype=np.float32)[:, None, None]
        is_limited = [sampling.top_k > 0 or sampling.min_p > 0.0 for sampling in samplings]
        self._is_limited = np.array(is_limited)[:, None, None]

    def applied(self, scores: Floats) -> Floats:
        """scores [R, F, C]: logs of probabilities, the largest first; dropped ones become -inf."""
        is_kept = (scores >= scores[..., :1] + self._floors) & (np.arange(scores.shape[2]) < self._top_ks)
        mass = np.where(is_kept, np.exp(scores), 0.0)
        before = mass.cumsum(-1) - mass
        is_kept &= before < self._top_ps * np.where(self._is_limited, mass.sum(-1, keepdims=True), 1.0)
        dropped: Floats = np.where(is_kept, scores, np.float32(-np.inf))
        return dropped


def _is_filtered(sampling: SamplingParams) -> bool:
    return sampling.temperature > 0.0 and (sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0)
