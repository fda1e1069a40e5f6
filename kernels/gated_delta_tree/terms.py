"""What a token adds to the state of a gated delta net; once computed it never changes."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DeltaTerms(NamedTuple):
    """Tokens [..., T]: the state is decayed by exp(g), then k u^T is added, k brought to unit length. Where there is
    no token u and g are 0.

    k is kept as the convolution left it: normalised and then rounded to bfloat16 it would cost 2e-3 in the state. u
    is float32 for the same reason.
    """

    k: torch.Tensor  # [..., T, Hk, K]
    u: torch.Tensor  # [..., T, Hv, V]
    g: torch.Tensor  # [..., T, Hv] <= 0
