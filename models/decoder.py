"""The decoder of every model type: embedding, residual layers of norm and mixer, final norm, output head.

Owns the weights and the order of the layers. Knows no request, no file and no tensor name of a checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnkeep.kernels.forward_batch import CacheTensors, ForwardBatch
from turnkeep.kernels.grid_cells import keeps_tails
from turnkeep.kernels.norm import rms_norm
from turnkeep.kernels.replay_history import HistoryFolds, fold_windows
from turnkeep.kernels.rotary import rotary_cos_sin, rotary_frequencies
from turnkeep.models.config import LayerKind, ModelConfig, RopeConfig
from turnkeep.models.decoder_step import DecoderStep, split_recurrent
from turnkeep.models.mixers.attention import AttentionMixer
from turnkeep.models.mixers.gated_delta_net import GatedDeltaMixer
from turnkeep.models.mixers.mamba2 import Mamba2Mixer
from turnkeep.models.mixers.mlp import MLPMixer
from turnkeep.models.mixers.moe import MoEMixer
from turnkeep.models.mixers.parallel import ParallelMixer
from turnkeep.models.mixers.parameters import empty_parameter, empty_parameter_or_none
from turnkeep.models.mixers.short_conv import ShortConvMixer


class ResidualLayer(nn.Module):
    """x + mixer(norm(x)), added in place; in some families x + norm(mixer(norm(x)))."""

    def __init__(self, mixer: nn.Module, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.norm_eps = config.norm_eps
        self.norm_weight = empty_parameter(config.hidden_size, dtype=torch.float32)
        self.post_norm_weight = empty_parameter_or_none(config.has_post_norms, config.hidden_size, dtype=torch.float32)
        self.mixer = mixer

    def forward(self, residual: Tensor, step: DecoderStep) -> Tensor:
        """residual [T, hidden_size] in the model dtype or float32; the norm's output is always in the model dtype."""
        normed = rms_norm(residual, self.norm_weight, self.norm_eps).to(self.dtype)
        mixed: Tensor = self.mixer(normed, step)
        if self.post_norm_weight is not None:
            mixed = rms_norm(mixed, self.post_norm_weight, self.norm_eps)
        return residual.add_(mixed)


class Decoder(nn.Module):
    """A decoder for inference. Weights are uninitialised until `weights.py` fills them."""

    rotary_frequencies: Tensor | None
    sliding_frequencies: Tensor | None

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.is_recurrent = config.num_recurrent_layers > 0
        self.embedding = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            ResidualLayer(build_mixer(config, position, dtype), config, dtype)
            for position in range(len(config.layer_kinds))
        )
        self.norm_weight = empty_parameter(config.hidden_size, dtype=torch.float32)
        self.lm_head = (
            None if config.tie_word_embeddings else empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        )
        ropes = {
            "rotary_frequencies": config.attention.rope if config.attention else None,
            "sliding_frequencies": config.sliding.rope if config.sliding else None,
        }
        for name, rope in ropes.items():
            frequencies = make_rotary_frequencies(rope, config.head_dim) if rope else None
            self.register_buffer(name, frequencies, persistent=False)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: CacheTensors) -> Tensor:
        """Logits [K, V] float32 of the rows in `batch.logit_indices`; pages and state rows are updated in place, but
        for trees, which leave their terms in the batch.

        Raises ValueError when the batch lacks the state rows that the model's layers need.
        """
        return self.logits(self.normed(self.hidden(batch, cache).index_select(0, batch.logit_indices)))

    @torch.inference_mode()
    def hidden(self, batch: ForwardBatch, cache: CacheTensors) -> Tensor:
        """The last hidden state [T, hidden_size] of all tokens, before the final norm."""
        config, positions = self.config, batch.positions
        frequencies, sliding = self.rotary_frequencies, self.sliding_frequencies
        step = DecoderStep(
            batch=batch,
            cache=cache,
            recurrent=split_recurrent(batch, on_grid=keeps_tails(cache.states)) if self.is_recurrent else None,
            rotary=None if frequencies is None else rotary_cos_sin(positions, frequencies),
            sliding_rotary=None if sliding is None else rotary_cos_sin(positions, sliding),
        )
        residual = self.embed(batch.token_ids)
        if config.residual_in_fp32:
            residual = residual.float()
        for layer in self.layers:
            residual = layer(residual, step)
        return residual

    def embed(self, token_ids: Tensor) -> Tensor:
        """What the first layer is given for tokens [T]: [T, hidden_size] in the model dtype."""
        embedded = functional.embedding(token_ids, self.embedding)
        factor = self.config.multipliers.embedding
        return embedded if factor == 1.0 else embedded * factor

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """What the output head reads: hidden [K, hidden_size] after the final norm, in the model dtype."""
        return rms_norm(hidden, self.norm_weight, self.config.norm_eps).to(self.dtype)

    @torch.inference_mode()
    def logits(self, normed: Tensor) -> Tensor:
        """Output head: normed hidden states [K, hidden_size] -> [K, V] float32."""
        return functional.linear(normed, self.embedding if self.lm_head is None else self.lm_head).float()

    @torch.inference_mode()
    def fold(self, folds: HistoryFolds, cache: CacheTensors) -> None:
        """Move state rows on by accepted tokens of the histories, in every layer."""
        for layer in self.layers:
            mixer = layer.mixer
            if isinstance(mixer, Mamba2Mixer | GatedDeltaMixer | ParallelMixer):
                mixer.fold(folds, cache)
        fold_windows(cache.states, cache.histories, folds)


def build_mixer(config: ModelConfig, position: int, dtype: torch.dtype) -> nn.Module:
    """The mixer of the layer at `position`. Raises ValueError for a kind that the config has no sizes for."""
    kind: LayerKind = config.layer_kinds[position]
    size, eps, kv, state = config.hidden_size, config.norm_eps, config.kv_index(position), config.state_index(position)
    if kind == "mamba2" and config.mamba2:
        return Mamba2Mixer(config.mamba2, size, eps, state, dtype)
    if kind == "gated_delta" and config.gated_delta:
        return GatedDeltaMixer(config.gated_delta, size, eps, state, dtype)
    if kind == "attention" and config.attention:
        return AttentionMixer(config.attention, size, eps, kv, dtype)
    if kind == "sliding" and config.attention and config.sliding:
        return AttentionMixer(config.attention, size, eps, kv, dtype, config.sliding.window)
    if kind == "parallel" and config.attention and config.mamba2:
        attention = AttentionMixer(config.attention, size, eps, kv, dtype)
        return ParallelMixer(attention, Mamba2Mixer(config.mamba2, size, eps, state, dtype))
    if kind == "short_conv" and config.short_conv:
        return ShortConvMixer(config.short_conv, size, state, dtype)
    if kind == "mlp" and config.mlp:
        return MLPMixer(config.mlp, size, dtype)
    if kind == "moe" and config.moe:
        return MoEMixer(config.moe, size, dtype)
    raise ValueError(f"layer {position} is of kind {kind!r} but the config has no sizes for it")


def make_rotary_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each rotated pair of channels: float32 [rotary_dim / 2]."""
    scaling = None
    if rope.llama3 is not None:
        factor, low, high, original = rope.llama3
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    frequencies = rotary_frequencies(rope.rotary_dim or head_dim, rope.theta, scaling)
    if rope.divisors is not None:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32, device=frequencies.device)
    return frequencies
