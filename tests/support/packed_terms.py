"""From tokens packed one run after another to the padded form of histories and folds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

Terms = TypeVar("Terms", bound=tuple[torch.Tensor, ...])


def padded_terms(terms: Terms, lens: Sequence[int]) -> Terms:
    """Packed [sum of lens, ...] -> [len(lens), longest, ...], zeros where there is no token."""
    return type(terms)(*(_padded(tensor, lens) for tensor in terms))


def _padded(packed: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    if not any(lens):
        return packed.new_zeros((len(lens), 0, *packed.shape[1:]))
    return pad_sequence(list(torch.split(packed, list(lens))), batch_first=True)
