"""What a token adds to the state of a Mamba-2 layer; once computed it never changes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SsdTerms(NamedTuple):
    """Tokens [..., T]: the state is decayed by exp(dt A), then dt x B^T is added. With dt 0 there is no token."""

    x: torch.Tensor  # [..., T, H, P]
    dt: torch.Tensor  # [..., T, H] >= 0
    B: torch.Tensor  # [..., T, G, N]
