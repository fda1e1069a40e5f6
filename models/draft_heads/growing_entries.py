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
    each pass what its tokens see. Of a single request nothing is masked as long as its tree is a line, which is most
    of the time: the tokens of a pass then see all slots up to their own.
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
        self._dtype = dtype
        self._num_requests, self._used, self._room = len(num_entries), max(num_entries), room
        self._width = 0  # of the pass
        self._entries: list[torch.Tensor] = []  # [2, R, S, Hkv, D]
        self._base: torch.Tensor | None = None
        if self._num_requests == 1:
            self._entries = [self._copied(pool, page_table[0]) for pool in kv]
        else:
            self._gather(page_table, num_entries)
        # [R, Q, S]: 0 where a token of the pass sees a slot, else -inf; None: a line.
        self._mask: torch.Tensor | None = self._base
        self._staying: tuple[torch.Tensor, torch.Tensor] | None = None

    def _copied(self, pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """The entries of a single request and finite values everywhere else: weight zero times NaN is NaN."""
        page_size, length = pool.shape[2], self._used
        entries = torch.zeros(2, 1, length + self._room, *pool.shape[3:], dtype=self._dtype)
        found = pool.index_select(1, pages[: -(-length // page_size)]).flatten(1, 2)
        entries[:, 0, FIRST_ENTRY:length] = found[:, FIRST_ENTRY:length]
        return entries

    def _gather(self, page_table: torch.Tensor, num_entries: Sequence[int]) -> None:
        page_size, room, length = self._kv[0].shape[2], self._room, self._used
        offsets = torch.arange(length, device=page_table.device)
        slots = page_table[:, offsets // page_size] * page_size + offsets % page_size  # [R, L]
        ends = torch.tensor(num_entries, device=page_table.device)[:, None]
        is_entry = (offsets >= FIRST_ENTRY) & (offsets < ends)
        # Other slots may hold anything, and weight zero times NaN is NaN: slot 0 of the padding page is finite.
        slots = functional.pad(slots.where(is_entry, 0), (0, room)).flatten()
        self._entries = [
            pool.flatten(1, 2).index_select(1, slots).to(self._dtype).view(2, self._num_requests, -1, *pool.shape[3:])
            for pool in self._kv
        ]
        base = torch.zeros(is_entry.shape, dtype=self._dtype).masked_fill_(~is_entry, -torch.inf)
        self._base = functional.pad(base, (0, room), value=-torch.inf)[:, None]  # [R, 1, S]

    def begin(self, width: int, staying: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """The first pass: Q = width tokens of a request one after another, each sees those before it and all entries.

        staying: rows of the pass [n] whose entries go into pages as well, and their slots there [n].
        """
        self._width = width
        self._staying = staying
        if self._base is not None:
            own = torch.full((width, width), -torch.inf, dtype=self._dtype).triu_(1)
            self._mask = self._base.repeat(1, width, 1)
            self._mask[:, :, self._used : self._used + width] = own

    def descend(self, parents: torch.Tensor, width: int) -> None:
        """The next pass: Q = width tokens of a request, each a child of the row parents [R * width] of the last pass,
        counted over all requests: it sees what its parent sees, and itself."""
        self._width = width
        self._staying = None
        if self._mask is None:
            if width == 1:
                return
            self._mask = torch.full((1, 1, self._used + self._room), -torch.inf, dtype=self._dtype)
            self._mask[:, :, FIRST_ENTRY : self._used] = 0
        length = self._mask.shape[2]
        self._mask = self._mask.flatten(0, 1).index_select(0, parents).view(self._num_requests, width, length)
        self._mask[:, :, self._used : self._used + width].diagonal(dim1=1, dim2=2).zero_()

    def end(self, rows: torch.Tensor | None = None) -> None:
        """The pass is over: its slots are taken. rows [R]: the one of each request, counted over all, that may have
        children, the last one where there is a single request; None: all of them."""
        self._used += self._width
        self._room -= self._width
        if rows is not None and self._mask is not None:
            self._mask = self._mask.flatten(0, 1).index_select(0, rows)[:, None]

    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `DraftAttention.attend`."""
        if self._staying is not None:
            rows, slots = self._staying
            write_kv(self._kv[layer], keys.index_select(0, rows), values.index_select(0, rows), slots)
        entries = self._entries[layer]
        num_requests, width, end = self._num_requests, self._width, self._used + self._width
        num_kv_heads = keys.shape[1]
        own = entries[:, :, self._used : end]
        own[0] = keys.view(num_requests, width, *keys.shape[1:])
        own[1] = values.view(num_requests, width, *values.shape[1:])
        # The query heads of a key head are the rows of one product: [R, Hkv, Q * group, D].
        group = queries.shape[1] // num_kv_heads
        heads = queries.view(num_requests, width, num_kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
        if self._mask is None:
            entries = entries[:, :, FIRST_ENTRY:end]
        seen_keys, seen_values = entries.transpose(2, 3)
        mask = self._pass_mask(group, seen_keys.shape[2])
        mixed = functional.scaled_dot_product_attention(heads, seen_keys, seen_values, attn_mask=mask, scale=scale)
        return mixed.view(num_requests, num_kv_heads, width, group, -1).transpose(1, 2).reshape(queries.shape)

    def _pass_mask(self, group: int, length: int) -> torch.Tensor | None:
        """For the rows of a product, of `length` keys: [R, 1, Q * group, S]."""
        mask, width = self._mask, self._width
        if mask is None:
            if width == 1:
                return None
            mask = torch.full((1, width, length), -torch.inf, dtype=self._dtype).triu_(length - width + 1)
        return mask[:, :, None].expand(-1, -1, group, -1).reshape(len(mask), 1, width * group, length)
