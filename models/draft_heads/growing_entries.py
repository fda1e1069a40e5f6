"""The entries of draft trees while they grow: copied out of the pages once, with room behind them for passing nodes.

A node's entry is made of the head's own hidden state and not of the target's, so it never goes into a page. Requests
are padded to one size; what padding holds is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from turnkeep.kernels.paged_attention import write_kv
from turnkeep.models.draft_heads.paged_entries import FIRST_ENTRY


class GrowingEntries:
    """The attention of one growth. R requests of up to L entries in their pages, and S slots: L and the room behind.

    The tokens of a pass are R x Q: Q of every request, in the order of the requests. `begin` and `descend` say before
    each pass what its tokens see.
    """

    def __init__(
        self,
        kv: Sequence[torch.Tensor],
        page_table: torch.Tensor,
        num_entries: Sequence[int],
        room: int,
        dtype: torch.dtype,
    ) -> None:
        """kv: pools of the head's attention layers; page_table [R, max_pages] int64; num_entries [R]: entries lie at
        the positions [FIRST_ENTRY, num_entries[r]); room: tokens of all passes of a request."""
        self._kv = kv
        page_size = kv[0].shape[2]
        self._num_requests, length = len(num_entries), max(num_entries)
        offsets = torch.arange(length, device=page_table.device)
        slots = page_table[:, offsets // page_size] * page_size + offsets % page_size  # [R, L]
        ends = torch.tensor(num_entries, device=page_table.device)[:, None]
        is_entry = (offsets >= FIRST_ENTRY) & (offsets < ends)
        # Other slots may hold anything, and weight zero times NaN is NaN: slot 0 of the padding page is finite.
        slots = functional.pad(slots.where(is_entry, 0), (0, room)).flatten()
        self._entries = [
            pool.flatten(1, 2).index_select(1, slots).to(dtype).view(2, self._num_requests, -1, *pool.shape[3:])
            for pool in kv
        ]  # [2, R, S, Hkv, D]
        self._base = torch.zeros(is_entry.shape, dtype=dtype).masked_fill_(~is_entry, -torch.inf)
        self._base = functional.pad(self._base, (0, room), value=-torch.inf)[:, None]  # [R, 1, S]
        self._used = length
        self._mask = self._base  # [R, Q, S]: 0 where a token of the pass sees a slot, else -inf
        self._staying: tuple[torch.Tensor, torch.Tensor] | None = None

    def begin(self, width: int, staying: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """The first pass: Q = width tokens of a request one after another, each sees those before it and all entries.

        staying: rows of the pass [n] whose entries go into pages as well, and their slots there [n].
        """
        own = torch.full((width, width), -torch.inf, dtype=self._base.dtype).triu_(1)
        self._mask = self._base.repeat(1, width, 1)
        self._mask[:, :, self._used : self._used + width] = own
        self._staying = staying

    def descend(self, parents: torch.Tensor, width: int) -> None:
        """The next pass: Q = width tokens of a request, each a child of the row parents [R * width] of the last pass,
        counted over all requests: it sees what its parent sees, and itself."""
        length = self._mask.shape[2]
        self._mask = self._mask.flatten(0, 1).index_select(0, parents).view(self._num_requests, width, length)
        self._mask[:, :, self._used : self._used + width].diagonal(dim1=1, dim2=2).zero_()
        self._staying = None

    def end(self, rows: torch.Tensor | None = None) -> None:
        """The pass is over: its slots are taken. rows [R]: the one of each request, counted over all, that may have
        children; None: all of them."""
        self._used += self._mask.shape[1]
        if rows is not None:
            self._mask = self._mask.flatten(0, 1).index_select(0, rows)[:, None]

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `DraftAttention.attend`."""
        if self._staying is not None:
            rows, slots = self._staying
            write_kv(self._kv[layer], keys.index_select(0, rows), values.index_select(0, rows), slots)
        entries = self._entries[layer]
        num_requests, width, length = self._mask.shape
        num_kv_heads = keys.shape[1]
        own = entries[:, :, self._used : self._used + width]
        own[0] = keys.view(num_requests, width, *keys.shape[1:])
        own[1] = values.view(num_requests, width, *values.shape[1:])
        # The query heads of a key head are the rows of one product: [R, Hkv, Q * group, D].
        group = queries.shape[1] // num_kv_heads
        heads = queries.view(num_requests, width, num_kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
        mask = self._mask[:, :, None].expand(-1, -1, group, -1).reshape(num_requests, 1, width * group, length)
        mixed = functional.scaled_dot_product_attention(
            heads, entries[0].transpose(1, 2), entries[1].transpose(1, 2), attn_mask=mask, scale=scale
        )
        return mixed.view(num_requests, num_kv_heads, width, group, -1).transpose(1, 2).reshape(queries.shape)
