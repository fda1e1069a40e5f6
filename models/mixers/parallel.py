"""Attention and Mamba-2 side by side on the same input, their outputs added. Owns nothing but the two mixers."""

from __future__ import annotations

from torch import Tensor, nn

from turnkeep.kernels.forward_batch import CacheTensors
from turnkeep.kernels.replay_history import HistoryFolds
from turnkeep.models.decoder_step import DecoderStep
from turnkeep.models.mixers.attention import AttentionMixer
from turnkeep.models.mixers.mamba2 import Mamba2Mixer


class ParallelMixer(nn.Module):
    """attention(x) + mamba2(x)."""

    def __init__(self, attention: AttentionMixer, mamba2: Mamba2Mixer) -> None:
        super().__init__()
        self.attention = attention
        self.mamba2 = mamba2

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; writes keys, values and states of the step."""
        mixed: Tensor = self.mamba2(x, step)
        return mixed.add_(self.attention(x, step))

    def fold(self, folds: HistoryFolds, cache: CacheTensors) -> None:
        """Move states on by accepted tokens."""
        self.mamba2.fold(folds, cache)
