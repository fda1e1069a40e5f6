"""A mixture of experts: every token goes through a few of many feed-forward networks, chosen by a router.

Owns the weights. Tokens are put in the order of their experts, so that an expert is one product over all its tokens
and an expert without tokens costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from turnkeep.models.config import MoEConfig
from turnkeep.models.decoder_step import DecoderStep
from turnkeep.models.mixers.mlp import MLPMixer
from turnkeep.models.mixers.parameters import empty_parameter, empty_parameter_or_none


class MoEMixer(nn.Module):
    """sum of weight * expert(x) over the chosen experts, plus the shared expert where there is one."""

    def __init__(self, config: MoEConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        width = config.latent_size or hidden_size
        rows = config.expert_size * (2 if config.is_gated else 1)
        # A router decides by small differences: it keeps float32, as does its bias.
        self.router_weight = empty_parameter(config.num_experts, hidden_size, dtype=torch.float32)
        self.correction_bias = empty_parameter_or_none(
            config.has_correction_bias, config.num_experts, dtype=torch.float32
        )
        self.experts_up_weight = empty_parameter(config.num_experts, rows, width, dtype=dtype)
        self.experts_down_weight = empty_parameter(config.num_experts, width, config.expert_size, dtype=dtype)
        has_latent = config.latent_size is not None
        has_bias = has_latent and config.has_latent_bias
        self.latent_down_weight = empty_parameter_or_none(has_latent, width, hidden_size, dtype=dtype)
        self.latent_down_bias = empty_parameter_or_none(has_bias, width, dtype=dtype)
        self.latent_up_weight = empty_parameter_or_none(has_latent, hidden_size, width, dtype=dtype)
        self.latent_up_bias = empty_parameter_or_none(has_bias, hidden_size, dtype=dtype)
        self.shared = None if config.shared is None else MLPMixer(config.shared, hidden_size, dtype)
        self.shared_gate_weight = empty_parameter_or_none(config.has_shared_gate, 1, hidden_size, dtype=dtype)

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """x [T, hidden_size] -> [T, hidden_size]; the step is not used."""
        weights, chosen = self.route(x)
        inputs = x
        if self.latent_down_weight is not None:
            inputs = functional.linear(x, self.latent_down_weight, self.latent_down_bias)
        mixed = self._experts(inputs, weights, chosen)
        if self.latent_up_weight is not None:
            mixed = functional.linear(mixed, self.latent_up_weight, self.latent_up_bias)
        if self.shared is None:
            return mixed
        shared: Tensor = self.shared(x, step)
        if self.shared_gate_weight is not None:
            shared = shared * functional.linear(x, self.shared_gate_weight).sigmoid()
        return mixed + shared

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen experts of every token of x [T, hidden_size]: weights float32 [T, k] and expert ids [T, k]."""
        config = self.config
        logits = functional.linear(x.float(), self.router_weight)  # [T, E]
        scores = logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(-1)
        ranked = scores if self.correction_bias is None else scores + self.correction_bias
        if config.num_groups > 1:
            ranked = self._without_weak_groups(ranked)
        chosen = ranked.topk(config.num_chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.normalises:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.weight_scale, chosen

    def _without_weak_groups(self, ranked: Tensor) -> Tensor:
        config = self.config
        groups = ranked.view(ranked.shape[0], config.num_groups, -1)  # [T, G, E / G]
        strength = groups.topk(2, dim=-1).values.sum(-1)
        kept = strength.topk(config.num_chosen_groups, dim=-1).indices
        is_weak = torch.ones_like(strength, dtype=torch.bool).scatter_(1, kept, False)
        return groups.masked_fill(is_weak[..., None], -torch.inf).view_as(ranked)

    def _experts(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum over the chosen experts: x [T, width], weights and chosen [T, k] -> [T, width]."""
        num_chosen = self.config.num_chosen
        order = chosen.flatten().argsort(stable=True)  # places (token, choice), by expert
        counts = torch.bincount(chosen.flatten(), minlength=self.config.num_experts).tolist()
        inputs = x.index_select(0, order // num_chosen)
        outputs = torch.empty_like(inputs)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                outputs[start : start + count] = self._expert(expert, inputs[start : start + count])
                start += count
        # Back to (token, choice): the sum of a token runs in the order of its choices, whatever was packed with it.
        by_token = torch.empty_like(outputs).index_copy_(0, order, outputs)
        by_token = by_token.view(x.shape[0], num_chosen, -1)
        return (by_token.float() * weights[..., None]).sum(1).to(x.dtype)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        wide = functional.linear(x, self.experts_up_weight[expert])
        if self.config.is_gated:
            gate, up = wide.chunk(2, dim=-1)
            wide = self._activate(gate).mul_(up)
        else:
            wide = self._activate(wide)
        return functional.linear(wide, self.experts_down_weight[expert])

    def _activate(self, x: Tensor) -> Tensor:
        return functional.silu(x) if self.config.activation == "silu" else functional.relu(x).square_()
