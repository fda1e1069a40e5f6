"""A draft head: joins the hidden state before a token with the token's embedding and gives the hidden state after it,
cheaply, so that the target's own output head says what may come next.

Owns the head's weights. Embedding, output head and the cache are the target's; how tokens see each other is the step's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnkeep.kernels.norm import gated_rms_norm, rms_norm
from turnkeep.kernels.rotary import rotary_cos_sin
from turnkeep.models.config import AttentionConfig, ModelConfig
from turnkeep.models.decoder import ResidualLayer, build_mixer, make_rotary_frequencies
from turnkeep.models.mixers.attention import AttentionProjections
from turnkeep.models.mixers.parameters import empty_parameter


class DraftAttention(Protocol):
    """Which entries the tokens of one pass see, and where their own go."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Keep keys and values [T, Hkv, D] of the head's attention layer `layer`; mixed values [T, Hq, D] of queries
        [T, Hq, D]."""


class DraftEntries(DraftAttention, Protocol):
    """The same, where entries can be kept for others alone."""

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values [T, Hkv, D] of the head's attention layer `layer`."""


@dataclass(slots=True, frozen=True)
class DraftStep:
    """One pass through the head, as its layers see it."""

    attention: DraftAttention
    rotary: tuple[Tensor, Tensor] | None  # cosines and sines [T, rotary_dim / 2] float32


class DraftAttentionMixer(AttentionProjections):
    """o_proj(attention(q, k, v)) over what the step shows; `index` counts the head's attention layers."""

    def __init__(
        self, config: AttentionConfig, hidden_size: int, norm_eps: float, index: int, dtype: torch.dtype
    ) -> None:
        super().__init__(config, hidden_size, norm_eps, dtype)
        self.index = index

    def forward(self, x: Tensor, step: DraftStep) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        own = self.heads(x, step.rotary)
        mixed = step.attention.attend(self.index, own.queries, own.keys, own.values, self.config.scale)
        return self.output(mixed, own.gate)


class DraftHead(nn.Module):
    """norm(layers(join(norm(embedding), norm(hidden)))), the form of Nemotron-H's and Qwen3-Next's blocks.

    `config` has the head's layers as its own (`ModelConfig.of_draft_head`). Weights are uninitialised until they are
    loaded.
    """

    rotary_frequencies: Tensor | None

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        size = config.hidden_size
        self.input_norm_weight = empty_parameter(2 * size, dtype=torch.float32)  # of the embedding, then of the state
        self.join_weight = empty_parameter(size, 2 * size, dtype=dtype)
        self.layers = nn.ModuleList(
            ResidualLayer(_draft_mixer(config, position, dtype), config, dtype)
            for position in range(len(config.layer_kinds))
        )
        self.norm_weight = empty_parameter(size, dtype=torch.float32)
        rope = config.attention.rope if config.attention else None
        frequencies = make_rotary_frequencies(rope, config.head_dim) if rope else None
        self.register_buffer("rotary_frequencies", frequencies, persistent=False)

    @torch.inference_mode()
    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, attention: DraftAttention) -> Tensor:
        """Hidden states after the tokens at `positions` [T], in their place of the target's: [T, hidden_size].

        embedded [T, hidden_size]: the tokens' embeddings; hidden [T, hidden_size]: the normed last hidden state at the
        position before each, the target's or what this returned for it.
        """
        step = self._step(positions, attention)
        residual = self._join(embedded, hidden)
        for layer in self.layers:
            residual = layer(residual, step)
        return rms_norm(residual, self.norm_weight, self.config.norm_eps)

    @torch.inference_mode()
    def take_over(self, embedded: Tensor, hidden: Tensor, positions: Tensor, entries: DraftEntries) -> None:
        """Keep the entries of tokens that nothing is drafted after: `forward` up to the last attention layer's keys
        and values, without what comes behind them."""
        step = self._step(positions, entries)
        residual = self._join(embedded, hidden)
        last = self.config.num_attention_layers - 1
        for layer in self.layers:
            assert isinstance(layer, ResidualLayer)
            mixer = layer.mixer
            if isinstance(mixer, DraftAttentionMixer) and mixer.index == last:
                own = mixer.heads(rms_norm(residual, layer.norm_weight, self.config.norm_eps), step.rotary)
                entries.keep(last, own.keys, own.values)
                return
            residual = layer(residual, step)

    def _step(self, positions: Tensor, attention: DraftAttention) -> DraftStep:
        frequencies = self.rotary_frequencies
        return DraftStep(attention, None if frequencies is None else rotary_cos_sin(positions, frequencies))

    def _join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        both, size = torch.cat((embedded, hidden), dim=-1), self.config.hidden_size
        normed = gated_rms_norm(both, None, self.input_norm_weight, self.config.norm_eps, size)
        return functional.linear(normed, self.join_weight)


def _draft_mixer(config: ModelConfig, position: int, dtype: torch.dtype) -> nn.Module:
    if config.layer_kinds[position] == "attention" and config.attention:
        index = config.kv_index(position)
        return DraftAttentionMixer(config.attention, config.hidden_size, config.norm_eps, index, dtype)
    return build_mixer(config, position, dtype)
