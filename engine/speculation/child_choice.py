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

from turnkeep.kernels.sampling.noise import gumbel_noise
from turnkeep.scheduler.request import SamplingParams

NUM_CANDIDATES = 64  # tokens of a node that noise is drawn for

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
_INT64 = 1 << 63


class ChildChoice:
    """The choice of one growth: how the tokens of each of R requests are chosen."""

    def __init__(self, samplings: Sequence[SamplingParams], num_children: int) -> None:
        self._num_children = num_children
        self._is_noisy = any(sampling.temperature > 0.0 for sampling in samplings)
        if not self._is_noisy:
            return
        has_noise = np.array([sampling.temperature > 0.0 for sampling in samplings])
        self._has_noise = has_noise[:, None, None]  # [R, 1, 1], as all that follows
        temperatures = [sampling.temperature or 1.0 for sampling in samplings]
        self._inverse_temperatures = (1.0 / torch.tensor(temperatures, dtype=torch.float32))[:, None, None]
        seeds = [(sampling.seed + _INT64) % (2 * _INT64) - _INT64 for sampling in samplings]
        self._seeds = torch.tensor(seeds, dtype=torch.int64)[:, None, None]
        self._filters = _Filters(samplings) if any(map(_is_filtered, samplings)) else None

    def children(self, logits: torch.Tensor, positions: Ints) -> tuple[Ints, Floats]:
        """The best children of F nodes of every request: token ids and logs of their probabilities, [R, F, K] each.

        logits [R, F, V] float32; positions [R]: tokens before the children, which key their noise.
        """
        num_children = min(self._num_children, logits.shape[2])
        if not self._is_noisy:
            values, ids = logits.topk(num_children, dim=-1)
            return ids.cpu().numpy(), (values - logits.logsumexp(-1, keepdim=True)).cpu().numpy()
        scaled = logits * self._inverse_temperatures.to(logits.device)
        best, best_ids = scaled.topk(min(NUM_CANDIDATES, logits.shape[2]), dim=-1)
        scores: Floats = (best - scaled.logsumexp(-1, keepdim=True)).cpu().numpy()  # [R, F, C]
        best_ids = best_ids.cpu()
        if self._filters is not None:
            scores = self._filters.applied(scores)
        noise = gumbel_noise(self._seeds, torch.from_numpy(positions)[:, None, None], best_ids).numpy()
        perturbed = np.where(self._has_noise, scores + noise, scores)
        order = np.argsort(-perturbed, axis=-1, kind="stable")[..., :num_children]
        # How likely the target's scores, which differ by the head's errors, put another candidate first: as likely as
        # if those errors were Gumbel noise too. On the bundled model other scales than one gave fewer tokens a step.
        behind = perturbed - perturbed.max(-1, keepdims=True)
        edges = np.where(self._has_noise, behind - np.log(np.exp(behind).sum(-1, keepdims=True)), scores)
        return np.take_along_axis(best_ids.numpy(), order, -1), np.take_along_axis(edges, order, -1)


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
