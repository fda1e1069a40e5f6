"""Where a draft head's entries of computed tokens lie: in the same pages as the target's keys and values.

The entry of the pair (hidden state of token t - 1, token t) lies in slot t, so a page depends on the tokens up to its
end alone and can be shared. Token 0 has no hidden state before it, thus no entry: its slot is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from turnkeep.kernels.paged_attention import paged_attention, write_kv

FIRST_ENTRY = 1


@dataclass(slots=True, frozen=True)
class PagedEntries:
    """The attention of tokens that stay: each sees the entries up to its own, which go into the pages.

    kv: pools [2, P, page_size, Hkv, D] of the head's attention layers; the others as in `ForwardBatch`, with
    context_lens of at least FIRST_ENTRY.
    """

    kv: Sequence[torch.Tensor]
    page_table: torch.Tensor  # [R, max_pages] int64
    seq_lens: Sequence[int]  # [R]
    context_lens: Sequence[int]  # [R]
    num_decodes: int
    slot_mapping: torch.Tensor  # [T] int64

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `DraftAttention.attend`."""
        self.keep(layer, keys, values)
        lengths = (self.seq_lens, self.context_lens, self.num_decodes)
        return paged_attention(queries, self.kv[layer], self.page_table, *lengths, scale, first=FIRST_ENTRY)

    def keep(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `DraftEntries.keep`."""
        write_kv(self.kv[layer], keys, values, self.slot_mapping)
