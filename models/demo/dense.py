"""A differentiable dense forward of the demo model, backbone and MTP block, over whole padded sequences.

Used for training and evaluation only; the engine has its own kernels. Parameter names are the checkpoint's, with
`backbone.` and `mtp.` prefixes. Knows nothing about tokens or conversations.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK = 64


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 over groups of the last dimension (one group by default)."""

    def __init__(self, size: int, eps: float, num_groups: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.num_groups = eps, num_groups

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.float().reshape(*x.shape[:-1], self.num_groups, -1)
        normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
        out: Tensor = self.weight * normed.flatten(-2)
        return out


def segment_sums(log_decay: Tensor) -> Tensor:
    """`out[..., i, j]` = sum of `log_decay[..., j+1 : i+1]`, -inf for j > i.

    A product with a 0/1 matrix rather than a difference of prefix sums: every entry is a sum of non-positive
    numbers, so nothing cancels however strong the decays are.
    """
    size = log_decay.shape[-1]
    index = torch.arange(size, device=log_decay.device)
    later = (index[:, None, None] <= index[None, :, None]) & (index[:, None, None] > index[None, None, :])
    with torch.autocast("cpu", enabled=False):
        sums = (log_decay.float() @ later.flatten(1).float()).reshape(*log_decay.shape, size)
    return torch.masked_fill(sums, index[:, None] < index[None, :], -math.inf)


def ssd_scan(x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Chunked Mamba-2 scan from a zero state.

    x [batch, length, heads, head dim], dt [batch, length, heads] after softplus, a_log [heads], b and c
    [batch, length, groups, state]; length is a multiple of `CHUNK`. Returns y shaped like x, without the D skip.
    """
    num_heads, num_groups = x.shape[2], b.shape[2]
    x, dt, b, c = (t.reshape(t.shape[0], -1, CHUNK, *t.shape[2:]) for t in (x, dt, b, c))
    log_decay = (dt * -torch.exp(a_log.float())).permute(0, 1, 3, 2)  # batch, chunk, head, token
    segments = segment_sums(log_decay)
    decay = torch.exp(segments)
    weighted = x * dt[..., None]
    b, c = (t.repeat_interleave(num_heads // num_groups, dim=3).permute(0, 1, 3, 2, 4) for t in (b, c))
    weighted = weighted.permute(0, 1, 3, 2, 4)  # batch, chunk, head, token, dim
    inside = (c @ b.transpose(-1, -2)) * decay @ weighted
    to_end = decay[..., -1, :, None]
    states = (weighted * to_end).transpose(-1, -2) @ b  # batch, chunk, head, dim, state
    totals = log_decay.sum(-1).permute(0, 2, 1)  # batch, head, chunk
    carried = torch.exp(segment_sums(totals)).tril()
    # The state before chunk k is what the chunks up to k-1 left; row k-1 of `carried` decays it to there.
    carried = F.pad(carried[..., :-1, :], (0, 0, 1, 0))
    entering = carried @ states.permute(0, 2, 1, 3, 4).flatten(3)
    entering = entering.reshape(*entering.shape[:3], *states.shape[3:]).permute(0, 2, 1, 3, 4)
    from_start = torch.exp(segments[..., :, 0] + log_decay[..., :1])[..., None]
    across = (c @ entering.transpose(-1, -2)) * from_start
    return torch.flatten((inside + across).permute(0, 1, 3, 2, 4), 1, 2)


class Mamba2(nn.Module):
    """Mamba-2 mixer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config["mamba_num_heads"], config["mamba_head_dim"]
        self.num_groups, self.state = config["n_groups"], config["ssm_state_size"]
        self.inner = self.num_heads * self.head_dim
        self.conv_dim = self.inner + 2 * self.num_groups * self.state
        self.kernel = config["conv_kernel"]
        hidden = config["hidden_size"]
        self.in_proj = nn.Linear(hidden, self.inner + self.conv_dim + self.num_heads, bias=False)
        self.conv1d = nn.Conv1d(self.conv_dim, self.conv_dim, self.kernel, groups=self.conv_dim)
        self.dt_bias = nn.Parameter(torch.zeros(self.num_heads))
        self.A_log = nn.Parameter(torch.zeros(self.num_heads))
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.norm = RMSNorm(self.inner, config["layer_norm_epsilon"], self.num_groups)
        self.out_proj = nn.Linear(self.inner, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, xbc, dt = torch.split(self.in_proj(hidden), [self.inner, self.conv_dim, self.num_heads], dim=-1)
        length = xbc.shape[1]
        padded = F.pad(xbc, (0, 0, self.kernel - 1, 0))
        taps = self.conv1d.weight.squeeze(1)
        assert self.conv1d.bias is not None
        mixed = self.conv1d.bias + sum(padded[:, i : i + length] * taps[:, i] for i in range(self.kernel))
        x, b, c = torch.split(F.silu(mixed), [self.inner, *[self.num_groups * self.state] * 2], dim=-1)
        x = x.reshape(*x.shape[:2], self.num_heads, self.head_dim)
        b, c = (t.reshape(*t.shape[:2], self.num_groups, self.state) for t in (b, c))
        step = F.softplus(dt.float() + self.dt_bias)
        y = ssd_scan(x, step, self.A_log, b, c) + self.D[:, None] * x
        out: Tensor = self.out_proj(self.norm(y.flatten(2).float() * F.silu(gate.float())))
        return out


class Attention(nn.Module):
    """Causal attention with grouped key-value heads and no position encoding."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim, hidden = config["head_dim"], config["hidden_size"]
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (
            proj(hidden).reshape(*hidden.shape[:2], -1, self.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """Squared-ReLU feed-forward."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config["hidden_size"], config["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(config["intermediate_size"], config["hidden_size"], bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.relu(self.up_proj(hidden)).square())
        return out


class Block(nn.Module):
    """Norm, mixer, residual."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        mixers: dict[str, type[nn.Module]] = {"M": Mamba2, "*": Attention, "-": MLP}
        self.norm = RMSNorm(config["hidden_size"], config["layer_norm_epsilon"])
        self.mixer = mixers[kind](config)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.mixer(self.norm(hidden))
        return out


class Backbone(nn.Module):
    """Embeddings, blocks, final norm."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config, kind) for kind in config["hybrid_override_pattern"])
        self.norm_f = RMSNorm(config["hidden_size"], config["layer_norm_epsilon"])


class MTP(nn.Module):
    """One multi-token-prediction block: an attention layer that also joins its inputs, then a feed-forward layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["layer_norm_epsilon"]
        first, second = Block(config, "*"), Block(config, "-")
        first.add_module("enorm", RMSNorm(hidden, eps))
        first.add_module("hnorm", RMSNorm(hidden, eps))
        first.add_module("eh_proj", nn.Linear(2 * hidden, hidden, bias=False))
        second.add_module("final_layernorm", RMSNorm(hidden, eps))
        self.layers = nn.ModuleList([first, second])

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        first, second = self.layers
        enorm, hnorm, eh_proj = (first.get_submodule(name) for name in ("enorm", "hnorm", "eh_proj"))
        joined = torch.cat([enorm(embedded), hnorm(hidden)], dim=-1)
        out: Tensor = second.get_submodule("final_layernorm")(second(first(eh_proj(joined))))
        return out


class DemoModel(nn.Module):
    """Backbone, shared head and MTP block. `forward` gives hidden states; `lm_head` turns them into logits."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.mtp = MTP(config)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [batch, length], length a multiple of `CHUNK`.

        Returns (hidden after the final norm, which predicts token t+1; MTP hidden, which predicts token t+2),
        both [batch, length, hidden size]. The last MTP position has no next token and is meaningless.
        """
        embedded = self.backbone.embeddings(ids)
        hidden = embedded
        for layer in self.backbone.layers:
            hidden = layer(hidden)
        hidden = self.backbone.norm_f(hidden)
        return hidden, self.mtp(torch.roll(embedded, -1, dims=1), hidden)


@torch.no_grad()
def initialize(model: DemoModel, seed: int) -> None:
    """Fill the parameters for training from scratch."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    depth = len(config["hybrid_override_pattern"])
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.copy_(torch.log(torch.linspace(1.0, 16.0, parameter.numel())))
        elif name.endswith("dt_bias"):
            low, high = math.log(1e-3), math.log(config["time_step_max"])
            dt = torch.exp(torch.rand(parameter.shape, generator=generator) * (high - low) + low)
            parameter.copy_(dt + torch.log(-torch.expm1(-dt)))
        elif "conv1d.weight" in name:
            parameter.uniform_(-0.5, 0.5, generator=generator)
        elif parameter.dim() > 1:
            residual = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
            scale = 1.0 if "embeddings" in name else 1.0 / math.sqrt(parameter.shape[1])
            std = 0.05 if "embeddings" in name else scale / (math.sqrt(depth) if residual else 1.0)
            parameter.normal_(0.0, std, generator=generator)
        elif name.endswith("conv1d.bias"):
            parameter.zero_()


def load_config(directory: Path) -> dict[str, Any]:
    """The model's `config.json`."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


def load_model(directory: Path) -> DemoModel:
    """The exported model, in float32."""
    model = DemoModel(load_config(directory))
    model.load_state_dict({k: v.float() for k, v in load_file(str(directory / "model.safetensors")).items()})
    return model.eval()
