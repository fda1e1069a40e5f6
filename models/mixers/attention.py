"""Causal attention with grouped key-value heads over paged keys and values; rotary positions, normalised queries and
keys, and a gate on the mixed values where the family has them.

Owns the weights; keys and values live in the pages it is given.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnkeep.kernels.forward_batch import ForwardBatch
from turnkeep.kernels.norm import rms_norm
from turnkeep.kernels.paged_attention import paged_attention, tree_attention, write_kv
from turnkeep.kernels.rotary import apply_rotary
from turnkeep.models.config import AttentionConfig
from turnkeep.models.decoder_step import DecoderStep
from turnkeep.models.mixers.parameters import empty_parameter, empty_parameter_or_none


class AttentionHeads(NamedTuple):
    """Normalised and rotated heads of T tokens: queries [T, Hq, D], keys and values [T, Hkv, D]."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    gate: Tensor | None  # [T, Hq, D], before its sigmoid


class AttentionProjections(nn.Module):
    """What attention does before and after its heads meet; q, k and v come from one product, rows in this order, a
    gate's after those of q. Knows no cache."""

    def __init__(self, config: AttentionConfig, hidden_size: int, norm_eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.norm_eps = norm_eps
        width = config.num_heads * config.head_dim
        self.first_key = config.num_heads * (2 if config.has_gate else 1)
        self.num_projected = self.first_key + 2 * config.num_kv_heads
        # Whether queries and keys are no longer neighbours in the product when they are rotated.
        self.is_apart = config.has_qk_norm or config.has_gate
        projected = self.num_projected * config.head_dim
        self.qkv_proj_weight = empty_parameter(projected, hidden_size, dtype=dtype)
        self.qkv_proj_bias = empty_parameter_or_none(config.has_bias, projected, dtype=dtype)
        self.o_proj_weight = empty_parameter(hidden_size, width, dtype=dtype)
        self.o_proj_bias = empty_parameter_or_none(config.has_out_bias, hidden_size, dtype=dtype)
        # Norms are used in float32, like all of them.
        self.q_norm_weight = empty_parameter_or_none(config.has_qk_norm, config.head_dim, dtype=torch.float32)
        self.k_norm_weight = empty_parameter_or_none(config.has_qk_norm, config.head_dim, dtype=torch.float32)

    def heads(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> AttentionHeads:
        """The heads of x [T, hidden_size], rotated by cosines and sines [T, rotary_dim / 2] where they are given."""
        config = self.config
        num_heads, length = config.num_heads, x.shape[0]
        first_key, first_value = self.first_key, self.first_key + config.num_kv_heads
        projected = functional.linear(x, self.qkv_proj_weight, self.qkv_proj_bias)
        projected = projected.view(length, self.num_projected, config.head_dim)
        queries, keys, values = (
            projected[:, :num_heads],
            projected[:, first_key:first_value],
            projected[:, first_value:],
        )
        if self.q_norm_weight is not None and self.k_norm_weight is not None:
            queries = rms_norm(queries, self.q_norm_weight, self.norm_eps)
            keys = rms_norm(keys, self.k_norm_weight, self.norm_eps)
        if rotary is not None:
            # Queries and keys turn by the same angles: one rotation for both.
            both = torch.cat((queries, keys), dim=1) if self.is_apart else projected[:, :first_value]
            both = apply_rotary(both, *rotary)
            queries, keys = both[:, :num_heads], both[:, num_heads:]
        gate = projected[:, num_heads:first_key] if config.has_gate else None
        return AttentionHeads(queries, keys, values, gate)

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """mixed values [T, Hq, D] -> [T, hidden_size]."""
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        return functional.linear(mixed.reshape(mixed.shape[0], -1), self.o_proj_weight, self.o_proj_bias)


class AttentionMixer(AttentionProjections):
    """o_proj(attention(q, k, v)) over the step's pages."""

    def __init__(
        self,
        config: AttentionConfig,
        hidden_size: int,
        norm_eps: float,
        index: int,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        super().__init__(config, hidden_size, norm_eps, dtype)
        self.window = window
        self.index = index

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; writes the step's keys and values into their slots first, but
        those of tree nodes."""
        own = self.heads(x, step.rotary if self.window is None else step.sliding_rotary)
        return self.output(self._attend(own, step.cache.kv[self.index], step.batch), own.gate)

    def _attend(self, own: AttentionHeads, kv: Tensor, batch: ForwardBatch) -> Tensor:
        scale, window, table = self.config.scale, self.window, batch.page_table
        queries, keys, values, _ = own
        if batch.trees is None:
            write_kv(kv, keys, values, batch.slot_mapping)
            lengths = (batch.seq_lens, batch.context_lens, batch.num_decodes)
            return paged_attention(queries, kv, table, *lengths, scale, window)
        # Where the requests and the tokens of the trees begin and end.
        first, last = batch.num_decodes, batch.num_decodes + batch.num_trees
        start, end = first, first + batch.num_tree_nodes
        nodes = (queries[start:end], keys[start:end], values[start:end])
        batch.trees.terms.keep_kv(kv, *nodes[1:])
        lens = batch.context_lens[first:last]
        pieces = [tree_attention(*nodes, kv, table[first:last], lens, batch.trees.trees, scale, window)]
        decodes, prefills = (slice(first), slice(start), first), (slice(last, None), slice(end, None), 0)
        for requests, tokens, num_decodes in (decodes, prefills):
            if keys[tokens].shape[0]:
                write_kv(kv, keys[tokens], values[tokens], batch.slot_mapping[tokens])
                lengths = (batch.seq_lens[requests], batch.context_lens[requests], num_decodes)
                mixed = paged_attention(queries[tokens], kv, table[requests], *lengths, scale, window)
                pieces.insert(0 if num_decodes else len(pieces), mixed)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
